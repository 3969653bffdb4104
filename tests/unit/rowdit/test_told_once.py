"""An error that all ranks meet is told by rank 0 alone; the others tell theirs if it is another one."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from rowdit import cli
from rowdit.commands import ranks

As = Callable[[int], None]


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> As:
    """This process as one of two that torchrun started, one after the other."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def become(rank: int) -> None:
        assert agent is not None
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"error-{rank}.json"))

    return become


def test_the_same_error_is_told_once(as_rank: As, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for rank in (0, 1):
        as_rank(rank)
        assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    told = capsys.readouterr().err
    assert told.count("rowdit: ") == 1 and "nowhere" in told and "rank" not in told
    for rank in (0, 1):  # where torchrun looks for the reason
        reason = json.loads((tmp_path / f"error-{rank}.json").read_text())["message"]
        assert "nowhere" in reason["message"] and "nowhere" in reason["extraInfo"]["py_callstack"]


def test_another_error_is_told_too_and_by_whom(as_rank: As, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, text in ((0, "no images"), (1, "no device")):
        as_rank(rank)
        ranks.tell(text)
    assert capsys.readouterr().err.splitlines() == ["rowdit: no images", "rowdit: rank 1: no device"]


def test_an_error_of_another_rank_alone_is_told(
    as_rank: As, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks.told_by_first, "__defaults__", (timedelta(seconds=0.2),))
    as_rank(1)
    ranks.tell("no device")
    assert capsys.readouterr().err == "rowdit: rank 1: no device\n"


def test_mistaken_arguments_are_told_once(as_rank: As, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        as_rank(rank)
        with pytest.raises(SystemExit) as refused:
            cli.main(["report"])
        assert refused.value.code == 2
    assert capsys.readouterr().err.count("Required options") == 1


def test_what_follows_from_rank_0s_end_is_no_error_of_its_own(
    as_rank: As, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    as_rank(0)
    ranks.tell("the folder is in use")
    as_rank(1)
    monkeypatch.setattr("rowdit.commands.report.run", lose)
    assert cli.main(["report", "x"]) == 1
    assert capsys.readouterr().err == "rowdit: the folder is in use\n"


def test_under_torchrun_one_rank_tells(tmp_path: Path) -> None:
    """Rank 0 alone finds the folder in use; what rank 1 then meets is a lost connection."""
    (tmp_path / "run").mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rowdit"]
    with open(tmp_path / "run" / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [*command, "train", "--no-evaluate", "--out", str(tmp_path / "run")],
            capture_output=True, text=True, env=environment, timeout=120, check=False,
        )  # fmt: skip
    before, _, after = done.stderr.partition("torch/distributed/elastic")
    assert done.returncode != 0
    assert before.count("rowdit: another process is writing into") == 1 and "Traceback" not in before
    assert "rowdit: another process is writing into" in after  # torchrun's own report names it too
