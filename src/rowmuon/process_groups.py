"""Finds or makes the process group over a set of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rowmuon.layout import Layout, local_tensor

__all__ = ["ProcessGroups"]

Ranks = tuple[int, ...]

_made: tuple[Any, dict[Ranks, Any]] = (None, {})
"""(default process group, what was made under it): many optimizers on one mesh, say one for each parameter in a
post-accumulate hook, share the groups that the mesh itself hasn't got."""


class ProcessGroups:
    """Process groups by their ranks: the mesh's own where it has one, else made by their members alone."""

    def __init__(self) -> None:
        self._groups: dict[Ranks, Any] = {}

    def known(self, group: Any) -> None:
        """Registers a group that exists already."""
        if group is not None:
            self._groups.setdefault(tuple(sorted(dist.get_process_group_ranks(group))), group)

    def group_of(self, ranks: Ranks) -> Any:
        return self._groups[ranks]

    def is_fake(self, ranks: Ranks) -> bool:
        return dist.get_backend(self._groups[ranks]) == "fake"

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

    def comparisons(self, layouts: Iterable[Layout]) -> dict[Ranks, tuple[list[Ranks], list[int]]]:
        """How the ranks of each mesh compare something, and what they do together.

        Returns:
            The ranks of a mesh -> (groups to gather over, one after another, until all have heard from all; positions
            of the layouts on that mesh, or on another one of the same ranks).
        """
        out: dict[Ranks, tuple[list[Ranks], list[int]]] = {}
        for position, layout in enumerate(layouts):
            if layout.grid is None or len(layout.grid.ranks) == 1:
                continue
            ranks = tuple(sorted(layout.grid.ranks))
            if ranks not in out:
                rank = dist.get_rank()
                along = [layout.ranks_along(axes, rank) for axes in (layout.shard_axes, layout.replica_axes) if axes]
                out[ranks] = ([ranks] if ranks in self._groups else along, [])
            out[ranks][1].append(position)
        return out


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
    """A new group whose collectives time out as the default group's do; else torch would wait half an hour."""
    global _made
    world: Any = dist.group.WORLD
    if _made[0] is not world:
        _made = (world, {})
    if ranks not in _made[1]:
        options = getattr(world._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        _made[1][ranks] = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    return _made[1][ranks]


def _axes(layout: Layout) -> Sequence[tuple[int, ...]]:
    """The sets of mesh axes over which something may be sent."""
    found = [layout.shard_axes, layout.replica_axes, layout.column_axes]
    return [axes for i, axes in enumerate(found) if axes and axes not in found[:i]]
