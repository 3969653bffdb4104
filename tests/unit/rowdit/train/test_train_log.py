"""Records on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rowdit.train.log import JsonlLog, read_jsonl, write_bytes, write_json


def test_rows_after_the_last_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.jsonl"
    with JsonlLog(path, 0) as log:
        for step in range(1, 6):
            log.append({"step": step})
    with JsonlLog(path, 3) as log:
        assert [row["step"] for row in log.rows] == [1, 2, 3]
        log.append({"step": 4, "again": True})
    assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3, 4]


def test_rows_are_there_at_once(tmp_path: Path) -> None:
    with JsonlLog(tmp_path / "log.jsonl", 0) as log:
        log.append({"step": 1})
        assert read_jsonl(tmp_path / "log.jsonl") == [{"step": 1}]


def test_a_cut_last_line_is_left_out_and_an_earlier_one_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match="log.jsonl, line 2: not JSON"):
        read_jsonl(path)


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    with JsonlLog(tmp_path / "log.jsonl", 0) as log:
        log.append({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    row = json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=pytest.fail)
    assert math.isnan(float(row["loss"])) and float(row["grad_norm"]) == math.inf


def test_a_file_is_old_or_new_never_half(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"value": 1})
    with pytest.raises(TypeError):
        write_json(path, {"value": object()})
    assert json.loads(path.read_text()) == {"value": 1}
    with pytest.raises(TypeError):
        write_bytes(path, "not bytes")  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert json.loads(path.read_text()) == {"value": 1}


def test_the_csv_holds_the_same_rows(tmp_path: Path) -> None:
    """Also after a resume, which drops rows; nested values stay in the JSON Lines alone."""
    import csv

    with JsonlLog(tmp_path / "log.jsonl", 0) as log:
        for step in range(1, 5):
            log.append({"step": step, "kind": 'a "row", or so', "by_t": {"0": 1.0}, "loss": 0.5 / step})
    with JsonlLog(tmp_path / "log.jsonl", 2) as log:
        log.append({"step": 3, "kind": "row", "by_t": {"0": 1.0}, "loss": math.nan, "new": 1})
    with open(tmp_path / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["kind"] for row in rows] == ['a "row", or so', 'a "row", or so', "row"]
    assert [float(row["loss"]) for row in rows][:2] == [0.5, 0.25] and math.isnan(float(rows[2]["loss"]))
    assert set(rows[0]) == {"step", "kind", "loss"}
