"""Matrices, one row step of copies, and checks, for tests of the arithmetic on plain local tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rowmuon.update import row_step_

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
STEP = {"lr": 0.02, "weight_decay": 0.1, "beta": 0.9, "nesterov": True, "eps": 1e-7}


def gaussian(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def row_step(weight: Tensor, momentum: Tensor, grad: Tensor, scale: float = 1.0, **changed) -> tuple[Tensor, Tensor]:
    """(weight, momentum) after a row step of copies."""
    weight, momentum = weight.clone(), momentum.clone()
    row_step_([weight], [momentum], [grad], **{**STEP, "scales": [scale], **changed})
    return weight, momentum


def assert_same(value: Tensor, expected: Tensor) -> None:
    """To one rounding: where a block ends a scalar loop takes over from the vector one, and fuses or doesn't."""
    eps = torch.finfo(value.dtype).eps
    torch.testing.assert_close(value, expected, rtol=eps, atol=eps)


class NoHostRead(TorchDispatchMode):
    """Raises where a tensor's value is read by the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host read a tensor"
        return func(*args, **(kwargs or {}))
