"""Memory of a rank as `rowdit plan` predicts it, against the resident memory of real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan_memory.py"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the kernel's figures, Linux only")
@pytest.mark.parametrize("case", ["wide, 2 ranks", "deep, 4 ranks, 2 micro-batches"])
def test_predicted_is_measured_within_a_tenth(case: str, tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--cases", case, "--out", str(out)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(out.read_text())
    assert row["measured_peak"] > 100e6  # large enough for the figure to mean something
    assert 0.9 < row["predicted_over_measured"] < 1.1, row
