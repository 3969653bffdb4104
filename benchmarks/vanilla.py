"""The baseline: sharded Muon as public video trainers do it, written as plainly as it is done there."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from rowmuon import newton_schulz
from rowmuon.orthogonalize import resolve_coefficients


class VanillaMuon(torch.optim.Optimizer):
    """Muon on ``Shard(0)`` DTensors. Matrix by matrix: gather it in fp32, orthogonalise it on every rank.

    The momentum lives on the shards. Every step each matrix's direction is gathered by a synchronous fp32 all-gather,
    every rank runs the whole Newton-Schulz (the same bf16 kernel as ``rowmuon``'s) and keeps its own rows. So all ranks
    do all the arithmetic, wait for each matrix to arrive, and send (ranks - 1) times their shard.

    Args:
        params: DTensors on a 1-D mesh, sharded by rows; a group may say ``chunks``.
        lr, weight_decay, momentum: as in ``torch.optim.Muon`` with Nesterov and ``adjust_lr_fn="match_rms_adamw"``.

    ``bytes_sent`` counts what leaves this rank, padding included, its own part excluded.
    """

    def __init__(
        self, params: Iterable[DTensor], lr: float, weight_decay: float, momentum: float = 0.95, chunks: int = 1
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "chunks": chunks}
        super().__init__(params, defaults)
        self.coefficients = resolve_coefficients("keller_jordan", 5)
        self.bytes_sent = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                weight, grad = param.to_local(), param.grad.to_local()
                momentum = self.state[param].setdefault("momentum_buffer", torch.zeros_like(weight))
                momentum.lerp_(grad, 1 - group["momentum"])
                whole = self._all_gather(grad.lerp(momentum, group["momentum"]), param)
                matrices = whole.view(group["chunks"], -1, param.shape[1])
                directions = newton_schulz(matrices, self.coefficients).reshape(param.shape)
                scale = 0.2 * math.sqrt(max(matrices.shape[1:]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(self._own_rows(directions, param), alpha=-group["lr"] * scale)

    def _all_gather(self, shard: Tensor, param: DTensor) -> Tensor:
        """(own rows, n) -> (m, n) fp32. Only the last ranks' shards are short, so the padding ends up at the end."""
        num_ranks = param.device_mesh.size()
        num_padded = math.ceil(param.shape[0] / num_ranks)
        shard = F.pad(shard.float(), (0, 0, 0, num_padded - shard.shape[0])).contiguous()
        whole = shard.new_empty(num_padded * num_ranks, param.shape[1])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        gather(whole, shard, group=param.device_mesh.get_group())
        self.bytes_sent += (num_ranks - 1) * shard.numel() * shard.element_size()
        return whole[: param.shape[0]]

    @staticmethod
    def _own_rows(whole: Tensor, param: DTensor) -> Tensor:
        num_padded = math.ceil(param.shape[0] / param.device_mesh.size())
        start = min(param.device_mesh.get_local_rank() * num_padded, param.shape[0])
        return whole[start : start + param.to_local().shape[0]]
