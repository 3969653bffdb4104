"""overlap="backward" where no other rank is needed: what is sent ahead and in which order, and settings."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from torch import nn

import rowmuon
from plan_simulation import OPTIONS, entries_on_one_grid
from rowmuon.buckets import travels
from rowmuon.layout import ROWS, Grid, Layout, Split
from rowmuon.plan import Entry, PlanOptions, StepPlan, build_plan

WORLD, ROWS_, COLS = 4, 64, 16
MATRIX = ROWS_ * COLS * 2  # bytes, as sent


def plan_of(num_entries: int, **options: object) -> StepPlan:
    """Matrices of one shape, each split by rows over four ranks; the last is the deepest."""
    layout = Layout((ROWS_, COLS), 0, 1, Grid((WORLD,), tuple(range(WORLD))), (Split(0, ROWS, WORLD, ROWS_, 1),))
    entries = [
        Entry(f"w{i}", layout, torch.float32, "cpu", (), 1, depth=(i + 0.5) / num_entries) for i in range(num_entries)
    ]
    return build_plan(entries, range(num_entries), PlanOptions(**{"bucket_bytes": 1, **options}))  # type: ignore[arg-type]


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
def test_buckets_follow_backward_and_bytes_bound_what_goes_ahead(refresh) -> None:
    """Under way a bucket is a quarter of each of its matrices, and those that a rank owns; in a gather that is all."""
    in_a_bucket = WORLD if refresh == "exchange" else 1
    bytes_of_bucket = in_a_bucket * MATRIX // WORLD + MATRIX
    for allowed, expected in ((1, 2), (3 * bytes_of_bucket, 3), (4 * bytes_of_bucket - 1, 3), (1 << 30, 6)):
        plan = plan_of(6 * in_a_bucket, refresh=refresh, ahead_bytes=allowed)
        assert plan.ahead == tuple(range(expected))
        order = [matrix.entry for bucket in plan.buckets for matrix in bucket.matrices]
        of_buckets = [sorted(order[i : i + in_a_bucket]) for i in range(0, len(order), in_a_bucket)]
        assert list(itertools.chain(*reversed(of_buckets))) == list(range(6 * in_a_bucket))
    usual = plan_of(6 * in_a_bucket, refresh=refresh)
    assert usual.ahead == () and usual.buckets[0].matrices[0].entry == 0


@given(entries_on_one_grid(most=8), OPTIONS)
def test_what_goes_ahead_are_the_first_buckets_that_travel(entries: list[Entry], options: PlanOptions) -> None:
    plan = build_plan(entries, range(len(entries)), options)
    travelling = [i for i, bucket in enumerate(plan.buckets) if travels(bucket)]
    assert list(plan.ahead) == travelling[: len(plan.ahead)]
    assert len(plan.ahead) >= min(2, len(travelling)) or not options.ahead_bytes
    if options.ahead_bytes:
        shallowest = [min(entries[i].depth for i in bucket.layouts) for bucket in plan.buckets]
        assert shallowest == sorted(shallowest, reverse=True)
    assert not build_plan(entries, [], options).ahead


def test_what_a_plan_is_for_shows_in_its_order_and_sums_alone() -> None:
    entries = list(plan_of(8).entries)
    usual, ahead = (build_plan(entries, range(8), PlanOptions(bucket_bytes=1, ahead_bytes=n)) for n in (0, 1 << 20))
    for rank in range(WORLD):
        assert usual.bytes_sent(rank) == ahead.bytes_sent(rank)
        assert usual.num_collectives(rank) == ahead.num_collectives(rank)
        assert usual.num_flops(rank) == ahead.num_flops(rank)


def test_settings() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match="overlap='forward' is neither None nor 'backward'"):
        rowmuon.PeriodicRowMuon([weight], overlap="forward")  # type: ignore[arg-type]
    for bad in (-1, 1.5, True):
        with pytest.raises(ValueError, match=f"ahead_bytes={bad}"):
            PlanOptions(ahead_bytes=bad)  # type: ignore[arg-type]
    assert rowmuon.Muon([weight], overlap="backward").options.ahead_bytes > 0
    assert rowmuon.Muon([weight]).options == dataclasses.replace(PlanOptions(), ahead_bytes=0)


def test_one_process_has_nothing_to_send_and_needs_no_hook() -> None:
    weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    pair = [rowmuon.PeriodicRowMuon([w], overlap=o) for w, o in zip(weights, ("backward", None), strict=True)]  # type: ignore[arg-type]
    assert not weights[0]._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    for step in range(4):
        for weight, optimizer in zip(weights, pair, strict=True):
            with optimizer.accumulate():
                (weight.sin().sum() * step).backward()
            weight.sum().backward()
            weight.grad.mul_(0.5)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*weights)


def test_a_norm_without_a_limit_touches_no_gradient() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.full((4, 4), float("inf"))
    assert float(rowmuon.clip_grad_norm_([weight], float("inf"))) == float("inf")
    assert weight.grad._version == 0 and bool(weight.grad.isinf().all())
