"""What goes wrong on one rank must end on all of them, with its name: other plans, infinite gradients, death."""

from __future__ import annotations

import copy
import os
import pickle
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import rowmuon
from ranks.checks import assert_same_bits_on_replicas, counted_step, local_part
from ranks.models import EVERY_SHAPE, Spec, build, give_gradients, gradient, optimizer_on
from ranks.placing import full, full_of, mesh_of, place, place_gradient
from ranks.pool import RankPool

SPECS = (Spec("w", (6, 8)), Spec("v", (5, 8)), Spec("bias", (4,), algorithm="adamw"), Spec("v2", (5, 8)))

# ------------------------------------------------------------------------------------------------- plans are compared


@pytest.mark.parametrize(
    "what",
    ["order", "names", "chunks", "period", "ns_steps", "refresh", "bucket_bytes", "frozen"]
    + ["lr", "weight_decay", "row_scale", "momentum", "adamw_lr", "adamw_betas"],
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
        elif what in ("lr", "weight_decay", "row_scale", "momentum"):
            settings = {what: 0.5}
        elif what.startswith("adamw_"):
            changed = {"lr": 0.5, "betas": (0.5, 0.95)}[what.removeprefix("adamw_")]
            specs = tuple(
                replace(s, settings={what.removeprefix("adamw_"): changed}) if s.algorithm == "adamw" else s
                for s in SPECS
            )
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


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("layout", ["2:S0", "2:plain"])
def test_a_tensor_lr_is_compared_once_and_a_last_bit_is_no_difference(ranks, world_size, layout):
    ranks(world_size).run(run_tensor_lr, layout, timeout_s=40.0)


def run_tensor_lr(layout: str) -> None:
    rank = dist.get_rank()
    specs = SPECS[:2]
    for lr, fits in ((0.02, True), (0.02 * (1 + 1e-12 * rank), True), (0.02 * (1 + rank), False)):
        params = build(specs, layout)
        optimizer = optimizer_on(params, specs, layout, lr=torch.tensor(lr, dtype=torch.float64))
        give_gradients(params, specs, 0)
        if fits:
            optimizer.step()
            # Another step of the same kind may do without any read: fake tensors would raise (test_full_size.py).
            give_gradients(params, specs, 1)
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match="settings or step counts differ"):
                optimizer.step()


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("layout", ["3:S0", "3:plain"])
def test_a_rank_without_any_matrix_is_named(ranks, world_size, layout):
    """It has AdamW's parameters alone, because someone has dropped what has no rows there, say."""
    messages = ranks(world_size).run(run_without_matrices, layout, timeout_s=40.0)
    assert all("rank(s) [2] would do something else in this step than rank(s) [0, 1]" in text for text in messages)


def run_without_matrices(layout: str) -> str:
    params = build(SPECS, layout)
    specs = [spec for spec in SPECS if dist.get_rank() < 2 or spec.algorithm == "adamw"]
    optimizer = optimizer_on(params, specs, layout)
    give_gradients(params, SPECS, 0)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize(("world_size", "layout"), [(2, "2:S0"), (4, "2x2:R,S0"), (4, "4:plain"), (4, "2x2:S0,S1")])
def test_a_rank_on_which_everything_is_frozen_is_named(ranks, world_size, layout):
    messages = ranks(world_size).run(run_all_frozen, layout, timeout_s=40.0)
    assert all("rank(s) [1] would do nothing in this step" in message for message in messages)


def run_all_frozen(layout: str) -> str:
    params = build(SPECS, layout)
    for parameter in params.values():
        parameter.requires_grad_(dist.get_rank() != 1)
    optimizer = optimizer_on(params, SPECS, layout)
    for spec in SPECS if dist.get_rank() != 1 else ():
        place_gradient(params[spec.name], gradient(spec, 0))
    with pytest.raises(RuntimeError, match="frozen on all of them") as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2])
def test_what_is_frozen_on_all_ranks_is_no_difference(ranks, world_size):
    ranks(world_size).run(run_frozen_alike, timeout_s=40.0)


def run_frozen_alike() -> None:
    params = build(SPECS, "2:S0")
    for parameter in params.values():
        parameter.requires_grad_(False)
    optimizer = optimizer_on(params, SPECS)
    optimizer.step()
    for parameter in params.values():
        parameter.requires_grad_(True)
    give_gradients(params, SPECS, 0)
    optimizer.step()
    assert optimizer.traffic["refresh"].num_orthogonalizations > 0


