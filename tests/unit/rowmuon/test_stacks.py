"""Who adds up which Gram matrices and computes which factors: for any layout, up to thousands of ranks."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given, settings

from plan_simulation import SMALL_MESHES, entries_on_one_grid
from rowmuon.factors import gram_shape
from rowmuon.layout import ROWS, Grid, Layout, Split
from rowmuon.plan import Entry, PlanOptions, StepPlan, build_plan
from rowmuon.stacks import mean_layout, rows_held

OPTIONS = PlanOptions(cheap_step="gram_row", bucket_bytes=3000)


def plan_of(entries: list[Entry], options: PlanOptions) -> StepPlan:
    kept = [dataclasses.replace(entry, gram=gram_shape(entry.layout, options, torch.bfloat16)) for entry in entries]
    return build_plan(kept, range(len(kept)), options)


def check(plan: StepPlan) -> None:
    """Every block has one owner and goes to all; every row of a mean is someone's; no rank owns more than its turn."""
    blocks = {(i, k) for i in plan.renewed for k in range(plan.entries[i].gram.num_blocks)}  # type: ignore[union-attr]
    computed: Counter[tuple[int, int]] = Counter()
    gathered: Counter[tuple[int, int]] = Counter()
    for renewal in plan.renewals:
        owners: Counter[int] = Counter()
        num_shards = renewal.stacks[0].layout.num_shards
        for part in renewal.rounds:
            computed.update((matrix.entry, matrix.index) for matrix in part.there.matrices)
            owners.update(matrix.owner[1] for matrix in part.there.matrices)
            for bucket in part.gathers:
                gathered.update((matrix.entry, matrix.index) for matrix in bucket.matrices)
        assert set(owners) <= set(range(num_shards))
        assert max(owners.values()) - min(owners[s] for s in range(num_shards)) <= 1
        assert renewal.is_local == (not any(part.gathers for part in renewal.rounds))
        assert sorted(renewal.members) == sorted({m.entry for part in renewal.rounds for m in part.there.matrices})
    assert set(computed) == blocks and set(computed.values()) <= {1}
    assert set(gathered.values()) <= {1}


@settings(max_examples=100, deadline=None)
@given(entries_on_one_grid(tuple(SMALL_MESHES), most=12))
def test_every_block_has_an_owner_and_goes_to_all(entries: list[Entry]) -> None:
    plan = plan_of(entries, OPTIONS)
    check(plan)
    for index in plan.renewed:
        entry = plan.entries[index]
        assert entry.gram is not None
        layout = mean_layout(entry.layout, entry.gram)
        for rank in [0] if layout.grid is None else layout.grid.ranks:
            held = sorted(rows_held(layout, layout.shard_group(rank)))
            assert sum(stop - start for start, stop in held) == entry.gram.packed_size[0]
            assert layout.num_shards == entry.layout.num_shards


@pytest.mark.parametrize("num_ranks", [8, 256, 4096])
def test_what_a_rank_does_shrinks_with_the_ranks_and_what_it_sends_does_not_grow(num_ranks: int) -> None:
    grid = Grid((num_ranks,), tuple(range(num_ranks)))
    entries = [
        Entry("", Layout(shape, 0, 1, grid, (Split(0, ROWS, num_ranks, shape[0], 1),)), torch.float32, "fake", (), 1)
        for shape in [(4096, 4096), (16384, 4096), (4096, 16384), (12288, 4096)] * 8
    ]
    plan = plan_of(entries, PlanOptions(cheap_step="gram_row"))
    check(plan)
    num_blocks = 8 * (1 + 1 + 4 + 1)
    owned = [sum(part.owned(rank) for r in plan.renewals for part in r.rounds) for rank in range(min(num_ranks, 64))]
    assert max(owned) == -(-num_blocks // num_ranks)
    numel = num_blocks * 4096 * 4096
    sent = sum(plan.renewals[0].collective_bytes(0))
    # half of the sums, half of the factors, both in bf16, and few rows in float32
    assert sent < numel * (2 + 5 / num_ranks + 4096 * 4 / numel) * 1.01 + (4 * 4096 * 2049 if owned[0] else 0)
    kept = plan.gram_state_bytes(0)
    assert kept == pytest.approx(numel * (2 + 2 / num_ranks), rel=0.01)


def test_too_little_damping_or_too_few_columns_are_not_rounded() -> None:
    grid = Grid((2,), (0, 1))
    for size, damping, expected in (
        (512, 1e-3, torch.bfloat16),
        (256, 1e-3, torch.float32),
        (512, 1e-4, torch.float32),
    ):
        layout = Layout((size, size), 0, 1, grid, (Split(0, ROWS, 2, size, 1),))
        options = PlanOptions(cheap_step="gram_row", gram_damping=damping)
        plan = plan_of([Entry("", layout, torch.float32, "cpu", (), 1)], options)
        assert plan.renewals[0].stacks[0].comm_dtype == expected
