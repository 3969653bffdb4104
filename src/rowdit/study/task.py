"""One run of a grid or a study: a comparison in which one point is changed, a label, a seed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rowdit.evaluate.fingerprint import digest
from rowdit.study.comparison import Comparison
from rowdit.train.config import ConfigError, RunConfig, from_dict, nearest, to_dict

Grid = dict[str, list[Any]]
Point = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """One run.

    Attributes:
        label: the optimizer's, in the comparison.
        seed: of the run.
        point: what was changed to get the comparison; for tables.
        comparison: with the changes in it.
        case: name of the study's case that it belongs to.
    """

    label: str
    seed: int
    point: dict[str, Any]
    comparison: Comparison
    case: str = ""

    @property
    def config(self) -> RunConfig:
        return self.comparison.run_config(self.label, self.seed)

    @functools.cached_property
    def name(self) -> str:
        """Label, a hash of all settings that aren't defaults, and the seed. A setting that a later version adds, at its
        default, leaves names as they are, and so a finished run finished."""
        return (
            f"{self.label}-{digest(_without_defaults(self.comparison.run_config(self.label, 0)))[:10]}-seed{self.seed}"
        )


def _without_defaults(config: Any) -> dict[str, Any]:
    """A config as plain data, without what equals its default."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found[field.name] = _without_defaults(value)
        elif field.default is dataclasses.MISSING or value != field.default:
            found[field.name] = json.loads(json.dumps(value))
    return found


def make_tasks(comparison: Comparison, label: str, grid: Grid, seeds: Sequence[int]) -> list[Task]:
    """Every point of the grid with every seed; seeds are the outer loop, so that a stopped sweep has whole grids.

    What is asked for twice (a value, a seed, 1 and 1.0) is one task: two would write into the same folder.

    Raises:
        ConfigError: an unknown label or key, or a value or seed that its config refuses.
    """
    if label not in comparison.optimizers:
        raise ConfigError(f"there is no optimizer {label!r}{nearest(label, comparison.optimizers)}")
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    varied = [(point, change(comparison, label, point)) for point in points]
    tasks: dict[str, Task] = {}
    for seed in seeds:
        for point, changed in varied:
            task = Task(label, seed, point, changed)
            _ = task.config  # made here once, so that a bad seed is refused before any work
            tasks.setdefault(task.name, task)
    return list(tasks.values())


def change(comparison: Comparison, label: str, point: Point) -> Comparison:
    """The comparison with some fields changed. A key without a dot is that optimizer's, one with a dot the run's.

    Raises:
        ConfigError: an unknown key, a section in place of a key, or a value that its config refuses.
    """
    changed = comparison
    for section, values in _by_section(changed, label, point).items():
        old = changed.optimizers[section[1]] if len(section) == 2 else getattr(changed, section[0])
        new = from_dict(type(old), to_dict(old) | values, ".".join(section))
        field = {**changed.optimizers, section[1]: new} if len(section) == 2 else new
        fields: dict[str, Any] = {section[0]: field}
        changed = dataclasses.replace(changed, **fields)
    return changed


def _by_section(comparison: Comparison, label: str, point: Point) -> dict[tuple[str, ...], dict[str, Any]]:
    """The point's values under the section that each belongs to, ("train",) or ("optimizers", label)."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    whole = to_dict(comparison) if point else {}
    for key, value in point.items():
        path = key.split(".") if "." in key else ["optimizers", label, key]
        table: Any = whole
        for part in path[:-1]:
            table = table.get(part) if isinstance(table, dict) else None
        if not isinstance(table, dict) or path[-1] not in table:
            known = table if isinstance(table, dict) else whole
            raise ConfigError(f"unknown key {key}{nearest(path[-1] if known is table else path[0], known)}")
        if isinstance(table[path[-1]], dict) and not isinstance(value, dict):
            raise ConfigError(f"{key} is a section; name one of its keys: {', '.join(table[path[-1]])}")
        found.setdefault(tuple(path[:-1]), {})[path[-1]] = value
    return found
