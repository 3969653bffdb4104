"""Finds or makes the process group over a set of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rowmuon.layout import Layout

__all__ = ["ProcessGroups"]


class ProcessGroups:
    """Process groups by their ranks: the mesh's own where it has one, else made by their members alone."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], Any] = {}

    def known(self, group: Any) -> None:
        """Registers a group that exists already."""
        if group is not None:
            self._groups.setdefault(tuple(sorted(dist.get_process_group_ranks(group))), group)

    def group_of(self, ranks: tuple[int, ...]) -> Any:
        return self._groups[ranks]

    def is_fake(self, ranks: tuple[int, ...]) -> bool:
        return dist.get_backend(self._groups[ranks]) == "fake"

    def prepare(self, params: Iterable[tuple[Tensor, Layout]]) -> None:
        """Makes sure of a group for everything that the layouts may need. All members must call it alike."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        rank = dist.get_rank()
        for parameter, layout in params:
            mesh = getattr(parameter, "device_mesh", None)
            if layout.grid is None or (mesh is not None and mesh.get_coordinate() is None):
                continue
            for axes in _axes(layout):
                ranks = layout.ranks_along(axes, rank)
                if ranks in self._groups:
                    continue
                if mesh is not None and len(axes) == 1:
                    self._groups[ranks] = mesh.get_group(axes[0])
                elif ranks == tuple(range(dist.get_world_size())):
                    self._groups[ranks] = dist.group.WORLD
                else:
                    self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)

    def members(self, layouts: Iterable[Layout]) -> dict[tuple[int, ...], list[int]]:
        """Ranks of each process group -> positions of the layouts that are worked on over it."""
        rank = dist.get_rank() if self._groups else 0
        out: dict[tuple[int, ...], list[int]] = {}
        for position, layout in enumerate(layouts):
            for axes in _axes(layout):
                out.setdefault(layout.ranks_along(axes, rank), []).append(position)
        return out


def _axes(layout: Layout) -> list[tuple[int, ...]]:
    """The sets of mesh axes over which something may be sent."""
    found = [layout.shard_axes, layout.replica_axes, layout.column_axes]
    return [axes for i, axes in enumerate(found) if axes and axes not in found[:i]]
