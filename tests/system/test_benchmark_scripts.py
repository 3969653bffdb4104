"""The benchmark scripts run end to end at toy size, count what they should, and judge by their own numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import overlap_step  # noqa: E402
import reporting  # noqa: E402
import sharded_step  # noqa: E402
import step_share  # noqa: E402
import train_step  # noqa: E402


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Two ranks at toy size, all of our methods and the baseline."""
    trace = tmp_path_factory.mktemp("trace")
    methods = [name for name in sharded_step.METHODS if name not in sharded_step.PEERS]
    arguments = ["--ranks", "2", "--hidden", "32", "--depth", "1", "--rounds", "1", "--timeout", "240"]
    options = sharded_step.parse([*arguments, "--trace", str(trace), "--methods", *methods])
    run = sharded_step.run_at(None, options)
    assert sorted(path.name for path in trace.iterdir()) == ["exchange.json.gz", "gather.json.gz"]
    return run


def test_sharded_step_counts(sharded_run: dict) -> None:
    methods, numel = sharded_run["methods"], 18 * 32 * 32
    assert sharded_run["num_parameters"] == numel
    # Two ranks: the baseline's rank sends its half in fp32, the gather in bf16, every step or every third.
    assert methods["vanilla"]["logical"] == numel / 2 * 4
    assert methods["gather K=1"]["logical"] == numel / 2 * 2
    assert methods["gather K=3"]["logical"] == pytest.approx(numel / 2 * 2 / 3)
    # Half of what a rank holds goes to the other's matrices, and as much comes home: on average a quarter each way.
    assert methods["exchange K=1"]["logical"] == numel / 4 * 2 * 2
    if sharded_run["network"]["kind"] == "namespaces":
        for name, method in methods.items():
            assert method["wire"] > method["logical"], name
        assert methods["exchange K=3"]["row_wire_max"] < 2000  # the barrier of the measurement alone
    else:
        assert methods["vanilla"]["wire"] is None


def test_sharded_step_compares_like_with_like(sharded_run: dict) -> None:
    for name, method in sharded_run["methods"].items():
        assert method["computes_whole"], (name, method["cosines"])
        assert method["cosines"]["shard"] < 0.99  # the known fault would be seen
        if method["difference"] is not None:
            assert method["difference"] < 0.1, name  # bf16 Newton-Schulz of bf16 or fp32 directions
    assert sharded_run["methods"]["exchange K=1"]["difference"] > 0
    traced = sharded_run["traces"]["gather K=1"]
    assert traced["collectives"] > 0
    assert 0 <= traced["spanned"] <= traced["orthogonalizations"]


def test_sharded_step_judges_by_its_numbers() -> None:
    def method(name: str, milliseconds: float, logical: float, blocked: float | None = None) -> sharded_step.Measured:
        spread = reporting.Spread.of([milliseconds / 1e3])
        blocked = None if blocked is None else blocked / 1e3
        same = {"whole": 1.0, "shard": 0.9}
        return sharded_step.Measured(name, spread, spread, None, logical, logical, None, None, blocked, same, None)

    measured = {
        m.name: m
        for m in (
            method("vanilla", 1000, 1200),
            method("gather K=1", 700, 600),
            method("gather K=1 no-overlap", 800, 600, blocked=300),
            method("gather K=3", 340, 200),
            method("exchange K=1", 260, 300),
            method("exchange K=3", 90, 100),
        )
    }
    found = {v["what"]: v["reached"] for v in sharded_step.verdicts(measured, 4, with_time=True)}
    assert found == {
        "gather K=3: less time than vanilla": True,
        "gather K=3: fewer logical bytes than vanilla": True,
        "exchange K=1: less time than vanilla": False,
        "exchange K=1: fewer logical bytes than vanilla": True,
        "exchange K=3: less time than vanilla": False,
        "exchange K=3: fewer logical bytes than vanilla": True,
        "gather K=3: fewer logical bytes than gather K=1": True,
        "gather: communication hidden": False,
    }


@pytest.mark.parametrize(
    ("name", "num_ranks", "less"),
    [("exchange K=1", 4, 0.75), ("exchange K=3", 4, 11 / 12), ("exchange K=3", 2, 5 / 6), ("gather K=3", 4, 0.83)],
)
def test_sharded_step_byte_targets(name: str, num_ranks: int, less: float) -> None:
    assert sharded_step.byte_target(name, num_ranks)[0] == pytest.approx(less)


def test_train_step() -> None:
    arguments = ["--ranks", "2", "--hidden", "64", "--depth", "1", "--batch", "2", "--rounds", "1", "--timeout", "240"]
    command = [sys.executable, str(BENCHMARKS / "train_step.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in train_step.METHODS:
        assert f"| {name} " in done.stdout
    assert "With `vanilla` the optimizer takes" in done.stdout


def test_overlap_step_compares_within_a_round() -> None:
    pair = ("exchange K=1", "exchange K=1, backward")
    assert overlap_step.names(overlap_step.parse(["--refresh", "exchange"])) == list(pair)
    seconds = [{"whole": [2.0, 4.0], "step": [1.0, 1.0]}, {"whole": [1.0, 2.0], "step": [0.5, 0.25]}]
    faster = [{"whole": [0.1, 0.1], "step": [0.1, 0.1]}] * 2
    ranks = [
        {"seconds": dict(zip(pair, by, strict=True)), "buckets": dict.fromkeys(pair, [1, 2])}
        for by in (faster, seconds)
    ]
    found = overlap_step.summarize(ranks)  # the slowest rank counts
    assert found[pair[1]]["less"] == {"whole": 1.5, "step": 0.625} and found[pair[1]]["less_of_whole"] == 0.5
    assert found[pair[0]]["less"] == {"whole": 0.0, "step": 0.0}


def test_train_step_predicts_from_the_share() -> None:
    ranks = [
        {"seconds": {"vanilla": {"train": [10.0], "optimize": [4.0]}, "ours": {"train": [6.9], "optimize": [1.0]}}},
        {"seconds": {"vanilla": {"train": [9.0], "optimize": [3.0]}, "ours": {"train": [7.0], "optimize": [0.5]}}},
    ]
    found = train_step.summarize(ranks)  # the slowest rank counts
    assert found["vanilla"]["share"] == pytest.approx(0.4)
    assert found["ours"]["less"] == pytest.approx(0.3)
    assert found["ours"]["predicted"] == pytest.approx(0.3)


def test_step_share(capsys: pytest.CaptureFixture[str]) -> None:
    step_share.main(["--preset", "toy", "--batch", "1", "--rounds", "1"])
    printed = capsys.readouterr().out
    for name in ("AdamW fused", "Muon", "K = 3"):
        assert f"| {name} " in printed


@pytest.mark.parametrize(("k3", "reached"), [(0.15, True), (0.2, False)])
def test_step_share_judges_by_its_numbers(k3: float, reached: bool) -> None:
    seconds = {"pass": [1.0], "AdamW fused": [0.1], "Muon": [0.4], "K = 3": [k3]}
    options = step_share.parse(["--preset", "toy"])
    data, text = step_share.report(seconds, num_flops=3_000_000, rate=1e7, options=options)
    assert data["k3_share_over_adamw_share"] == pytest.approx(k3 / (1 + k3) / (0.1 / 1.1))
    assert data["reached"] is reached and ("**not reached**" in text) is not reached
    assert "can't be under about\n1.0 times AdamW's" in text
