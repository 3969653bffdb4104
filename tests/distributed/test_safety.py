"""What goes wrong on one rank must end on all of them, with its name: other plans, infinite gradients, death."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks.checks import assert_same_bits_on_replicas, local_part
from ranks.models import EVERY_SHAPE, Spec, build, give_gradients, gradient, optimizer_on
from ranks.placing import full, full_of, place, place_gradient
from ranks.pool import RankPool

SPECS = (Spec("w", (6, 8)), Spec("v", (5, 8)), Spec("bias", (4,), algorithm="adamw"), Spec("v2", (5, 8)))

# ------------------------------------------------------------------------------------------------- plans are compared


@pytest.mark.parametrize(
    "what", ["order", "names", "chunks", "period", "ns_steps", "refresh", "bucket_bytes", "frozen"]
)
@pytest.mark.parametrize(("world_size", "layout", "odd"), [(4, "4:S0", 2), (4, "2x2:R,S0", 3), (4, "4:plain", 0)])
def test_a_rank_that_would_do_something_else_is_named_on_every_rank(ranks, world_size, layout, odd, what):
    messages = ranks(world_size).run(run_differing, layout, odd, what, timeout_s=40.0)
    others = [rank for rank in range(world_size) if rank != odd]
    for message in messages:
        assert f"rank(s) [{odd}] would do something else in this step than rank(s) {others}" in message


def run_differing(layout: str, odd: int, what: str) -> str:
    specs, settings = SPECS, {}
    if dist.get_rank() == odd:
        if what == "order":
            specs = (SPECS[1], SPECS[0], *SPECS[2:])
        elif what == "names":  # two of one shape, the other way round
            specs = (SPECS[0], SPECS[3], SPECS[2], SPECS[1])
        elif what == "chunks":
            specs = (Spec("w", (6, 8), chunks=2), *SPECS[1:])
        elif what in ("period", "ns_steps", "refresh", "bucket_bytes"):
            settings = {what: {"period": 4, "ns_steps": 6, "refresh": "gather", "bucket_bytes": 100}[what]}
    params = build(SPECS, layout)
    if what == "frozen" and dist.get_rank() == odd:
        params["v"].requires_grad_(False)
    optimizer = optimizer_on(params, specs, layout, **settings)
    start = full_of(params)
    for name, parameter in params.items():
        if parameter.requires_grad:
            place_gradient(parameter, gradient(next(s for s in SPECS if s.name == name), 0))
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    for name, parameter in params.items():
        assert torch.equal(full(parameter), start[name]), "nothing may have moved"
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_parameter_added_on_one_rank_only_is_found(ranks, world_size):
    messages = ranks(world_size).run(run_added, timeout_s=40.0)
    assert all("rank(s) [1]" in message for message in messages)


def run_added() -> str:
    layout = f"{dist.get_world_size()}:S0"
    params = build(SPECS, layout)
    optimizer = optimizer_on(params, SPECS, layout)
    for step in range(2):
        give_gradients(params, SPECS, step)
        optimizer.step()
    late = Spec("late", (4, 8))
    added = place(torch.zeros(late.shape), layout)
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": [("late", added)]})
        place_gradient(added, gradient(late, 0))
    else:
        optimizer.add_param_group({"params": [("bias2", nn.Parameter(torch.zeros(3)))], "algorithm": "adamw"})
    with pytest.raises(RuntimeError, match="would do something else") as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2])
def test_a_parameter_added_alike_is_compared_once_more_and_starts_with_a_refresh(ranks, world_size):
    ranks(world_size).run(run_added_alike)


def run_added_alike() -> None:
    params = build(SPECS, "2:S0")
    optimizer = optimizer_on(params, SPECS)
    for step in range(2):
        give_gradients(params, SPECS, step)
        optimizer.step()
    assert optimizer._compared
    late = Spec("late", (3, 8))
    added = build((late,), "2:S0")
    optimizer.add_param_group({"params": list(added.items())})
    assert not optimizer._compared and optimizer.next_step_kind == "mixed"
    give_gradients({**params, **added}, (*SPECS, late), 2)
    optimizer.step()
    assert optimizer._compared and optimizer.state[added["late"]]["step"] == 1


# ------------------------------------------------------------------------------------------------------ not a number


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("world_size", "layout"), [(2, "2:S0"), (4, "2x2:S0,S1"), (3, "3:plain")])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(ranks, world_size, layout, value):
    ranks(world_size).run(run_skip, layout, value)


def run_skip(layout: str, value: float) -> None:
    """Skipped and counted; nothing changes; a refresh that was due is due again; clean steps then go on as ever."""
    params, clean = build(EVERY_SHAPE, layout), build(EVERY_SHAPE, layout)
    optimizer = optimizer_on(params, EVERY_SHAPE, layout, skip_nonfinite=True)
    undisturbed = optimizer_on(clean, EVERY_SHAPE, layout)
    bad_rank = dist.get_world_size() - 1
    for step in range(4):
        for spoiled in ("even", "table"):  # Muon's and AdamW's
            before = {name: local_part(p).clone() for name, p in params.items()}
            kind = optimizer.next_step_kind
            give_gradients(params, EVERY_SHAPE, step)
            if dist.get_rank() == bad_rank:
                local_part(params[spoiled].grad)[0, 0] = value
            optimizer.step()
            assert optimizer.next_step_kind == kind
            for name, parameter in params.items():
                assert torch.equal(local_part(parameter), before[name])
        give_gradients(params, EVERY_SHAPE, step)
        give_gradients(clean, EVERY_SHAPE, step)
        optimizer.step()
        undisturbed.step()
        for name, parameter in params.items():
            assert torch.equal(local_part(parameter), local_part(clean[name])), name
    assert optimizer.num_skipped_steps == 8
    assert sum(counts.num_steps for counts in optimizer.traffic.values()) == 4
    assert_same_bits_on_replicas(params)


@pytest.mark.parametrize("world_size", [2])
def test_skipping_differs_between_ranks_and_is_found(ranks, world_size):
    messages = ranks(world_size).run(run_differing_skip, timeout_s=40.0)
    assert all("would do something else" in message for message in messages)


def run_differing_skip() -> str:
    params = build(SPECS, "2:S0")
    optimizer = optimizer_on(params, SPECS, skip_nonfinite=dist.get_rank() == 0)
    give_gradients(params, SPECS, 0)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


# -------------------------------------------------------------------------------------------------------------- death

GROUP_TIMEOUT_S = 10.0  # a busy machine stalls for some seconds


@pytest.mark.parametrize(
    ("layout", "how"), [("3:S0", "dies"), ("3:plain", "dies"), ("3:S1", "dies"), ("3:S0", "stays_away")]
)
def test_a_rank_that_is_lost_ends_the_others_within_the_timeout(layout, how):
    """Its own launch, for the process group doesn't survive."""
    pool = RankPool(3, group_timeout_s=GROUP_TIMEOUT_S)
    try:
        results = pool.run(run_lost, layout, how, timeout_s=60.0, may_die=(1,))
    finally:
        pool.close()
    for rank in (0, 2):
        message, seconds = results[rank]
        assert f"rank {rank}: a collective of the optimizer's over ranks [0, 1, 2] failed" in message
        assert seconds < GROUP_TIMEOUT_S + 10.0


def run_lost(layout: str, how: str) -> Any:
    """Rank 1 doesn't come to the second step."""
    params = build(SPECS, layout)
    optimizer = optimizer_on(params, SPECS, layout, period=1 if layout != "3:S1" else 3)
    give_gradients(params, SPECS, 0)
    optimizer.step()
    give_gradients(params, SPECS, 1)
    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(1)
        return None
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("world_size", [8])
def test_groups_that_the_optimizer_makes_take_over_the_timeout(ranks, world_size):
    """A shard group over two of three axes is none of the mesh's own; torch would give it half an hour."""
    pool = ranks(world_size)
    assert pool.run(timeout_of_made_group) == [pool.group_timeout_s] * world_size


def timeout_of_made_group() -> float:
    specs = (Spec("w", (6, 8)),)
    optimizers = [optimizer_on(build(specs, "2x2x2:R,S0,S1"), specs) for _ in range(2)]
    here = dist.get_rank() // 4 * 4
    group, again = (o._process_groups.group_of(tuple(range(here, here + 4))) for o in optimizers)
    assert group is again, "optimizers on one mesh share what the mesh hasn't got"
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
