"""benchmarks/momentum_dtype.py: its rounding is right on average, its runs differ as they say, its page is its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import momentum_dtype  # noqa: E402


def test_stochastic_rounding_is_right_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    for value in (1.001, -1.001, 3e-5, 0.0, 1.0):
        rounded = torch.full((100_000,), value)
        momentum_dtype.round_stochastically_(rounded, generator)
        assert torch.equal(rounded, rounded.bfloat16().float())
        assert len(rounded.unique()) == (1 if value in (0.0, 1.0) else 2)
        # a place of bf16 is 2^-7 of the value at most; five standard errors of a mean of 100,000
        assert abs(float(rounded.double().mean()) - value) <= 5 * 0.5 * 2**-7 * abs(value) / 100_000**0.5 + 1e-7 * abs(
            value
        )


def test_the_ways_differ_and_share_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(momentum_dtype, "WARMUP", 1)  # or the first steps hardly move what starts at zero
    losses = {way: momentum_dtype.train(way, 3, 0, 8, 1.6e-2, 0.25).loss for way in momentum_dtype.WAYS}
    assert len(set(losses.values())) == 4
    assert losses["fp32"] == momentum_dtype.train("fp32", 3, 0, 8, 1.6e-2, 0.25).loss
    assert abs(losses["bf16"] - losses["fp32"]) < 0.5 * abs(losses["fp32, other noise"] - losses["fp32"])


def test_the_page_shows_the_stored_results() -> None:
    stored = json.loads((BENCHMARKS / "results" / "momentum_dtype.json").read_text())
    results = [momentum_dtype.Result(**result) for result in stored["results"]]
    assert momentum_dtype.report(results) in (BENCHMARKS / "results" / "momentum_dtype.md").read_text()
