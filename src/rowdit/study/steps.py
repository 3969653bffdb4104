"""Other cheap steps between refreshes, as experiments: what a row step has to beat.

Every direction D below has the Frobenius norm sqrt(min(m, n)) that an exact polar factor of an m x n matrix has, and
is applied as W <- W - lr row_scale s_spectral(m, n) D, so one `row_scale` means the same for all of them. U is the
momentum or its Nesterov mix, as in `rowmuon`.

    sign     D = sign(U) / sqrt(max(m, n))                                           LionMuon, arXiv:2605.19811
    blocks   every block of rows orthogonalised by itself, as if it were a shard     MuonBP, arXiv:2510.16981
    gram     D ~ U (U0^T U0 + damping)^(-1/2), or (U0 U0^T + damping)^(-1/2) U       ours; U0 is U at the last refresh

`gram` keeps a factor on the matrix's small side from the last refresh. Skipping needs no code: `row_scale` 0.

These are for one process and whole matrices: experiments, not a product. What wins moves to `rowmuon`, as `"gram_row"`
has (`rowmuon.PeriodicRowMuon`), which keeps one on the input side, from a mean over the refreshes, and then takes rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rowmuon
from rowdit.train import optimizers
from rowdit.train.config import EXPERIMENTS, ConfigError, OptimizerConfig

DEFAULT_NUM_BLOCKS = 4
DEFAULT_DAMPING = 1e-3


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that `config` describes, experimental ones too."""
    if config.cheap_step not in EXPERIMENTS:
        return optimizers.build_optimizer(model, config)
    groups, common = optimizers.muon_arguments(model, config)
    return CheapStepMuon(
        groups,
        **common,
        period=config.period,
        cheap_scale=config.row_scale,
        cheap_step=config.cheap_step,
        parameter=config.cheap_step_parameter,
    )


def sign_direction(U_mn: Tensor) -> Tensor:
    """sign(U) with the RMS of a polar factor; zeros stay zero.

    Args:
        U_mn: (..., m, n), floating.
    """
    return U_mn.sign() / math.sqrt(max(U_mn.shape[-2:]))


def blocks_direction(U_mn: Tensor, num_blocks: int, orthogonalize: Callable[[Tensor], Tensor]) -> Tensor:
    """Each of `num_blocks` blocks of rows (sizes as `torch.chunk` makes them) orthogonalised by itself.

    Args:
        U_mn: (m, n), floating.
        num_blocks: >= 1; more than m act as m.
        orthogonalize: (b, n) -> its approximate polar factor.
    """
    whole = max(U_mn.shape)
    blocks = [orthogonalize(B_bn) * math.sqrt(max(B_bn.shape) / whole) for B_bn in U_mn.chunk(num_blocks)]
    return torch.cat(blocks)


def gram_factor(U_mn: Tensor, damping: float) -> Tensor:
    """(Gram matrix of the small side / its top eigenvalue + damping)^(-1/2), (r, r) float32 with r = min(m, n).

    A matrix of zeros gives the identity: the steps that follow are then the momentum itself, scaled.

    Args:
        U_mn: (m, n), floating, finite.
        damping: > 0; relative to the top eigenvalue.
    """
    X = U_mn.double()
    m, n = X.shape
    top = X.abs().max()  # the Gram matrix of tiny gradients would underflow before its eigenvalues are compared
    if not top > 0:
        return torch.eye(min(m, n), dtype=torch.float32, device=U_mn.device)
    X = X / top
    eigenvalues, vectors = torch.linalg.eigh(X.T @ X if m >= n else X @ X.T)
    weights = (eigenvalues.clamp(min=0) / eigenvalues[-1] + damping).rsqrt()
    return ((vectors * weights) @ vectors.T).float()


