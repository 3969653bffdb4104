"""Parameters, gradients and loops that the optimizer's tests share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import rowmuon


def make_params(
    shapes: Iterable[Sequence[int]], seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """Gaussian parameters; drawn in float64, so that every dtype starts from the same values, rounded."""
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    return [nn.Parameter(torch.randn(tuple(shape), **draw).to(dtype)) for shape in shapes]


def give_grads(params: Iterable[Tensor], step: int, scale: float = 1.0) -> None:
    """A gradient for each parameter: a part that stays and a part that changes, as in training."""
    for i, parameter in enumerate(params):
        still = torch.Generator().manual_seed(1_000 + i)
        moving = torch.Generator().manual_seed(10_000 * (step + 1) + i)
        draw = {"dtype": torch.float64}
        grad = torch.randn(parameter.shape, generator=still, **draw) + torch.randn(
            parameter.shape, generator=moving, **draw
        )
        parameter.grad = (scale * grad).to(parameter.dtype)


def train(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], num_steps: int, start: int = 0) -> list[str]:
    """Steps with `give_grads`; returns the kinds of the steps where the optimizer tells them."""
    kinds = []
    for step in range(start, start + num_steps):
        give_grads(params, step)
        kinds.append(getattr(optimizer, "next_step_kind", ""))
        optimizer.step()
    return kinds


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def relative_difference(found: Iterable[Tensor], expected: Iterable[Tensor], start: Iterable[Tensor]) -> float:
    """|| found - expected || over || expected - start ||, of all tensors together: how far the whole updates differ."""
    difference = distance = 0.0
    for a, b, zero in zip(found, expected, start, strict=True):
        difference += float((a.detach().double() - b.detach().double()).square().sum())
        distance += float((b.detach().double() - zero.detach().double()).square().sum())
    return (difference / distance) ** 0.5


def assert_equal(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Bit for bit."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"tensor {i} differs by {(a - b).abs().max()}"


def mixed_groups(params: Sequence[Tensor], **muon: Any) -> list[dict[str, Any]]:
    """Matrices to Muon, the rest to AdamW."""
    return [
        {"params": [p for p in params if p.ndim >= 2], "algorithm": "muon", **muon},
        {"params": [p for p in params if p.ndim < 2], "algorithm": "adamw", "lr": 1e-3},
    ]


def mixed_optimizer(params: Sequence[Tensor], **settings: Any) -> rowmuon.PeriodicRowMuon:
    return rowmuon.PeriodicRowMuon(mixed_groups(params), **{"lr": 0.02, "period": 3, **settings})


def momentum_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    return optimizer.state[parameter]["momentum_buffer"]