@pytest.mark.parametrize("world_size", [4])
def test_a_rank_that_holds_nothing_on_an_inner_mesh_is_named(ranks, world_size):
    """It would go on to something else while the other rank of that mesh waits for it, and all others for that one."""
    messages = ranks(world_size).run(run_unknown_mesh, timeout_s=40.0)
    where = "hold none, trainable or not"
    assert "rank(s) [2] have parameters on the mesh of ranks [2, 3], on which rank(s) [3] " + where in messages[2]
    assert all("rank(s) [2] have parameters on a mesh of 2 ranks" in messages[rank] for rank in (0, 1, 3))


def run_unknown_mesh() -> str:
    params = {"whole": place(torch.zeros(6, 8), "4:S0")}
    mesh = mesh_of((2, 2), ("outer", "inner"))
    if dist.get_rank() != 3:
        inner = distribute_tensor(torch.zeros(5, 8), mesh["inner"], [Shard(0)], src_data_rank=None)
        params["inner"] = nn.Parameter(inner)
    optimizer = rowmuon.PeriodicRowMuon(list(params.items()), lr=0.02)
    for parameter in params.values():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2])
def test_groups_without_a_parameter_are_refused_on_a_rank_among_several(ranks, world_size):
    ranks(world_size).run(run_empty_groups)


def run_empty_groups() -> None:
    with pytest.raises(ValueError, match=rf"rank {dist.get_rank()}: .* no parameter .* builds no optimizer"):
        rowmuon.PeriodicRowMuon([{"params": []}, {"params": [], "algorithm": "adamw"}])


@pytest.mark.parametrize("world_size", [2])
def test_a_rank_with_empty_shards_alone_takes_part(ranks, world_size):
    ranks(world_size).run(run_empty_shards)


def run_empty_shards() -> None:
    """One row each: rank 1 holds nothing of any, and nothing is sent to it."""
    specs = (Spec("w", (1, 8)), Spec("v", (1, 8)))
    params, alone = build(specs, "2:S0"), build(specs, "1:alone")
    optimizers = optimizer_on(params, specs, skip_nonfinite=True), optimizer_on(alone, specs)
    for step in range(4):
        for held, optimizer in zip((params, alone), optimizers, strict=True):
            give_gradients(held, specs, step)
            optimizer.step()
    for name, found in full_of(params).items():
        torch.testing.assert_close(found, alone[name].detach().cpu(), rtol=1e-5, atol=1e-6)
    if dist.get_rank() == 1:
        assert all(local_part(parameter).numel() == 0 for parameter in params.values())


@pytest.mark.parametrize("world_size", [2])
def test_copies_keep_the_process_group_and_what_is_unpickled_asks_for_it(ranks, world_size):
    ranks(world_size).run(run_copies)


def run_copies() -> None:
    specs = SPECS[:2]
    params = build(specs, "2:plain")
    optimizer = optimizer_on(params, specs, "2:plain", period=2)
    give_gradients(params, specs, 0)
    optimizer.step()
    copied = {"deep": copy.deepcopy((params, optimizer)), "pickled": pickle.loads(pickle.dumps((params, optimizer)))}
    with pytest.raises(RuntimeError, match=r"unpickled.*set optimizer.process_group"):
        copied["pickled"][1].step()
    again = pickle.loads(pickle.dumps(copied["pickled"][1]))  # it isn't forgotten on the way
    with pytest.raises(RuntimeError, match="unpickled"):
        again.step()
    copied["pickled"][1].process_group = dist.group.WORLD
    copied["shallow"] = (params, copy.copy(optimizer))
    for name, (theirs, other) in copied.items():
        assert other.process_group is dist.group.WORLD, name
        assert other.plan("refresh").num_collectives(0) == optimizer.plan("refresh").num_collectives(0) > 0, name
        if name != "shallow":
            give_gradients(theirs, specs, 1)
            other.step()
            give_gradients(theirs, specs, 2)
            counted_step(other)
    for step in (1, 2):
        give_gradients(params, specs, step)
        optimizer.step()
    for theirs, _ in copied.values():
        assert all(torch.equal(theirs[name], params[name]) for name in params)


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
