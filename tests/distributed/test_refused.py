"""What can't be worked on where it lies is refused at construction, with name, shape, placements and the way out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import rowmuon
from ranks.models import Spec, build, give_gradients, gradient, optimizer_on, start
from ranks.placing import mesh_of
from ranks.pool import device_type
from rowmuon.process_groups import ProcessGroups


def assert_refused(parameter: torch.Tensor, match: str, **group: object) -> None:
    groups = [{"params": [("block.w", nn.Parameter(parameter))], **group}]
    with pytest.raises(ValueError, match=match):
        rowmuon.PeriodicRowMuon(groups)


@pytest.mark.parametrize(
    "case", ["partial", "factor", "kernel", "inner_stack", "not_chunked", "meta", "outside", "mesh_order"]
)
@pytest.mark.parametrize("world_size", [4])
def test_refused(ranks, world_size, case):
    ranks(world_size).run(globals()[f"run_{case}"], timeout_s=40.0)


def run_partial() -> None:
    local = torch.zeros(6, 4, device=device_type())
    parameter = DTensor.from_local(local, mesh_of((4,)), [Partial()])
    assert_refused(
        parameter, r"'block.w' \(6, 4\), placements \(Partial\(sum\),\).*Redistribute it to Shard or Replicate"
    )


def run_factor() -> None:
    mesh, local = mesh_of((2, 2)), torch.zeros(2, 4, device=device_type())
    placements = [_StridedShard(0, split_factor=3), Shard(0)]
    parameter = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size([8, 4]), stride=(4, 1))
    assert_refused(parameter, r"'block.w' \(8, 4\), placements .*split_factor.*Apply tensor parallelism first")


def run_kernel() -> None:
    whole = torch.zeros(8, 4, 4, 4, device=device_type())
    for dim in (2, 3):
        parameter = distribute_tensor(whole, mesh_of((4,)), [Shard(dim)], src_data_rank=None)
        text = rf"'block.w' \(8, 4, 4, 4\), placements .*: dimension {dim} is split.*Shard dimension 1 instead"
        assert_refused(parameter, text)


def run_inner_stack() -> None:
    whole = torch.zeros(2, 4, 6, 8, device=device_type())
    parameter = distribute_tensor(whole, mesh_of((4,)), [Shard(1)], src_data_rank=None)
    assert_refused(parameter, r"dimension 1 is split.*Shard dimension 0 instead", stack_dims=2)


def run_not_chunked() -> None:
    """Rows 3, 3, 1, 1 are as many as there are, but not where torch.chunk puts them: 2, 2, 2, 2."""
    rows = (3, 3, 1, 1)[dist.get_rank()]
    local = torch.zeros(rows, 4, device=device_type())
    parameter = DTensor.from_local(
        local, mesh_of((4,)), [Shard(0)], run_check=False, shape=torch.Size([8, 4]), stride=(4, 1)
    )
    assert_refused(parameter, rf"'block.w' \(8, 4\), .*rank {dist.get_rank()} holds \({rows}, 4\).*torch.chunk's rule")


def run_meta() -> None:
    with torch.device("meta"):
        parameter = DTensor.from_local(torch.zeros(2, 4), mesh_of((4,)), [Shard(0)], run_check=False)
    assert_refused(parameter, r"'block.w' is on the meta device: materialise")


def run_outside() -> None:
    """A mesh of ranks 0 and 1: the others own nothing of it, as with another pipeline stage's parameters."""
    mesh = DeviceMesh(device_type(), [0, 1])
    parameter = nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)], src_data_rank=None))
    if dist.get_rank() < 2:
        rowmuon.PeriodicRowMuon([("block.w", parameter)])
    else:
        assert_refused(parameter, rf"'block.w' \(6, 4\): rank {dist.get_rank()} is none of its mesh's ranks \[0, 1\]")


