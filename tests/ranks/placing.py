"""Puts full tensors on meshes, by torch's own means, never by `rowmuon.layout`.

A layout is a short text, which is its name in a test's id too: the mesh's shape, then one placement for each axis.

    "4:S0"         four ranks, rows split (FSDP2, column-parallel)
    "2x2:R,S0"     two replicas, each split over two ranks (HSDP)
    "2x2:X0,S0"    a strided shard on top of a shard (FSDP2 over tensor parallelism); the factor follows from the mesh
    "4:plain"      plain tensors, which a process group of all ranks replicates (DDP)
    "4:alone"      plain tensors, and nobody is told of the others
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ranks.pool import device_type

__all__ = ["full", "full_of", "is_plain", "mesh_of", "parse", "place", "place_gradient", "process_group_of"]


@lru_cache(maxsize=64)
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh of this process's ranks; made once, since every mesh makes process groups."""
    return init_device_mesh(device_type(), shape, mesh_dim_names=names)


def parse(layout: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """("2x2:R,S0") -> ((2, 2), ("R", "S0"))."""
    shape, _, names = layout.partition(":")
    return tuple(map(int, shape.split("x"))), tuple(names.split(","))


def is_plain(layout: str) -> bool:
    return layout.endswith((":plain", ":alone"))


def process_group_of(layout: str) -> dist.ProcessGroup | None:
    """What the optimizer is told about plain tensors."""
    return dist.group.WORLD if layout.endswith(":plain") else None


def _placements(shape: tuple[int, ...], names: tuple[str, ...], ndim: int) -> list[Placement]:
    """The placements of a tensor of ``ndim`` dimensions.

    What can't be split isn't: a dimension that the tensor doesn't have, or a convolution's kernel.
    """
    num_splittable = 2 if ndim == 4 else ndim
    out: list[Placement] = []
    for axis, name in enumerate(names):
        dim = int(name[1:]) if name != "R" else ndim
        if dim >= num_splittable:
            out.append(Replicate())
        elif name[0] == "S":
            out.append(Shard(dim))
        else:
            factor = math.prod(
                s for s, n in zip(shape[axis + 1 :], names[axis + 1 :], strict=True) if n[1:] == name[1:]
            )
            out.append(_StridedShard(dim, split_factor=factor))
    return out


def place(tensor: Tensor, layout: str) -> nn.Parameter:
    """A parameter with the values of ``tensor``, which every rank has in full. Nothing is sent."""
    device = torch.device(device_type())
    if is_plain(layout):
        return nn.Parameter(tensor.detach().clone().to(device))
    shape, names = parse(layout)
    placed = distribute_tensor(
        tensor.detach().to(device), mesh_of(shape), _placements(shape, names, tensor.ndim), src_data_rank=None
    )
    # Shards of one tensor on one process would share memory with it, and so with each other.
    return nn.Parameter(placed.clone())


def place_gradient(parameter: Tensor, grad: Tensor) -> None:
    """Gives a parameter its part of a full gradient."""
    grad = grad.to(parameter.device, parameter.dtype, copy=True)
    if isinstance(parameter, DTensor):
        grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None).clone()
    parameter.grad = grad


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor, on the CPU. Of sharded ones all ranks must call it."""
    return full_of({"": tensor})[""]


def full_of(tensors: Mapping[str, Tensor], *, on_rank: int | None = None) -> dict[str, Tensor]:
    """Copies of whole tensors, on the CPU, by one exchange of objects; on one rank alone if asked, and else nothing.

    Not by `full_tensor()`: torch 2.13 can't gather an uneven strided shard that leaves a rank without rows.
    """
    mine = {n: t.detach().to_local().cpu() for n, t in tensors.items() if isinstance(t, DTensor)}
    parts: list[dict[str, Tensor]] = [mine] * dist.get_world_size()
    if mine:
        indices = {n: _indices(t.device_mesh, t.placements, tuple(t.shape)) for n, t in tensors.items() if n in mine}
        parts = [{} for _ in range(dist.get_world_size())]
        told = {n: (indices[n], part) for n, part in mine.items()}
        if on_rank is None:
            dist.all_gather_object(parts, told)
        else:
            dist.gather_object(told, parts if dist.get_rank() == on_rank else None, dst=on_rank)
    if on_rank not in (None, dist.get_rank()):
        return {}
    out = {}
    for name, tensor in tensors.items():
        if name not in mine:
            out[name] = tensor.detach().to("cpu", copy=True)
            continue
        whole = torch.full((tensor.numel(),), float("nan"), dtype=tensor.dtype)
        for part in parts:
            if name in part:
                index, values = part[name]
                whole[index.flatten()] = values.flatten()
        out[name] = whole.view(tensor.shape)
    return out


@lru_cache(maxsize=4096)
def _indices(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> Tensor:
    """Which elements of a tensor this rank holds."""
    everything = torch.arange(math.prod(shape), device=device_type()).view(shape)
    return distribute_tensor(everything, mesh, placements, src_data_rank=None).to_local().cpu().clone()
