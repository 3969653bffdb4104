"""The benchmark of Newton-Schulz, made for a GPU, runs on a CPU at toy size and reports what it measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import newton_schulz  # noqa: E402

TINY = ["--device", "cpu", "--widths", "24", "--products", "16", "--num", "2", "--rounds", "3", "--calls", "2"]


def test_it_reports_each_contender(capsys: pytest.CaptureFixture[str]) -> None:
    precision = torch.get_float32_matmul_precision()
    try:
        newton_schulz.main(TINY)
    finally:
        torch.set_float32_matmul_precision(precision)
    text = capsys.readouterr().out
    for line in ("24 x 24", "24 x 96"):
        assert text.count(f"| {line}") == (2 if line == "24 x 24" else 4)  # two dtypes; the Gram form of the long one


def test_rates_go_by_the_flops_that_are_computed() -> None:
    options = newton_schulz.parse(TINY)
    direct, gram = newton_schulz.measure(24, 96, torch.float32, options)
    assert (direct["contender"], gram["contender"]) == ("direct, torch", "gram, torch")
    assert direct["over_direct"]["median"] == 1.0
    assert all(0 < f["rate_over_matmul"]["median"] < 1e3 and f["error"] < 1e-4 for f in (direct, gram))
    product = newton_schulz.measure_product(600, 1, torch.float32, options)
    assert product["difference"] < 1e-5 and product["half_over_full"]["num"] == 3


def test_a_gpu_has_all_of_them() -> None:
    assert len(newton_schulz.contenders("cuda", 24, 96)) == 8
    assert list(newton_schulz.contenders("cuda", 24, 24)) == [f"direct, {way}" for way in newton_schulz.WAYS]


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--widths", "0"]])
def test_it_refuses_what_it_cannot_time(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        newton_schulz.parse([*TINY, *arguments])
    assert "give at least 1" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        newton_schulz.parse(["--device", "cuda"])
    assert "no CUDA device" in capsys.readouterr().err