def gram_direction(U_mn: Tensor, factor_rr: Tensor) -> Tensor:
    """U times the factor on its small side, scaled to the Frobenius norm of a polar factor; zeros stay zero.

    Args:
        U_mn: (m, n), floating.
        factor_rr: from `gram_factor` of a matrix of the same shape.
    """
    m, n = U_mn.shape
    top = U_mn.abs().max()
    X = (U_mn / top.clamp(min=torch.finfo(U_mn.dtype).tiny)).float()
    D = X @ factor_rr if m >= n else factor_rr @ X
    norm = torch.linalg.vector_norm(D)
    return torch.where(norm > 0, D * (math.sqrt(min(m, n)) / norm), torch.zeros_like(D)).to(U_mn.dtype)


class CheapStepMuon(rowmuon.PeriodicRowMuon):
    """Periodic Muon with another cheap step; refreshes, momentum and AdamW groups are `PeriodicRowMuon`'s own.

    Args:
        params: groups of plain 2-D parameters, as for `PeriodicRowMuon`.
        cheap_step: `"sign"`, `"blocks"` or `"gram"`.
        cheap_scale: RMS of a cheap step over a refresh's, >= 0.
        parameter: number of blocks, or damping; None takes the default.
        **arguments: of `PeriodicRowMuon`, but `row_scale`.

    Raises:
        ConfigError: an unknown cheap step.
    """

    def __init__(
        self, params: Any, *, cheap_step: str, cheap_scale: float, parameter: float | None = None, **arguments: Any
    ) -> None:
        if cheap_step not in EXPERIMENTS:
            raise ConfigError(f"cheap_step = {cheap_step!r}: must be one of {', '.join(EXPERIMENTS)}")
        self.cheap_step, self.cheap_scale, self.parameter = cheap_step, cheap_scale, parameter
        # With row_scale 0 the parent's row step only takes the gradient in and decays the weights.
        super().__init__(params, row_scale=0.0, **arguments)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step; see the module."""
        refreshes = {p: self._is_due(p) for group in self._muon_groups() for p in group["params"]}
        loss = super().step(closure)
        for group in self._muon_groups():
            for p in group["params"]:
                if p.grad is not None:
                    self._after(p, group, refreshes[p])
        return loss

    def _muon_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["algorithm"] == "muon"]

    def _is_due(self, parameter: Tensor) -> bool:
        return any(p is parameter and due for p, _, due in self._muon_params())

    def _after(self, p: Tensor, group: dict[str, Any], refreshed: bool) -> None:
        """The cheap step of one parameter; at a refresh what later cheap steps need."""
        M, mu = self.state[p]["momentum_buffer"], group["momentum"]
        U = torch.lerp(p.grad.to(M.dtype), M, mu) if group["nesterov"] else M  # type: ignore[union-attr]
        chunks = U.chunk(group["chunks"])
        if refreshed:
            if self.cheap_step == "gram":
                damping = self.parameter or DEFAULT_DAMPING
                self.state[p]["small_side"] = torch.stack([gram_factor(U_mn, damping) for U_mn in chunks])
            return
        for i, (W_mn, U_mn) in enumerate(zip(p.chunk(group["chunks"]), chunks, strict=True)):
            num_rows, num_cols = U_mn.shape
            scale = rowmuon.spectral_scale(num_rows, num_cols, group["adjust_lr_fn"])
            D = self._direction(U_mn, group, self.state[p].get("small_side"), i)
            W_mn.sub_(D.to(W_mn.dtype) * (float(group["lr"]) * self.cheap_scale * scale))

    def _direction(self, U_mn: Tensor, group: dict[str, Any], factors: Tensor | None, i: int) -> Tensor:
        if self.cheap_step == "sign":
            return sign_direction(U_mn)
        if self.cheap_step == "blocks":

            def orthogonalize(B_bn: Tensor) -> Tensor:
                return rowmuon.newton_schulz(B_bn, group["ns_coefficients"], eps=group["eps"], dtype=self.ns_dtype)

            return blocks_direction(U_mn, int(self.parameter or DEFAULT_NUM_BLOCKS), orthogonalize)
        if factors is None:
            raise RuntimeError("a Gram-factor step before the first refresh")
        return gram_direction(U_mn, factors[i])
