"""Whether an optimizer computes what it is timed for: three steps against the update of whole matrices in float64.

With U the Nesterov momentum and O its orthogonalisation by five of Keller Jordan's polynomials, the reference is
W <- (1 - lr wd) W - lr 0.2 sqrt(max(m, n)) O. A peer may use other polynomials or another scale and still be a Muon: so
the direction of its first update is also held against the exact polar factor, from a decomposition. The gradients' rows
are strongly correlated, so that orthogonalising each rank's rows by themselves, a known fault, gives another direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rowdit.bench.contender import Workplace
from rowdit.bench.peers import LR, WEIGHT_DECAY

__all__ = ["Check", "check_optimizer"]

_SHAPES = ((64, 64), (192, 64), (64, 128))
_NUM_STEPS = 3
_MOMENTUM = 0.95
_KELLER_JORDAN = (3.4445, -4.7750, 2.0315)

# bf16 iterations leave 0.01 to 0.02 of an update; any other scale, decay or momentum leaves more than this.
_MAX_APART = 0.05
# The polynomials leave singular values of 0.7 to 1.2, so a cosine of 0.98 and more; rows by themselves give under 0.9.
_MIN_COSINE = 0.95


@dataclass(frozen=True)
class Check:
    """`apart`: ||W - reference|| / ||reference - start|| after three steps. `cosine`: of the first update with the
    polar factor, the least over the matrices. `error`: what the optimizer raised, if it did."""

    apart: float = math.inf
    cosine: float = 0.0
    error: str = ""

    @property
    def correct(self) -> bool:
        """Whether its update is the orthogonalisation of whole matrices, in whatever scale and by which polynomials."""
        return self.cosine > _MIN_COSINE

    @property
    def verdict(self) -> str:
        if self.error:
            return f"fails: {self.error}"
        if not self.correct:
            return f"NOT the orthogonalised matrix (cosine {self.cosine:.3f})"
        if self.apart < _MAX_APART:
            return f"the reference's update (to {self.apart:.3f})"
        return f"orthogonalised, but another scale, momentum or decay (cosine {self.cosine:.3f})"


def check_optimizer(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], workplace: Workplace) -> Check:
    """Collective where the workplace has a mesh: all ranks get the same answer.

    Args:
        make: the optimizer of some parameters, with `LR` and `WEIGHT_DECAY`.
    """
    generator = torch.Generator().manual_seed(1)
    starts = [torch.randn(shape, generator=generator, dtype=torch.float64) * 0.02 for shape in _SHAPES]
    grads = [[_correlated(shape, generator) for shape in _SHAPES] for _ in range(_NUM_STEPS)]
    params = [torch.nn.Parameter(workplace.place(start)) for start in starts]
    try:
        optimizer = make(params)
        first: list[Tensor] = []
        for index, step in enumerate(grads):
            for param, grad in zip(params, step, strict=True):
                param.grad = workplace.place(grad)
            optimizer.step()
            if index == 0:
                first = [_whole(param) for param in params]
    except Exception as error:  # a peer's own fault, whatever it is, must not end the run
        lines = str(error).strip().splitlines() or [""]
        return Check(error=f"{type(error).__name__}: {lines[0]}")
    cosines = [
        _cosine(start * (1 - LR * WEIGHT_DECAY) - after, _polar_factor(grad))
        for start, after, grad in zip(starts, first, grads[0], strict=True)
    ]
    wanted = _reference(starts, grads)
    apart = torch.stack([(_whole(p) - w).norm() for p, w in zip(params, wanted, strict=True)]).norm()
    gone = torch.stack([(w - start).norm() for w, start in zip(wanted, starts, strict=True)]).norm()
    return Check(float(apart / gone), min(cosines))


def _correlated(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Singular values from 1 down to 0.03, left and right vectors at random."""
    small = min(shape)
    left, right = (
        torch.linalg.qr(torch.randn(side, small, generator=generator, dtype=torch.float64))[0] for side in shape
    )
    return left * torch.logspace(0, -1.5, small, dtype=torch.float64) @ right.T


def _whole(param: Tensor) -> Tensor:
    value = param.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).double().cpu().clone()


def _polar_factor(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-300))


def _reference(starts: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    weights = [start.clone() for start in starts]
    momenta = [torch.zeros_like(start) for start in starts]
    for step in grads:
        for weight, momentum, grad in zip(weights, momenta, step, strict=True):
            momentum.lerp_(grad, 1 - _MOMENTUM)
            left, values, right = torch.linalg.svd(grad.lerp(momentum, _MOMENTUM), full_matrices=False)
            values = values / values.norm()
            a, b, c = _KELLER_JORDAN
            for _ in range(5):
                values = a * values + b * values**3 + c * values**5
            weight.mul_(1 - LR * WEIGHT_DECAY)
            weight.sub_((left * values) @ right, alpha=LR * 0.2 * math.sqrt(max(weight.shape)))
    return weights
