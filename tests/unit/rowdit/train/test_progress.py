"""What is shown: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from rowdit.train import progress as module
from rowdit.train.progress import ConsoleProgress


def _shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    file = io.StringIO()
    monkeypatch.setattr(module, "PLAIN_INTERVAL", 0.0)
    console = Console(file=file, force_terminal=terminal, width=100)
    with ConsoleProgress([("muon-seed0", 2, 1), ("periodic-seed0", 2, 1)], 2, console) as progress:
        progress.start_run("muon-seed0", 0)
        progress.step(1, 0.5, 64)
        progress.step(2, 0.4, 64)
        progress.evaluating(2)
        progress.evaluated(2, "score 12", 1000.0)
        progress.start_run("periodic-seed0", 1)
        progress.step(2, 0.5, 64)
    return file.getvalue()


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _shown(False, monkeypatch)
    assert "\x1b" not in text and "\r" not in text
    lines = text.splitlines()
    assert re.fullmatch(r"muon-seed0: step 1/2, loss 0\.5000, \d+ images/s, \d+:\d\d left in all", lines[0])
    assert "muon-seed0: step 2/2, score 12" in lines
    assert "periodic-seed0: resuming at step 1" in lines


def test_what_is_left_counts_the_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """One evaluation of 1,000 s is ahead when the last run begins, and its steps take no time."""
    assert re.search(r"periodic-seed0: step 2/2, .* 16:4\d left in all", _shown(False, monkeypatch))


def test_a_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _shown(True, monkeypatch)
    assert "\x1b[" in text and "muon-seed0: step 2/2, score 12" in text
