"""Reading a folder's records strictly: what is missing or malformed is an error with its file, its key and a way out.

A number that isn't finite is no error: runs diverge, and a page has to say so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rowdit.train.log import read_jsonl


class StudyError(ValueError):
    """A folder that no page can be made of; the message names file, key and way out."""


def as_number(value: object) -> float:
    """A JSON value as a float; null, "nan" and anything that isn't a number become NaN."""
    if isinstance(value, bool) or value is None:
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


class Table:
    """A JSON object that knows its file and its place in it, so that a missing key can be named.

    Args:
        values: what was read. where: the file, and the place in it.
        way_out: what to do if something is missing; the end of every error.
    """

    def __init__(self, values: object, where: str, way_out: str) -> None:
        if not isinstance(values, Mapping):
            raise StudyError(f"{where} should be an object, but is {type(values).__name__}; {way_out}")
        self.values, self.where, self.way_out = values, where, way_out

    def get(self, key: str) -> Any:
        if key not in self.values:
            has = ", ".join(map(repr, self.values)) or "none"
            raise StudyError(f"{self.where}: no key {key!r} (it has {has}); {self.way_out}")
        return self.values[key]

    def table(self, key: str) -> Table:
        return Table(self.get(key), f"{self.where}: {key!r}", self.way_out)

    def number(self, key: str) -> float:
        return as_number(self.get(key))


def read_json(path: Path, way_out: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StudyError(f"{path} doesn't exist; {way_out}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"{path} isn't JSON ({error}); {way_out}") from error


def read_rows(path: Path, way_out: str) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file in the order of their steps; none if it doesn't exist."""
    try:
        rows = read_jsonl(path)
    except ValueError as error:
        raise StudyError(f"{error}; {way_out}") from error
    for index, row in enumerate(rows, start=1):
        if not math.isfinite(Table(row, f"{path}, row {index}", way_out).number("step")):
            raise StudyError(f"{path}, row {index}: step is {row['step']!r}, not a number; {way_out}")
    return sorted(rows, key=lambda row: row["step"])


def find_samples(folder: Path) -> dict[int, Path]:
    """The sample grids in a run's folder, by step."""
    grids = {}
    for path in sorted((folder / "samples").glob("step_*.png")):
        step = path.stem.removeprefix("step_")
        if step.isdecimal():
            grids[int(step)] = path
    return grids
