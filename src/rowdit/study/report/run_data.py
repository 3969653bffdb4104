"""A run of `rowdit train` read back from its folder, whether it finished, diverged, or is still on its way.

Only `config.json` has to be there. A measure that a run doesn't have is a column of NaN, which nothing is drawn of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .reading import StudyError, Table, as_number, find_samples, read_json, read_rows

STEP_COLUMNS = ("loss", "grad_norm", "lr", "images_seen", "optimizer_seconds")
PHASES = ("data", "forward", "backward", "optimizer", "gather", "newton_schulz", "row_step", "ema")
MEASURES = ("val_loss", "score_report", "kid", "accuracy", "evaluation_seconds")
_AGAIN = "start the run again with `rowdit train` and the same `--out`"


@dataclass(frozen=True)
class TrainingRun:
    """One run.

    Attributes:
        config: as it was resolved.
        dataset: fingerprint of the training data; empty if it isn't recorded.
        routing: which parameter went to which algorithm, as text; empty if it isn't recorded.
        log: columns of a row a step: "step", "kind", "step_seconds", "seconds" (of active training so far),
            `STEP_COLUMNS` and `PHASES` (seconds, 0 where a step didn't have one).
        evaluations: columns of a row an evaluation: "step", "seconds", and those of `MEASURES` that have a number.
        by_t: validation loss by bins of t, a column per bin, beside `evaluations`.
        fingerprint: of the last score; empty without one.
        samples: sample grids by step.
        status: "unfinished" is on its way, or was interrupted: a folder doesn't tell these apart.
        reason: why it diverged.
    """

    folder: Path
    config: Mapping[str, Any]
    dataset: str
    routing: str
    log: Mapping[str, list[Any]]
    evaluations: Mapping[str, list[float]]
    by_t: Mapping[str, list[float]]
    fingerprint: Mapping[str, Any]
    samples: Mapping[int, Path]
    status: Literal["finished", "unfinished", "diverged"]
    reason: str

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def optimizer(self) -> str:
        return str(self.setting("optimizer", "name") or "optimizer")

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run; None if the config doesn't say."""
        steps = as_number(self.setting("train", "steps"))
        return int(steps) if math.isfinite(steps) else None

    @property
    def last_step(self) -> int:
        return int(self.log["step"][-1]) if self.log["step"] else 0

    @property
    def skipped(self) -> list[int]:
        """Positions in the log of the steps that were skipped."""
        return [index for index, kind in enumerate(self.log["kind"]) if kind == "skipped"]

    def setting(self, part: str, key: str) -> Any:
        """A field of the config; None if it isn't there."""
        fields = self.config.get(part)
        return fields.get(key) if isinstance(fields, Mapping) else None


def read_run(folder: Path) -> TrainingRun:
    """Reads `folder` as `rowdit train` leaves it, at any time.

    Raises:
        StudyError: `config.json` is missing, or a file is malformed; the message names it and says what to do.
    """
    path = folder / "config.json"
    config = Table(read_json(path, _AGAIN), str(path), _AGAIN)
    for part in ("train", "optimizer"):
        config.table(part)
    rows = read_rows(folder / "log.jsonl", _AGAIN)
    for row in rows:
        for key in ("loss", "seconds", "kind"):
            if key not in row:
                raise StudyError(f"{folder / 'log.jsonl'}: the row of step {row['step']} has no key {key!r}; {_AGAIN}")
    evaluations = read_rows(folder / "evaluations.jsonl", _AGAIN)
    ending = _optional(folder / "finished.json")
    reason = str(ending.get("diverged") or "")
    fingerprints = [row["fingerprint"] for row in evaluations if isinstance(row.get("fingerprint"), Mapping)]
    routing = folder / "optimizer.txt"
    return TrainingRun(
        folder=folder,
        config=config.values,
        dataset=str(_optional(folder / "dataset.json").get("fingerprint", "")),
        routing=routing.read_text(encoding="utf-8", errors="replace").strip() if routing.exists() else "",
        log=_log(rows),
        evaluations=_evaluations(evaluations),
        by_t=_by_t(evaluations),
        fingerprint=fingerprints[-1] if fingerprints else {},
        samples=find_samples(folder),
        status=("diverged" if reason else "finished") if ending else "unfinished",
        reason=reason,
    )


def _optional(path: Path) -> Mapping[str, Any]:
    """A JSON object; an empty one if there is no such file."""
    return Table(read_json(path, _AGAIN), str(path), _AGAIN).values if path.exists() else {}


def _numbers(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [as_number(row.get(key)) for row in rows]


def _log(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    seconds = [value if math.isfinite(value) else 0.0 for value in _numbers(rows, "seconds")]
    log: dict[str, list[Any]] = {"step": _numbers(rows, "step"), "kind": [str(row["kind"]) for row in rows]}
    log |= {"step_seconds": seconds, "seconds": list(itertools.accumulate(seconds))}
    log |= {key: _numbers(rows, key) for key in STEP_COLUMNS}
    for phase in PHASES:
        values = _numbers(rows, f"{phase}_seconds")
        log[phase] = [value if math.isfinite(value) else 0.0 for value in values]
    return log


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    table = {key: _numbers(rows, key) for key in ("step", "seconds")}
    return table | {key: _numbers(rows, key) for key in MEASURES if any(key in row for row in rows)}


def _by_t(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    bins = [row.get("val_loss_by_t") for row in rows]
    tables = [table if isinstance(table, Mapping) else {} for table in bins]
    names = dict.fromkeys(str(name) for table in tables for name in table)
    return {name: [as_number(table.get(name)) for table in tables] for name in names}
