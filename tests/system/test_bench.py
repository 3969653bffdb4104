"""`rowdit bench` from its command line to its JSON, in one process and on two ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rowdit.cli import main

SMALL = ["--sizes", "16", "--depth", "1", "--rounds", "2", "--pairs", "2", "--peers", "torch_muon"]


def rowdit(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rowdit", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def test_json_is_alone_on_standard_output(tmp_path: Path) -> None:
    done = rowdit(*SMALL, "--json", "--chunked", "--save", str(tmp_path / "sub" / "step.one"))
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    for name in ("row_over_adamw_fused", "k1_over_torch_muon", "k3_over_k1", "refresh_over_matmul"):
        assert data[name] > 0 and data["reached"][name] in (True, False)
        assert name in done.stderr
    assert data["fastest_setting"]["16"] in ("compile=True", "compile=False")
    assert data["peers"]["torch_muon"]["correct"] is True
    assert json.loads((tmp_path / "sub" / "step.one.json").read_text()) == data
    assert (tmp_path / "sub" / "step.one.md").read_text().startswith("# Optimizer step, one process")


def test_on_ranks() -> None:
    done = rowdit(*SMALL, "--json", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["setup"]["num_ranks"] == 2 and data["peers"]["torch_muon"]["correct"] is True
    assert data["k1_over_torch_muon"] > 0


def test_nothing_got_worse() -> None:
    """The guard itself: a limit that is passed is in the message."""
    done = rowdit("--guard")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recompilations" in done.stdout or not (shutil.which("g++") or shutil.which("clang++"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "M"], "size 'M' is unknown"),
        (["--rounds", "0"], "--rounds is 0: must be at least 1"),
        (["--peers", "adam"], "peer 'adam' is unknown: take some of torch_muon"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
