"""Ways in which training loops use a sharded optimizer: pipeline stages, a step in the backward pass, CPU offload."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import rowmuon
from ranks.checks import counted_step
from ranks.models import EVERY_SHAPE, Spec, build, give_gradients, optimizer_on, start
from ranks.placing import full_of, mesh_of
from ranks.pool import device_type
from ranks.toy import ReferenceTrainer, Toy, batch, loss_of, make_toy, optimizer_for

# ------------------------------------------------------------------------------------------------------ pipeline stages


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize("world_size", [4, 8])
def test_pipeline_stages_step_alone(ranks, world_size, refresh):
    """Each stage has its own optimizer on its own ranks, other parameters and other numbers of steps."""
    ranks(world_size).run(run_pipeline, refresh)


def run_pipeline(refresh: str) -> None:
    size = dist.get_world_size()
    mesh = mesh_of((2, size // 2), ("stage", "shard"))
    stage = dist.get_rank() * 2 // size
    specs = EVERY_SHAPE[:6] if stage == 0 else EVERY_SHAPE[6:]
    params = {
        spec.name: nn.Parameter(
            distribute_tensor(start(spec).to(device_type()), mesh["shard"], [Shard(0)], src_data_rank=None).clone()
        )
        for spec in specs
    }
    alone = build(specs, "1:alone")
    for turn in (0, 1):  # the other stage waits at the barrier: a collective over the world would meet that
        if stage == turn:
            optimizer, unsharded = optimizer_on(params, specs, refresh=refresh), optimizer_on(alone, specs)
            for step in range(4 + stage):
                give_gradients(params, specs, step)
                give_gradients(alone, specs, step)
                counted_step(optimizer)
                unsharded.step()
            here = set(range(turn * size // 2, (turn + 1) * size // 2))
            assert all(set(members) <= here for members in optimizer._process_groups._groups)
        dist.barrier()
    found = full_of(params)
    for name, parameter in alone.items():
        torch.testing.assert_close(found[name], parameter.detach().cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_may_be_in_different_numbers_of_groups(ranks, world_size):
    """torch names a group by how many there are in a process: members that differ in that would never meet."""
    ranks(world_size).run(run_beside_other_groups)


def run_beside_other_groups() -> None:
    rank = dist.get_rank()
    others = [dist.new_group([rank], use_local_synchronization=True) for _ in range(rank)]
    try:
        reference, model = ReferenceTrainer(make_toy()), make_toy().to(device_type())
        fully_shard(model, mesh=mesh_of((dist.get_world_size(),)))
        optimizer = optimizer_for(model, overlap="backward")  # makes a group of its own at its first step
        train(model, reference, optimizer, step=optimizer.step)
    finally:
        for group in others:
            dist.destroy_process_group(group)


# ---------------------------------------------------------------------------------------------- a step in the backward


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_steps_from_post_accumulate_grad_hooks(ranks, world_size):
    """One optimizer for each parameter, which steps and frees the gradient as soon as it is there."""
    ranks(world_size).run(run_hooks)


def run_hooks() -> None:
    reference, model = ReferenceTrainer(make_toy()), make_toy().to(device_type())
    mesh = mesh_of((dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers: dict[Tensor, rowmuon.PeriodicRowMuon] = {}
    for group in optimizer_for(model).param_groups:
        own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            groups = [{"params": [(name, parameter)], **own}]
            optimizers[parameter] = rowmuon.PeriodicRowMuon(groups, ns_dtype=torch.float32, comm_dtype=torch.float32)

    def step_and_free(parameter: Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step_and_free)
    train(model, reference)
    assert all(parameter.grad is None for parameter in optimizers)
    muon = [o for o in optimizers.values() if o.param_groups[0]["algorithm"] == "muon"]
    assert {o.traffic["refresh"].num_steps for o in muon} == {2}


def train(
    model: Toy,
    reference: ReferenceTrainer,
    optimizer: rowmuon.PeriodicRowMuon | None = None,
    step: Callable[[], object] | None = None,
) -> None:
    """Five steps, equal to the reference's within what test_modules.py allows; counted, unless ``step`` is given."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for number in range(5):
        x, y = batch(number)
        reference.step(x, y)
        model.zero_grad()
        x, y = (part.chunk(size)[rank].to(device_type()) for part in (x, y))
        loss_of(model, x, y).backward()
        if step is not None:
            step()
        elif optimizer is not None:
            counted_step(optimizer)
    error, worst = reference.error(full_of(dict(model.named_parameters())))
    assert error <= 2e-4, f"{worst}: off by {error:.2g}"


