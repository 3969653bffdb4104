"""The benchmark of the row step's kernel runs at toy size and reports what it measured."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import row_kernel  # noqa: E402


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on PATH")
def test_row_kernel_reports_each_length() -> None:
    options = row_kernel.parse(["--lengths", "8", "3000", "--numel", "6000", "--matrices", "2", "--rounds", "3"])
    measured = {length: row_kernel.measure(length, options) for length in options.lengths}
    data, text = row_kernel.report(measured, options)
    assert list(data["row_over_adamw_fused"]) == ["8", "3000"]
    for length, times in measured.items():
        assert {name: len(values) for name, values in times.items()} == {"row step": 3, "AdamW fused": 3}
        ratios = sorted(a / b for a, b in zip(times["row step"], times["AdamW fused"], strict=True))
        assert data["row_over_adamw_fused"][str(length)] == ratios[1]
    assert "| 3000 |" in text


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--lengths", "4", "0"]])
def test_row_kernel_refuses_what_it_cannot_time(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        row_kernel.parse(arguments)
    assert "give at least 1" in capsys.readouterr().err
