"""The benchmark of the input pipeline runs end to end, and every contender reads all that it is given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import input_pipeline  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_every_contender_reads_every_batch(tmp_path, monkeypatch, format):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    workload = input_pipeline.Workload("toy", 40, 30, format, 16, 64)
    input_pipeline.write_all(tmp_path, workload)
    counts = {name: list(run()) for name, run in input_pipeline.contenders(tmp_path, workload).items()}
    assert len(counts) == 10
    assert all(count == [32, 32] for count in counts.values()), counts


def test_the_report_has_a_row_for_every_pair():
    names = {name for pair in input_pipeline.PAIRS for name in pair}
    rates = {"photographs": {name: [100.0 + place, 110.0] for place, name in enumerate(sorted(names))}}
    text = input_pipeline.report(rates, {"device": "cpu", "cpu": "a", "num_cores": 2, "torch": "b", "python": "c"}, 2)
    for ours, theirs in input_pipeline.PAIRS:
        assert f"{ours} / {theirs}" in text
