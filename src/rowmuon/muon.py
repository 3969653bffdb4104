"""Muon: every step is a refresh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rowmuon.optimizer import PeriodicRowMuon

__all__ = ["Muon"]


class Muon(PeriodicRowMuon):
    """Muon: :class:`PeriodicRowMuon` with period 1. Takes the same arguments, but neither period nor row_scale.

    It stays Muon when it loads the state dict of a periodic run.
    """

    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        for name in ("period", "row_scale", "stagger", "cheap_step", "gram_decay", "gram_damping"):
            if name in kwargs:
                raise TypeError(f"Muon takes no {name}: every step is a refresh. Use PeriodicRowMuon.")
        super().__init__(params, *args, period=1, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if param_group.get("period", 1) != 1:
            raise ValueError(f"period={param_group['period']!r} in a group of Muon, whose period is 1")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                group["period"] = 1
