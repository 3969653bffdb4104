"""How the optimizer is pickled and copied."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Self, cast

from torch.optim import Optimizer

from rowmuon.state import finish_loading

if TYPE_CHECKING:
    import torch.distributed as dist

    from rowmuon.optimizer import PeriodicRowMuon

__all__ = ["Copies"]


class Copies(Optimizer):
    """Of `rowmuon.optimizer.PeriodicRowMuon`: what is pickled, and what is made anew."""

    if TYPE_CHECKING:
        process_group: dist.ProcessGroup | None
        _process_group: dist.ProcessGroup | None
        _needs_process_group: bool

        def _rebuild(self) -> None: ...

    def __getstate__(self) -> dict[str, Any]:
        # As torch does: no hooks, nor the `step` that a scheduler put over this object's own. A process group is a
        # handle of this process; plans and layouts are made again from the groups.
        names = ("options", "stagger", "ns_dtype", "state_dtype", "skip_nonfinite", "num_skipped_steps", "traffic")
        kept = {name: self.__dict__[name] for name in (*names, "overlap", "compile")}
        needs = self._needs_process_group or self.process_group is not None
        return {**super().__getstate__(), **kept, "_needs_process_group": needs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        finish_loading(cast("PeriodicRowMuon", self))
        if "_runtime" in self.__dict__:
            return
        self._process_group = None  # unpickled or copied
        self._rebuild()
        self._is_set_up = True

    def __copy__(self) -> Self:
        # Its parameters are this one's, and their gradients can be sent out only once.
        return self._copied({**self.__getstate__(), "overlap": None}, type(self).__new__(type(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = copied = type(self).__new__(type(self))
        return self._copied(copy.deepcopy(self.__getstate__(), memo), copied)

    def _copied(self, state: dict[str, Any], copied: Self) -> Self:
        copied.__setstate__(state)
        if self.process_group is not None:
            copied.process_group = self.process_group
        return copied
