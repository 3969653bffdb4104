"""Clipping by the global norm where some gradients are DTensors, on one mesh or several, and others plain tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rowmuon.layout import local_tensor
from rowmuon.runtime import add_over

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales all gradients so that their joint norm is at most ``max_norm``; every rank gets the same norm.

    ``torch.nn.utils.clip_grad_norm_`` raises on such a mix. Each distinct element counts once: parts of a shard are
    added over the mesh axes that split it, replicas (DTensor or plain, as DDP keeps them) aren't. Call it before the
    optimizer's step, on raw gradients; all ranks must call it alike.

    Args:
        parameters: those whose gradients count; without a gradient they count as zero.
        max_norm: > 0; inf only computes the norm, and touches no gradient.
        norm_type: p of the p-norm, > 0, or inf.
        error_if_nonfinite: raise if the norm isn't finite, before anything is scaled. Reads the norm on the host.

    Returns:
        The norm before clipping, a 0-dim tensor.

    Raises:
        ValueError: a max_norm or norm_type out of range, or a gradient that is a partial sum.
        RuntimeError: the norm isn't finite and ``error_if_nonfinite`` is set.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise ValueError(f"max_norm={max_norm!r} and norm_type={norm_type!r} must be > 0")
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in params if p.grad is not None]
    # A rank without a gradient still takes part: the sums go by what the parameters are.
    sums: dict[Any, Tensor] = {}
    for p in params:
        key = _axes(p)
        local = None if p.grad is None else local_tensor(p.grad)
        device = local_tensor(p).device
        part = torch.zeros((), device=device) if local is None else _powered_norm(local, norm_type)
        sums[key] = part if key not in sums else _combine(sums[key], part.to(sums[key].device), norm_type)
    total: Tensor | None = None
    for (mesh, axes), part in sums.items():
        for axis in axes:
            add_over(part, mesh.get_group(axis), maximum=math.isinf(norm_type))
        total = part if total is None else _combine(total, part.to(total.device), norm_type)
    norm = torch.zeros(()) if total is None else (total if math.isinf(norm_type) else total ** (1.0 / norm_type))
    if error_if_nonfinite and not bool(torch.isfinite(norm).item()):
        raise RuntimeError(f"the gradient norm is {norm.item()}; nothing was clipped")
    if math.isinf(max_norm):
        return norm
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        local = local_tensor(grad)
        local.mul_(factor.to(local.device))
    return norm


def _axes(parameter: Tensor) -> tuple[Any, tuple[int, ...]]:
    """(mesh, the axes that split the parameter)."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return None, ()
    for tensor in (parameter, parameter.grad):
        if tensor is not None and any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
            raise ValueError(
                f"a gradient of shape {tuple(parameter.shape)} is a partial sum ({tensor.placements}): reduce it first"  # type: ignore[attr-defined]
            )
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    return mesh, tuple(i for i, placement in enumerate(placements) if not placement.is_replicate())


def _powered_norm(tensor: Tensor, norm_type: float) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if tensor.numel() == 0:
        return torch.zeros((), dtype=dtype, device=tensor.device)
    norm = torch.linalg.vector_norm(tensor, norm_type, dtype=dtype)
    return norm if math.isinf(norm_type) else norm**norm_type


def _combine(a: Tensor, b: Tensor, norm_type: float) -> Tensor:
    return torch.maximum(a, b) if math.isinf(norm_type) else a + b