# --------------------------------------------------------------------------------------------------------- CPU offload


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fsdp_with_cpu_offload(ranks, world_size, refresh):
    ranks(world_size).run(run_offload, refresh)


def run_offload(refresh: str) -> None:
    """Parameters, gradients and state stay on the CPU, whose process group carries the refreshes."""
    reference, model = ReferenceTrainer(make_toy()), make_toy()
    mesh = mesh_of((dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = optimizer_for(model, refresh=refresh)
    train(model, reference, optimizer)
    assert all(p.device.type == "cpu" for p in model.parameters())


@pytest.mark.parametrize("world_size", [2])
def test_frozen_layers_are_left_out_on_all_ranks(ranks, world_size):
    ranks(world_size).run(run_frozen)


def run_frozen() -> None:
    specs = (Spec("w", (5, 6)), Spec("v", (5, 6)))
    params, alone = build(specs, "2:S0"), build(specs, "1:alone")
    here, there = optimizer_on(params, specs), optimizer_on(alone, specs)
    for step in range(6):
        for held in (params, alone):
            held["v"].requires_grad_(step >= 2)  # thawed later: its own count begins with a refresh
            give_gradients(held, specs, step)
        assert here.next_step_kind == there.next_step_kind
        counted_step(here)
        there.step()
    found = full_of(params)
    for name, parameter in alone.items():
        torch.testing.assert_close(found[name], parameter.detach().cpu(), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------ compiled row steps


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on PATH")
@pytest.mark.parametrize("world_size", [2])
def test_compiled_row_steps_on_ranks(ranks, world_size):
    """Whole rows and split ones, on ranks that hold little or nothing of a matrix and so step it eagerly."""
    ranks(world_size).run(run_compiled, timeout_s=120.0)


def run_compiled() -> None:
    specs = (
        Spec("a", (5, 12)),
        Spec("b", (3, 8)),
        Spec("row", (1, 8)),
        Spec("qkv", (6, 7), chunks=3),
        Spec("e", (3, 4, 6)),
    )
    for layout in ("2:S0", "2:S1"):
        params, alone = build(specs, layout), build(specs, "1:alone")
        here, there = optimizer_on(params, specs, compile=True), optimizer_on(alone, specs)
        for step in range(5):
            give_gradients(params, specs, step)
            give_gradients(alone, specs, step)
            counted_step(here, watched=step == 4)  # watched by torch nothing is compiled
            there.step()
        found = full_of(params)
        for name, parameter in alone.items():
            torch.testing.assert_close(found[name], parameter.detach().cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on PATH")
@pytest.mark.parametrize("world_size", [2])
def test_compiled_row_steps_under_fsdp2(ranks, world_size):
    """Whose sharded parameters may get other memory between steps: here by a change of dtype and back."""
    ranks(world_size).run(run_compiled_fsdp2)


def run_compiled_fsdp2() -> None:
    models = [make_toy().to(device_type()) for _ in range(2)]
    for model in models:
        fully_shard(model, mesh=mesh_of((2,)))
    optimizers = [optimizer_for(model, compile=model is models[0]) for model in models]
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            if step == 4:
                before = [parameter.to_local().data_ptr() for parameter in model.parameters()]
                model.double().float()
                assert before != [parameter.to_local().data_ptr() for parameter in model.parameters()]
            x, y = (tensor.to(device_type()) for tensor in batch(step))
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    for fast, eager in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(fast.to_local(), eager.to_local(), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------ built too early


@pytest.mark.parametrize("world_size", [2])
def test_an_optimizer_that_was_built_before_sharding_says_so(ranks, world_size):
    """It holds parameters that fully_shard has put away; without a word the loss would stay where it is."""
    ranks(world_size).run(run_built_too_early)


def run_built_too_early() -> None:
    model = make_toy().to(device_type())
    optimizer = optimizer_for(model)
    fully_shard(model, mesh=mesh_of((2,)))
    in_time = optimizer_for(model)
    x, y = (tensor.to(device_type()) for tensor in batch(0))
    loss_of(model, x, y).backward()
    with pytest.warns(RuntimeWarning, match="none of this optimizer's .* Build the optimizer after .*fully_shard"):
        optimizer.step()
    before = {name: p.detach().to_local().clone() for name, p in model.named_parameters()}
    in_time.step()
    assert any(not torch.equal(p.detach().to_local(), before[name]) for name, p in model.named_parameters())
    for _ in range(8):
        optimizer.step()
    with pytest.raises(RuntimeError, match="after 10 steps, none of"):  # on all ranks alike
        optimizer.step()
