"""The real step of the large presets on up to thousands of ranks, under fake tensors: counted against the plan."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

import rowmuon
from rowdit.cost.live_bytes import LiveBytes

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import full_size  # noqa: E402
from full_size import Row, measure  # noqa: E402

NUM_PARAMETERS = {
    "1.3B": 1_283_776_528,
    "2B": 1_978_966_032,
    "4B": 4_035_082_256,
    "9B": 9_117_171_728,
    "15B": 15_187_220_496,
}


SMALL = "S/2"
"""Where the number of parameters makes no difference."""


@pytest.fixture
def fake_ranks() -> Iterator[Any]:
    """``fake_ranks(4096)``: this process is rank 0 of that many, which aren't there."""

    def start(num_ranks: int) -> None:
        assert not dist.is_initialized(), "a process group was left over"
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def assert_as_planned(row: Row) -> None:
    assert row.disagreements() == []
    assert row.num_parameters == NUM_PARAMETERS[row.preset]
    assert row.refresh_flops > 0 and row.refresh_bytes_sent > 0 and row.refresh_peak_bytes > 0


@pytest.mark.parametrize(
    ("name", "num_ranks", "refresh"),
    [
        ("1.3B", 8, "exchange"),
        ("1.3B", 4096, "gather"),
        pytest.param("15B", 64, "exchange", marks=pytest.mark.slow),
        ("15B", 4096, "exchange"),
        pytest.param("1.3B", 8, "gather", marks=pytest.mark.slow),
        pytest.param("2B", 256, "gather", marks=pytest.mark.slow),
        pytest.param("4B", 1024, "exchange", marks=pytest.mark.slow),
        pytest.param("9B", 8, "exchange", marks=pytest.mark.slow),
        pytest.param("15B", 4096, "gather", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_what_its_plan_says(fake_ranks: Any, name: str, num_ranks: int, refresh: str) -> None:
    fake_ranks(num_ranks)
    row = measure(name, num_ranks, num_ranks, refresh, 3)
    assert_as_planned(row)
    assert row.row_bytes_sent == row.row_collectives == row.row_flops == 0
    # What the layout's page derives: a gather sends each rank's rows to all others (here padded to the longest shard),
    # an exchange sends them to one owner, and the owner's results back.
    assert row.num_busy_ranks == (num_ranks if refresh == "gather" else min(num_ranks, row.num_matrices))


@pytest.mark.parametrize(("num_ranks", "shares"), [(64, True), (4096, False)])
def test_replicas_share_where_it_pays(fake_ranks: Any, num_ranks: int, shares: bool) -> None:
    """8-way shards: on 8 replicas eightfold work costs more than a gather, on 512 the padded gather costs more."""
    fake_ranks(num_ranks)
    row = measure("15B", num_ranks, 8, "exchange", 3)
    assert_as_planned(row)
    assert row.shares_replicas is shares


def test_all_presets_have_their_parameters(fake_ranks: Any) -> None:
    fake_ranks(8)
    mesh = full_size.init_device_mesh("cpu", (8,))
    with full_size.FakeTensorMode():
        found = {name: full_size.fake_parameters(name, mesh)[1] for name in full_size.PRESETS}
    assert found == NUM_PARAMETERS


@pytest.mark.parametrize("num_shards", [64, 8])
@pytest.mark.parametrize("refresh", ["gather", "exchange"])
def test_the_mean_over_ranks_is_that_of_all_routes(fake_ranks: Any, refresh: str, num_shards: int) -> None:
    fake_ranks(64)
    shape = (64,) if num_shards == 64 else (64 // num_shards, num_shards)
    mesh = full_size.init_device_mesh("cpu", shape)
    with full_size.FakeTensorMode():
        model, _ = full_size.fake_parameters(SMALL, mesh)
        plan = full_size.optimizer_for(model, refresh, 3, "never").plan("refresh")
    sent = [plan.bytes_sent(rank) for rank in range(64)]
    assert full_size.mean_bytes_of_refresh(plan) == pytest.approx(sum(sent) / 64, rel=1e-12)


def test_a_value_read_in_a_row_step_fails(fake_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import rowmuon.shards

    original = rowmuon.shards.row_step_

    def reads_back(weights: Any, momenta: Any, grads: Any, **settings: Any) -> None:
        grads[0].square().sum().item()
        original(weights, momenta, grads, **settings)

    monkeypatch.setattr(rowmuon.shards, "row_step_", reads_back)
    fake_ranks(8)
    assert measure(SMALL, 8, 8, "exchange", 1).disagreements() == []  # no row step, so nothing is read
    with pytest.raises(DataDependentOutputException):
        measure(SMALL, 8, 8, "exchange", 3)


def test_a_value_read_in_a_refresh_fails(fake_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import rowmuon.runtime

    original = rowmuon.runtime.newton_schulz

    def reads_back(matrices: Any, *arguments: Any, **settings: Any) -> Any:
        if bool(matrices.isfinite().all()):
            return original(matrices, *arguments, **settings)
        raise AssertionError

    monkeypatch.setattr(rowmuon.runtime, "newton_schulz", reads_back)
    fake_ranks(8)
    with pytest.raises(DataDependentOutputException):
        measure(SMALL, 8, 8, "exchange", 1)


@pytest.mark.parametrize("kind", ["refresh", "row"])
def test_a_full_tensor_fails(fake_ranks: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    import rowmuon.optimizer

    original = rowmuon.optimizer.make_shard

    def gathers(parameter: DTensor, momentum: DTensor, *arguments: Any) -> Any:
        if parameter.shape == (6 * 384, 384) and momentum._local_tensor._version == {"refresh": 0, "row": 1}[kind]:
            momentum.full_tensor()
        return original(parameter, momentum, *arguments)

    monkeypatch.setattr(rowmuon.optimizer, "make_shard", gathers)
    fake_ranks(8)
    wrong = measure(SMALL, 8, 8, "exchange", 3).disagreements()
    assert any(problem.startswith(f"{kind}_collectives") for problem in wrong)


# ---------------------------------------------------------------------------------------------------- the stored page
RESULTS = ROOT / "benchmarks" / "results" / "full_size.json"


def stored_rows() -> list[Row]:
    return [Row(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))]


def test_the_page_shows_the_stored_results() -> None:
    page = (ROOT / "docs" / "full-size.md").read_text(encoding="utf-8")
    assert full_size.insert(page, full_size.tables(stored_rows())) == page


def test_the_stored_results_are_complete() -> None:
    rows = stored_rows()
    settings = {(r.preset, r.num_ranks, r.refresh, r.period) for r in rows if r.num_shards == r.num_ranks}
    expected = [
        (p, n, refresh, k)
        for p in full_size.PRESETS
        for n in full_size.RANKS
        for refresh in ("gather", "exchange")
        for k in (1, 3)
    ]
    assert settings == set(expected)
    hsdp = {(r.preset, r.num_ranks, r.sharing) for r in rows if r.num_shards < r.num_ranks}
    both_ways = {full_size.HSDP_PRESET: tuple(full_size.SHARING)}
    assert hsdp == {
        (p, n, s) for p in full_size.PRESETS for n in full_size.HSDP_RANKS for s in both_ways.get(p, ("chosen",))
    }
    for row in rows:
        assert_as_planned(row)


def test_the_stored_results_are_those_of_the_plan_today(fake_ranks: Any) -> None:
    """One of them, run again: whoever changes the plan writes the page anew."""
    fake_ranks(64)
    row = measure("2B", 64, 64, "exchange", 3)
    assert row in stored_rows()


def test_tables_go_between_their_marks() -> None:
    page = "before\n<!-- a -->\nold\n<!-- /a -->\nafter"
    assert full_size.insert(page, {"a": "new"}) == "before\n<!-- a -->\nnew\n<!-- /a -->\nafter"
    with pytest.raises(ValueError, match="no place for the table 'b'"):
        full_size.insert(page, {"b": "new"})


@pytest.mark.parametrize("shape", [(8,), (4096,), pytest.param((2, 4), marks=pytest.mark.slow)])
def test_gram_row_steps_are_what_their_plan_says(fake_ranks: Any, shape: tuple[int, ...]) -> None:
    """FLOPs, collectives and bytes of both kinds of step, with nothing read by the host; and the memory."""
    fake_ranks(math.prod(shape))
    mesh = init_device_mesh("cpu", shape)
    with FakeTensorMode():
        model, _ = full_size.fake_parameters(SMALL, mesh)
        groups = rowmuon.param_groups(model, rowmuon.rules.DIT)
        optimizer = rowmuon.PeriodicRowMuon(groups, 1e-3, period=3, cheap_step="gram_row")
        for kind in ("refresh", "row"):
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            plan = optimizer.plan(kind)
            with FlopCounterMode(display=False) as counter, full_size.Collectives() as seen, LiveBytes() as live:
                optimizer.step()
            assert counter.get_total_flops() == plan.num_flops(0) > 0
            done = optimizer.traffic[kind]
            assert done.num_collectives == seen.num == plan.num_collectives(0)
            assert done.bytes_sent == plan.bytes_sent(0)
            assert live.peak <= plan.peak_bytes(0) <= 1.1 * live.peak
            assert (kind == "refresh") == (plan.num_collectives(0) > 0)