def run_mesh_order() -> None:
    """Rows are dealt by coordinate in distribute_tensor and by rank in full_tensor, so torch itself mixes them up."""
    mesh = DeviceMesh(device_type(), [[1, 0], [2, 3]])
    whole = torch.arange(48.0, device=device_type()).view(12, 4)
    parameter = distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)
    assert_refused(parameter, r"'block.w' \(12, 4\), placements .* mesh axis 1, .*\[\[1, 0\], \[2, 3\]\], don't rise")
    # Along the other axis they rise, if not on the whole mesh, and it's that axis's groups that are asked.
    run_rising_axis(mesh)
    run_rising_axis(DeviceMesh(device_type(), [[0, 2], [1, 3]]))


def run_rising_axis(mesh: DeviceMesh) -> None:
    spec = Spec("w", (6, 4))
    placed = distribute_tensor(start(spec).to(device_type()), mesh, [Shard(0), Replicate()], src_data_rank=None)
    parameter, alone = nn.Parameter(placed.clone()), build((spec,), "1:alone")
    optimizer, unsharded = optimizer_on({"w": parameter}, (spec,)), optimizer_on(alone, (spec,))
    for step in range(4):
        parameter.grad = distribute_tensor(gradient(spec, step), mesh, parameter.placements, src_data_rank=None)
        give_gradients(alone, (spec,), step)
        optimizer.step()
        unsharded.step()
    torch.testing.assert_close(parameter.detach().full_tensor(), alone["w"].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2])
def test_a_group_that_a_rank_is_not_in_is_refused_as_its_process_group(ranks, world_size):
    ranks(world_size).run(run_not_a_member)


def run_not_a_member() -> None:
    group, parameter = dist.new_group([1]), torch.zeros(4, 6, device=device_type())
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="process_group is a group that rank 0 isn't in"):
            rowmuon.PeriodicRowMuon([parameter], process_group=group)
    else:
        rowmuon.PeriodicRowMuon([parameter], process_group=group)


@pytest.mark.parametrize("world_size", [2])
def test_a_gradient_placed_otherwise_is_refused_in_the_step(ranks, world_size):
    ranks(world_size).run(run_gradient)


def run_gradient() -> None:
    specs = (Spec("w", (6, 4)),)
    params = build(specs, "2:S0")
    optimizer = optimizer_on(params, specs)
    before = params["w"].detach().to_local().clone()
    params["w"].grad = distribute_tensor(torch.ones(6, 4), mesh_of((2,)), [Replicate()], src_data_rank=None)
    with pytest.raises(ValueError, match=r"'w' is placed \(Shard\(dim=0\),\), its gradient \(Replicate\(\),\)"):
        optimizer.step()
    assert torch.equal(params["w"].detach().to_local(), before)


@pytest.mark.parametrize("world_size", [2])
def test_a_process_group_that_cannot_send_from_the_parameters_device(ranks, world_size):
    """As NCCL alone can't where FSDP2 offloads to the CPU; here gloo, said to be for CUDA alone."""
    ranks(world_size).run(run_device)


def run_device() -> None:
    group = dist.new_group(backend="cuda:gloo")
    parameter = nn.Parameter(torch.zeros(4, 6))
    with pytest.raises(
        ValueError, match=r"\(4, 6\) lies on the device 'cpu', .* from \['cuda'\] only.*cpu:gloo,cuda:nccl"
    ):
        rowmuon.PeriodicRowMuon([("w", parameter)], process_group=group)


@pytest.mark.parametrize("world_size", [2])
def test_adamws_settings_are_compared_from_a_device_that_the_group_sends_from(ranks, world_size):
    """AdamW sends nothing, so its parameters may lie where their group can't send from; what is compared may not."""
    ranks(world_size).run(run_offloaded_adamw)


def run_offloaded_adamw() -> None:
    group = dist.new_group(backend="cuda:gloo")
    groups = ProcessGroups(group)
    ranks = tuple(range(dist.get_world_size()))
    assert groups.sending_device(ranks, torch.device("cpu")) == torch.device("cuda")
    assert groups.sending_device(ranks, torch.device("cuda", 1)) == torch.device("cuda", 1)
    here = torch.device(device_type())
    assert ProcessGroups(dist.group.WORLD).sending_device(ranks, here) == here
