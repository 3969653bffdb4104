"""How many buckets are under way at a time: at least one each way, and more only where they fit together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from plan_simulation import OPTIONS, entries_on_one_grid, entry_of
from rowmuon.buckets import travels
from rowmuon.layout import ROWS, Grid, Layout, Split
from rowmuon.plan import Entry, PlanOptions, build_plan


@settings(max_examples=150)
@given(entries_on_one_grid(most=12), OPTIONS)
def test_what_is_under_way_fits_bucket_bytes(entries: list[Entry], options: PlanOptions) -> None:
    plan = build_plan(entries, range(len(entries)), options)
    buckets, sent, applied = plan.buckets, plan.schedule.sent, plan.schedule.applied
    assert len(sent) == len(buckets) + 1 and len(applied) == len(buckets)
    assert list(sent) == sorted(sent) and list(applied) == sorted(applied)
    for start, end in [(0, sent[0]), *((i + 1, sent[i + 1]) for i in range(len(buckets)))]:
        num_bytes = [bucket.num_bytes for bucket in buckets[start : end + 1] if travels(bucket)]
        if end < len(buckets):
            assert end > start and (sum(num_bytes) > options.bucket_bytes), "one more would have fitted"
        num_bytes = [bucket.num_bytes for bucket in buckets[start:end] if travels(bucket)]
        assert sum(num_bytes) <= options.bucket_bytes or not any(map(travels, buckets[start + 1 : end]))
    for i, start in enumerate(applied):
        num_bytes = [bucket.num_bytes for bucket in buckets[start:i] if bucket.kind == "exchange"]
        assert sum(num_bytes) <= options.bucket_bytes or i - start == 1
        assert i == 0 or start < i, "the last one is still coming home"


@settings(max_examples=60)
@given(entries_on_one_grid(most=12), OPTIONS)
def test_no_buffer_of_any_rank_is_larger_than_a_bucket_says(entries: list[Entry], options: PlanOptions) -> None:
    plan = build_plan(entries, range(len(entries)), options)
    for bucket in filter(travels, plan.buckets):
        assert bucket.layout.grid is not None
        routes = [bucket.route(rank) for rank in bucket.layout.grid.ranks]
        sizes = [max(sum(r.send_counts[: 1 if bucket.kind == "gather" else None]), sum(r.recv_counts)) for r in routes]
        assert max(sizes) <= bucket.largest
        assert bucket.shares_replicas or bucket.num_bytes == bucket.largest * bucket.comm_dtype.itemsize


def four_ranks(rows: int) -> Layout:
    return Layout((rows, 8), grid=Grid((4,), (0, 1, 2, 3)), splits=(Split(0, ROWS, 4, rows, 1),))


@pytest.mark.parametrize(
    ("bucket_bytes", "sent", "applied"),
    [(1, (1, 2, 3, 3), (0, 0, 1)), (64 << 20, (3, 3, 3, 3), (0, 0, 0))],
    ids=["no room", "room for all"],
)
def test_three_shapes(bucket_bytes: int, sent: tuple[int, ...], applied: tuple[int, ...]) -> None:
    entries = [entry_of(layout) for layout in map(four_ranks, (16, 12, 8))]
    plan = build_plan(entries, range(3), PlanOptions(bucket_bytes=bucket_bytes))
    assert [bucket.num_rows for bucket in plan.buckets] == [16, 12, 8]
    assert (plan.schedule.sent, plan.schedule.applied) == (sent, applied)
