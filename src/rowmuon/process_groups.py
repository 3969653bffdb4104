"""Finds or makes the process group over a set of ranks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rowmuon.layout import Grid, Layout, grid_of, local_tensor

__all__ = ["UNPICKLED", "Comparison", "ProcessGroups", "check_process_group"]

Ranks = tuple[int, ...]
UNPICKLED = (
    "this optimizer was unpickled, and its process group stayed in the process that pickled it: set "
    "optimizer.process_group (to torch.distributed.group.WORLD, say) before its first step"
)

_made: tuple[Any, dict[Ranks, Any]] = (None, {})
"""(default process group, what was made under it): many optimizers on one mesh, say one for each parameter in a
post-accumulate hook, share the groups that the mesh itself hasn't got."""


class ProcessGroups:
    """Process groups by their ranks: the mesh's own where it has one, else made by their members alone.

    Args:
        plain: the process group over which plain tensors are replicated, or None.
    """

    def __init__(self, plain: Any = None) -> None:
        self._plain = plain
        self._groups: dict[Ranks, Any] = {}
        self._own: dict[Ranks, Any] = {}
        if plain is not None:
            self._groups[tuple(sorted(dist.get_process_group_ranks(plain)))] = plain

    def group_of(self, ranks: Ranks) -> Any:
        return self._own.get(ranks) or self._groups[ranks]

    def separate(self, layouts: Iterable[Layout]) -> None:
        """Makes groups that nothing else sends in, over the ranks that share a matrix; all must call it alike.

        During backward the model's own collectives run in the mesh's group, in an order that knows nothing of this one.
        Another optimizer's backward neither: each has its own.
        """
        for layout in layouts:
            if layout.matrices_are_whole:
                continue
            ranks = layout.shard_group(dist.get_rank())
            if ranks not in self._own and not self.is_fake(ranks):
                self._own[ranks] = _new(ranks, next(iter(self._groups[ranks]._device_types)))

    def is_fake(self, ranks: Ranks) -> bool:
        return dist.get_backend(self._groups[ranks]) == "fake"

    def sending_device(self, ranks: Ranks, wanted: torch.device) -> torch.device:
        """``wanted`` if the group over ``ranks`` sends from there, else a device from which it does.

        AdamW's parameters may be offloaded to where their group sends nothing from.
        """
        served = sorted({device.type for device in self._groups[ranks]._device_types})
        return wanted if wanted.type in served or not served else torch.device(served[0])

    def prepare(self, params: Iterable[tuple[Tensor, Layout]]) -> None:
        """Makes sure of a group for everything that the layouts may need. All members must call it alike.

        Raises:
            ValueError: a parameter lies on a device that its group's backend can't send from.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return
        rank = dist.get_rank()
        everyone = tuple(range(dist.get_world_size()))
        for parameter, layout in params:
            if layout.grid is None:
                continue
            mesh = getattr(parameter, "device_mesh", None)
            for axes in _axes(layout):
                ranks = layout.ranks_along(axes, rank)
                if ranks in self._groups:
                    _check_device(self._groups[ranks], parameter)
                    continue
                if mesh is not None and len(axes) == 1:
                    self._groups[ranks] = mesh.get_group(axes[0])
                elif ranks == everyone:
                    self._groups[ranks] = dist.group.WORLD
                else:
                    self._groups[ranks] = _make(ranks, local_tensor(parameter).device)
                _check_device(self._groups[ranks], parameter)
            if tuple(sorted(layout.grid.ranks)) == everyone:
                self._groups.setdefault(everyone, dist.group.WORLD)

    def comparisons(
        self, params: Iterable[tuple[Tensor, Layout | None]], idle: Iterable[tuple[Tensor, Layout | None]] = ()
    ) -> dict[Ranks, Comparison]:
        """How the ranks of each mesh compare something, in an order that is the same on all ranks.

        A mesh comes before those that lie inside it: there its ranks can tell each other which of those they know.

        Args:
            params: with their layouts; None for AdamW's, which need none.
            idle: parameters that are left alone here. Their meshes compare nonetheless, as does the process group of
                plain tensors, for other ranks may wait there.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return {}
        rank = dist.get_rank()
        out: dict[Ranks, Comparison] = {}
        if self._plain is not None and dist.get_world_size(self._plain) > 1:
            ranks = tuple(sorted(dist.get_process_group_ranks(self._plain)))
            out[ranks] = Comparison([ranks], torch.device("cpu"))
        moving = [(position, *known) for position, known in enumerate(params)]
        for position, parameter, layout in [*moving, *((None, *known) for known in idle)]:
            grid = _grid(parameter, self._plain) if layout is None else layout.grid
            if grid is None or len(grid.ranks) == 1 or rank not in grid.ranks:
                continue
            ranks = tuple(sorted(grid.ranks))
            if ranks not in out:
                stages = self._stages(parameter, grid, ranks, rank)
                out[ranks] = Comparison(stages, local_tensor(parameter).device)
            if position is not None:
                out[ranks].members.append(position)
        return dict(sorted(out.items(), key=lambda item: (-len(item[0]), item[0])))

    def _stages(self, parameter: Tensor, grid: Grid, ranks: Ranks, rank: int) -> list[Ranks]:
        """From the mesh alone: what groups were made beside it depends on the parameters, which may differ."""
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            return [ranks]
        axes = [axis for axis, size in enumerate(grid.shape) if size > 1]
        stages = [grid.slice_along((axis,), rank) for axis in axes]
        for axis, stage in zip(axes, stages, strict=True):
            self._groups.setdefault(stage, mesh.get_group(axis))
        return stages


