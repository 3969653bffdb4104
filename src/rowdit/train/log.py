"""Records on disk: JSON Lines, with a CSV beside, that survive a kill and a resume; JSON files, whole or absent."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file; none if it doesn't exist. A last line that a kill cut short is left out.

    Raises:
        ValueError: a line before the last isn't JSON; the file is named.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not JSON: {line[:60]!r}") from None
    return rows


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that `path` holds either the old content or all of the new one."""
    write_bytes(path, (json.dumps(_strict(value), indent=1, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: beside it, to the disk, then renamed over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


class JsonlLog:
    """Appends rows with a `step` to a JSON Lines file, and their numbers and words to a CSV file beside it.

    Args:
        path: of the JSON Lines file; its folder is made. The CSV has the same name and the suffix `.csv`.
        last_step: rows of later steps are dropped: they belong to work that was lost after the last checkpoint, and
            will be done again.

    Attributes:
        rows: what stood there and was kept; new rows aren't held in memory.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        self.rows = [row for row in read_jsonl(path) if row["step"] <= last_step]
        write_bytes(path, "".join(_lines(self.rows)).encode())
        self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._csv = _CsvLog(path.with_suffix(".csv"), self.rows)

    def append(self, row: dict[str, Any]) -> None:
        """Adds one row and hands it to the operating system."""
        self._file.writelines(_lines([row]))
        self._file.flush()
        self._csv.append(row)

    def sync(self) -> None:
        """Forces the rows to the disk; before a checkpoint, so that it is never ahead of its log."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        self._csv.close()

    def __enter__(self) -> JsonlLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _CsvLog:
    """The rows' plain values under a header; the first row decides on the columns."""

    def __init__(self, path: Path, rows: list[dict[str, Any]]) -> None:
        self._columns: list[str] = []
        self._path = path
        lines = "".join(self._line(row) for row in rows)
        write_bytes(path, lines.encode())
        self._file: IO[str] = open(path, "a", encoding="utf-8", newline="")  # noqa: SIM115 (closed by close)

    def append(self, row: dict[str, Any]) -> None:
        self._file.write(self._line(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _line(self, row: dict[str, Any]) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not self._columns:
            self._columns = [key for key, value in row.items() if not isinstance(value, (dict, list, tuple))]
            writer.writerow(self._columns)
        writer.writerow([row.get(column, "") for column in self._columns])
        return text.getvalue()


def _lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        yield json.dumps(_strict(row), allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become the strings "nan", "inf", "-inf", which `float` reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value
