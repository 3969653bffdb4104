"""Each parameter refreshes in its own phase: same result, same bytes over whole periods, flat steps, resumable."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rowmuon
from ranks.checks import assert_same_bits_on_replicas, counted_step, local_part, relative
from ranks.expected import expected_weights
from ranks.models import EVERY_SHAPE, Spec, build, give_gradients, optimizer_on
from ranks.placing import full_of

PERIOD, NUM_STEPS = 3, 8
TOLERANCE = 1e-5  # see test_grid.py
LAYOUTS = [(1, "1:alone"), (2, "2:S0"), (2, "2:plain"), (3, "3:S1"), (4, "2x2:R,S0"), (4, "2x2:S0,S1"), (8, "2x4:R,S0")]


def phases_of(optimizer: rowmuon.PeriodicRowMuon) -> dict[str, int]:
    return {
        name: optimizer.state[p]["phase"]
        for group in optimizer.param_groups
        if group["algorithm"] == "muon"
        for name, p in zip(group["param_names"], group["params"], strict=True)
    }


def run_mixed(layout: str, refresh: str, bucket_bytes: int) -> dict[str, int]:
    """Mixed steps equal the reference, whose parameters refresh at the same steps."""
    params = build(EVERY_SHAPE, layout)
    settings = {"refresh": refresh, "bucket_bytes": bucket_bytes, "stagger": True, "period": PERIOD}
    optimizer = optimizer_on(params, EVERY_SHAPE, layout, **settings)
    phases = phases_of(optimizer)
    before = full_of(params)
    for step in range(NUM_STEPS):
        give_gradients(params, EVERY_SHAPE, step)
        kind, _ = counted_step(optimizer)
        assert kind == ("mixed" if step else "refresh")
        assert_same_bits_on_replicas(params)
        after = full_of(params)
        if dist.get_rank() == 0:
            right, right_before = (expected_weights(EVERY_SHAPE, n, phases) for n in (step + 1, step))
            for spec in EVERY_SHAPE:
                found = after[spec.name].double() - before[spec.name].double()
                error = relative(found, right[spec.name] - right_before[spec.name])
                assert error <= TOLERANCE, f"step {step}, {spec.name}: off by {error:.2g}"
        before = after
    return phases


@pytest.mark.parametrize("bucket_bytes", [64 << 20, 500])
@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_mixed_steps_equal_the_reference_in_the_same_phases_everywhere(
    ranks, world_size, layout, refresh, bucket_bytes
):
    found = ranks(world_size).run(run_mixed, layout, refresh, bucket_bytes)
    alone = build(EVERY_SHAPE, "1:alone")
    right = phases_of(optimizer_on(alone, EVERY_SHAPE, stagger=True, period=PERIOD))
    assert found == [right] * world_size
    assert set(right.values()) == {0, 1, 2}


EVEN = tuple(Spec(f"w{i}", (8, 16)) for i in range(6))


def bytes_of_steps(layout: str, refresh: str, stagger: bool) -> list[int]:
    """Sent by this rank in each step after the first."""
    params = build(EVEN, layout)
    optimizer = optimizer_on(params, EVEN, layout, refresh=refresh, stagger=stagger, period=PERIOD)
    sent = []
    for step in range(1 + 2 * PERIOD):
        before = sum(counts.bytes_sent for counts in optimizer.traffic.values())
        give_gradients(params, EVEN, step)
        optimizer.step()
        sent.append(sum(counts.bytes_sent for counts in optimizer.traffic.values()) - before)
    return sent[1:]


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize(("world_size", "layout"), [(2, "2:S0"), (4, "4:S0"), (4, "2x2:S0,S1")])
def test_same_bytes_over_whole_periods_and_flat_steps(ranks, world_size, layout, refresh):
    """Shards of one size: who orthogonalises what doesn't change the sum over the ranks."""
    pool = ranks(world_size)
    staggered, together = (pool.run(bytes_of_steps, layout, refresh, stagger) for stagger in (True, False))
    per_step = [sum(step) for step in zip(*staggered, strict=True)]
    at_once = [sum(step) for step in zip(*together, strict=True)]
    splits_rows = layout.endswith("S1")
    if not splits_rows:  # those send partial sums in row steps too, of whatever doesn't refresh
        assert sum(per_step[:PERIOD]) == sum(per_step[PERIOD:]) == sum(at_once[:PERIOD])
    assert per_step[:PERIOD] == per_step[PERIOD:]
    assert max(per_step) == min(per_step) < max(at_once)


@pytest.mark.parametrize(("world_size", "layout"), [(2, "2:S0"), (4, "2x2:R,S0")])
def test_a_staggered_run_resumes_in_its_phases(ranks, world_size, layout):
    ranks(world_size).run(run_resume, layout)


def run_resume(layout: str) -> None:
    params = build(EVERY_SHAPE, layout)
    optimizer = optimizer_on(params, EVERY_SHAPE, layout, stagger=True, period=4)
    for step in range(6):
        give_gradients(params, EVERY_SHAPE, step)
        optimizer.step()
    saved: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    twin = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
    # Other buckets, and a constructor that would have given other phases but for the checkpoint's.
    loaded = optimizer_on(twin, EVERY_SHAPE, layout, stagger=True, period=2)
    loaded.load_state_dict(saved)
    assert phases_of(loaded) == phases_of(optimizer)
    for step in range(6, 12):
        give_gradients(params, EVERY_SHAPE, step)
        give_gradients(twin, EVERY_SHAPE, step)
        optimizer.step()
        loaded.step()
    for name, parameter in params.items():
        assert torch.equal(local_part(twin[name]), local_part(parameter)), name


@pytest.mark.parametrize("world_size", [2])
def test_a_checkpoint_may_be_loaded_with_and_without_stagger(ranks, world_size):
    ranks(world_size).run(run_switch)


def run_switch() -> None:
    for before, after in ((False, True), (True, False)):
        params = build(EVERY_SHAPE, "2:S0")
        optimizer = optimizer_on(params, EVERY_SHAPE, stagger=before)
        for step in range(2):
            give_gradients(params, EVERY_SHAPE, step)
            optimizer.step()
        other = optimizer_on(params, EVERY_SHAPE, stagger=after)
        other.load_state_dict(optimizer.state_dict())
        assert set(phases_of(other).values()) == ({0, 1, 2} if after else {0})
        refreshed = dict.fromkeys(phases_of(other), 0)
        for step in range(2, 5):
            for name, phase in phases_of(other).items():
                refreshed[name] += (step - phase) % PERIOD == 0
            give_gradients(params, EVERY_SHAPE, step)
            counted_step(other)
        assert set(refreshed.values()) == {1}