@dataclass
class Comparison:
    """Among the ranks of one mesh.

    stages: groups to gather over, one after another, until all have heard from all.
    device: of a parameter there.
    members: positions of the parameters on that mesh, or on another one of the same ranks.
    """

    stages: list[Ranks]
    device: torch.device
    members: list[int] = field(default_factory=list)


def check_process_group(group: object) -> None:
    """Raises ValueError unless ``group`` is None or a process group that this rank is in."""
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    if dist.is_available() and dist.is_initialized() and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"process_group is a group that rank {dist.get_rank()} isn't in: give each rank one of its own groups"
        )
    raise ValueError(
        f"process_group={group!r} isn't a process group. Give torch.distributed.group.WORLD, what new_group returned, "
        "or mesh.get_group() of a device mesh."
    )


def _grid(parameter: Tensor, plain: Any) -> Grid | None:
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is not None:
        return grid_of(mesh)
    if plain is None:
        return None
    ranks = tuple(sorted(dist.get_process_group_ranks(plain)))
    return Grid((len(ranks),), ranks)


def _check_device(group: Any, parameter: Tensor) -> None:
    if dist.get_backend(group) == "fake":
        return
    device = local_tensor(parameter).device.type
    served = sorted({served.type for served in group._device_types})
    if device not in served:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} lies on the device {device!r}, but its process group sends "
            f"from {served} only. For parameters that are offloaded to the CPU initialise torch.distributed with a "
            "backend for both: init_process_group('cpu:gloo,cuda:nccl')."
        )


def _make(ranks: Ranks, device: Any) -> Any:
    """A group of this module's over ``ranks``."""
    global _made
    world: Any = dist.group.WORLD
    if _made[0] is not world:
        _made = (world, {})
    if ranks not in _made[1]:
        _made[1][ranks] = _new(ranks, device)
    return _made[1][ranks]


def _new(ranks: Ranks, device: Any) -> Any:
    """A new group whose collectives time out as the default group's do; else torch would wait half an hour."""
    world: Any = dist.group.WORLD
    options = getattr(world._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    with _named_by_members(ranks):
        return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)


_counts: tuple[Any, Counter[Ranks]] = (None, Counter())
"""(default process group, how many groups this module has made under it over some ranks)."""


@contextmanager
def _named_by_members(ranks: Ranks) -> Iterator[None]:
    """Names the group that is made in here by its ranks and how many were made over them: the same on all members.

    torch (2.11 to 2.13) names a group that its members make alone by how many groups their process has, of whatever
    ranks. A rank that is in one more than another, of a pipeline stage or an expert's, would wait for a name that
    nobody else uses. Where torch names them in another way, it is left to do so.
    """
    global _counts
    world: Any = dist.group.WORLD
    if _counts[0] is not world:
        _counts = (world, Counter())
    name = f"rowmuon {ranks} {_counts[1][ranks]}"
    digest = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
    c10d: Any = dist.distributed_c10d
    usual = getattr(c10d, "_hash_ranks_to_str", None)
    if usual is not None:
        c10d._hash_ranks_to_str = lambda _: digest
    try:
        yield
    finally:
        if usual is not None:
            c10d._hash_ranks_to_str = usual
    _counts[1][ranks] += 1


def _axes(layout: Layout) -> Sequence[tuple[int, ...]]:
    """The sets of mesh axes over which something may be sent."""
    found = [layout.shard_axes, layout.replica_axes, layout.column_axes]
    return [axes for i, axes in enumerate(found) if axes and axes not in found[:i]]
