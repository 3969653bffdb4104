"""Real modules under FSDP2, HSDP, tensor parallelism, both, DDP and a mix of all, trained with real gradients.

Each trains as the float64 model does on one process, by the reference's optimizer on whole batches.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ranks.checks import assert_same_bits_on_replicas, counted_step
from ranks.placing import full_of, mesh_of
from ranks.pool import device_type
from ranks.toy import ReferenceTrainer, Toy, batch, loss_of, make_toy, optimizer_for

NUM_STEPS = 7  # two refreshes and what follows them
# Gradients in float32 and their sums over ranks in another order differ by some 1e-6 of themselves; Newton-Schulz
# multiplies what is small in them, and weights that differ make other gradients.
TOLERANCE = 2e-4
HSDP = ("replica", "shard")
TP = {"qkv": ColwiseParallel(), "proj": RowwiseParallel(), "fc1": ColwiseParallel(), "fc2": RowwiseParallel()}


def shard_all(model: Toy, mesh: DeviceMesh, **options: object) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def columns_where_even(parameter: nn.Parameter) -> Shard | None:
    """FSDP2 splits another dimension than the first only evenly."""
    size = dist.get_world_size()
    return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % size == 0 else None


def fsdp(model: Toy, num_ranks: int) -> tuple[nn.Module, int]:
    shard_all(model, mesh_of((num_ranks,)))
    return model, num_ranks


def fsdp_columns(model: Toy, num_ranks: int) -> tuple[nn.Module, int]:
    shard_all(model, mesh_of((num_ranks,)), shard_placement_fn=columns_where_even)
    return model, num_ranks


def hsdp(model: Toy, num_ranks: int) -> tuple[nn.Module, int]:
    shard_all(model, mesh_of((num_ranks // 2, 2), HSDP))
    return model, num_ranks


def hsdp_of_one(model: Toy, num_ranks: int) -> tuple[nn.Module, int]:
    """A replica axis of size 1, and a shard axis of size 1."""
    fully_shard(model.blocks[0], mesh=mesh_of((1, num_ranks), HSDP))
    fully_shard(model.blocks[1], mesh=mesh_of((num_ranks, 1), HSDP))
    fully_shard(model, mesh=mesh_of((1, num_ranks), HSDP))
    return model, num_ranks


def tp(model: Toy, num_ranks: int) -> tuple[nn.Module, int]:
    """Every rank sees the whole batch."""
    for block in model.blocks:
        parallelize_module(block, mesh_of((num_ranks,)), TP)
    return model, 1


def fsdp_tp(model: Toy, num_ranks: int) -> tuple[nn.Module, int]:
    """Strided shards in the column-parallel modules, two-dimensional shards in the row-parallel ones."""
    mesh = mesh_of((num_ranks // 2, 2), ("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], TP)
    shard_all(model, mesh["dp"])
    return model, num_ranks // 2


def hsdp_tp(model: Toy, num_ranks: int) -> tuple[nn.Module, int]:
    mesh = mesh_of((2, num_ranks // 4, 2), ("replica", "shard", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], TP)
    shard_all(model, mesh["replica", "shard"])
    return model, num_ranks // 2


def ddp(model: Toy, num_ranks: int) -> tuple[nn.Module, int]:
    return DistributedDataParallel(model), num_ranks


def mix(model: Toy, num_ranks: int) -> tuple[nn.Module, int]:
    """FSDP2, FSDP2 over tensor parallelism, HSDP, and plain replicated tensors (embed, head), all in one model."""
    mesh = mesh_of((num_ranks // 2, 2), ("dp", "tp"))
    first, second, third = model.blocks
    fully_shard(first, mesh=mesh["dp"])
    parallelize_module(second, mesh["tp"], TP)
    fully_shard(second, mesh=mesh["dp"])
    fully_shard(third, mesh=mesh_of((num_ranks // 2, 2), HSDP))
    return model, num_ranks // 2


LAYOUTS: dict[str, tuple[Callable[..., tuple[nn.Module, int]], tuple[int, ...]]] = {
    "fsdp": (fsdp, (1, 2, 3, 4, 8)),
    "fsdp_columns": (fsdp_columns, (1, 2, 3)),
    "hsdp": (hsdp, (2, 4, 8)),
    "hsdp_of_one": (hsdp_of_one, (1, 2, 3, 4)),
    "tp": (tp, (1, 2)),
    "fsdp_tp": (fsdp_tp, (2, 4, 8)),
    "hsdp_tp": (hsdp_tp, (4, 8)),
    "ddp": (ddp, (1, 2, 3, 4)),
    "mix": (mix, (2, 4, 8)),
}
GRID = [(size, name) for name, (_, sizes) in LAYOUTS.items() for size in sizes]


def train(name: str, refresh: str) -> None:
    sizes = {"num_blocks": 3} if name == "mix" else {}
    reference = ReferenceTrainer(make_toy(**sizes))
    model, num_shares = LAYOUTS[name][0](make_toy(**sizes).to(device_type()), dist.get_world_size())
    optimizer = optimizer_for(model, refresh=refresh, process_group=dist.group.WORLD)
    share = dist.get_rank() * num_shares // dist.get_world_size()
    for step in range(NUM_STEPS):
        x, y = batch(step)
        reference.step(x, y)
        model.zero_grad()
        loss_of(
            model, x.chunk(num_shares)[share].to(device_type()), y.chunk(num_shares)[share].to(device_type())
        ).backward()
        if name == "mix":
            average_plain_gradients(model)
        counted_step(optimizer)
        assert_same_bits_on_replicas(dict(model.named_parameters()))
    found = full_of({name.removeprefix("module."): p for name, p in model.named_parameters()})
    error, worst = reference.error(found)
    assert error <= TOLERANCE, f"{worst}: off by {error:.2g}"


def average_plain_gradients(model: nn.Module) -> None:
    """What DDP would do for the parameters that nobody shards."""
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize(("world_size", "name"), GRID)
def test_trains_as_one_process_does(ranks, world_size, name, refresh):
    ranks(world_size).run(train, name, refresh)
