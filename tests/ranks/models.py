"""Small sets of parameters that hold every shape that sharding has trouble with, their gradients, and optimizers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import rowmuon
from ranks.placing import place, place_gradient, process_group_of

__all__ = ["EVERY_SHAPE", "Spec", "build", "give_gradients", "gradient", "groups_of", "optimizer_on", "start"]


@dataclass(frozen=True)
class Spec:
    """One parameter and what its group says of it."""

    name: str
    shape: tuple[int, ...]
    algorithm: str = "muon"
    chunks: int = 1
    dtype: torch.dtype = torch.float32
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)


EVERY_SHAPE = (
    Spec("even", (16, 8)),
    Spec("uneven_tall", (13, 6)),
    Spec("uneven_wide", (5, 12)),
    Spec("uneven_wide_too", (5, 12)),  # the same shape twice: one stack
    Spec("one_row", (1, 8)),  # empty on all ranks but one
    Spec("three_rows", (3, 8)),
    Spec("one_column", (6, 1)),
    Spec("chunked", (3 * 7, 10), chunks=3),  # borders of chunks and of shards don't meet
    Spec("like_a_chunk", (7, 10)),  # stacked with those
    Spec("chunked_thin", (6 * 2, 4), chunks=6),
    Spec("experts", (5, 6, 8)),
    Spec("experts_even", (8, 4, 6)),
    Spec("conv", (7, 4, 3, 3)),
    Spec("table", (11, 6), algorithm="adamw"),
    Spec("bias", (9,), algorithm="adamw"),
)
"""Uneven, empty, chunked, 3-D and convolution shapes beside AdamW's, at any number of ranks."""


def _generator(*key: object) -> torch.Generator:
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:6], "big")
    return torch.Generator().manual_seed(seed)


def start(spec: Spec, scale: float = 0.05) -> Tensor:
    """Initial values. Small against the updates, so that the rounding of weights doesn't hide an update's error."""
    return (scale * torch.randn(spec.shape, generator=_generator(spec.name, "start"))).to(spec.dtype)


def gradient(spec: Spec, step: int) -> Tensor:
    """The full gradient of a step: a part that stays and one that changes, as in training."""
    still = torch.randn(spec.shape, generator=_generator(spec.name, "still"))
    return (still + torch.randn(spec.shape, generator=_generator(spec.name, step))).to(spec.dtype)


def build(specs: Iterable[Spec], layout: str) -> dict[str, nn.Parameter]:
    """All parameters, placed alike."""
    return {spec.name: place(start(spec), layout) for spec in specs}


def give_gradients(params: Mapping[str, Tensor], specs: Iterable[Spec], step: int) -> None:
    for spec in specs:
        place_gradient(params[spec.name], gradient(spec, step))


def groups_of(params: Mapping[str, Tensor], specs: Sequence[Spec]) -> list[dict[str, Any]]:
    """A group for each way in which the specs are treated, in the order in which they come up."""
    groups: dict[str, dict[str, Any]] = {}
    for spec in specs:
        own = {"algorithm": spec.algorithm, **spec.settings}
        if spec.algorithm == "muon":
            own["chunks"] = spec.chunks
        group = groups.setdefault(repr(sorted(own.items())), {**own, "params": []})
        group["params"].append((spec.name, params[spec.name]))
    return list(groups.values())


def optimizer_on(
    params: Mapping[str, Tensor], specs: Sequence[Spec], layout: str = "1:alone", **settings: Any
) -> rowmuon.PeriodicRowMuon:
    """Period 3; float32 wherever the optimizer may choose a dtype, unless the settings say otherwise."""
    exact = {"ns_dtype": torch.float32, "comm_dtype": torch.float32}
    settings = {"lr": 0.02, "period": 3, **exact, **settings}
    return rowmuon.PeriodicRowMuon(groups_of(params, specs), process_group=process_group_of(layout), **settings)
