"""The float64 reference's run over the specs of `models.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ranks.models import Spec, gradient, start
from reference.step import AdamWSettings, MuonSettings, run

__all__ = ["expected_weights"]

_AT_MOST = 16
"""Steps that are computed once and kept."""


def expected_weights(
    specs: Sequence[Spec], num_steps: int, phases: Mapping[str, int] | None = None, **settings: Any
) -> dict[str, Tensor]:
    """Weights after ``num_steps`` steps with `models.gradient`, float64.

    Args:
        phases: of a staggered run, by name. Phase p > 0 of period K refreshes at 0, p, p + K, ...
        settings: of all Muon parameters, under the reference's names; a spec's own win. lr also for AdamW.
    """
    key = (tuple(specs), tuple(sorted((phases or {}).items())), tuple(sorted(settings.items())))
    return _history(*key)[num_steps]


@lru_cache(maxsize=64)
def _history(
    specs: tuple[Spec, ...], phases: tuple[tuple[str, int], ...], settings: tuple[tuple[str, Any], ...]
) -> list[dict[str, Tensor]]:
    weights = [start(spec).double().numpy() for spec in specs]
    grads = [[gradient(spec, step).double().numpy() for spec in specs] for step in range(_AT_MOST)]
    chosen = [_settings(spec, dict(phases).get(spec.name, 0), dict(settings)) for spec in specs]
    return [
        {spec.name: torch.from_numpy(value) for spec, value in zip(specs, values, strict=True)}
        for values in [weights, *run(weights, grads, chosen)]
    ]


def _settings(spec: Spec, phase: int, settings: dict[str, Any]) -> MuonSettings | AdamWSettings:
    settings = {"lr": 0.02, **settings, **spec.settings}
    if spec.algorithm == "adamw":
        return AdamWSettings(lr=settings["lr"])
    settings.setdefault("period", 3)
    if phase:
        settings["period"] = ((0, None), (phase, settings["period"]))
    return MuonSettings(chunks=spec.chunks, **settings)
