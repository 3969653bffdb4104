"""One optimizer over its own copy of the parameters, and the time of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import rowmuon
from rowdit.bench.machine import synchronize
from rowdit.bench.peers import LR, WEIGHT_DECAY
from rowdit.bench.shapes import Matrix, weights_and_grads

__all__ = ["Contender", "Workplace", "periodic", "row_sharded"]


@dataclass(frozen=True)
class Workplace:
    """Where the parameters lie: `mesh` is None for plain tensors, else their rows are sharded over it."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    mesh: DeviceMesh | None = None

    @property
    def num_ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh.size()

    def place(self, tensor: Tensor) -> Tensor:
        """A copy of this tensor, of which every rank has the whole, or of its rows here."""
        tensor = tensor.to(self.device, self.dtype, copy=True)
        return tensor if self.mesh is None else row_sharded(tensor, self.mesh)


def row_sharded(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)


class Contender:
    """An optimizer, its parameters, and the gradients that it gets anew before every step, as from a backward pass.

    Args:
        matrices: of the model; with `split` each chunk is a parameter of its own, for optimizers that know no chunks.
        make: the optimizer of the parameters.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        workplace: Workplace,
        make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        *,
        split: bool = False,
    ) -> None:
        self.workplace = workplace
        self.params: list[torch.nn.Parameter] = []
        self.grads: list[Tensor] = []
        for weight, grad in weights_and_grads(matrices, split=split):
            self.params.append(torch.nn.Parameter(workplace.place(weight)))
            self.grads.append(workplace.place(grad))
        self._buffers = [grad.clone() for grad in self.grads]
        self.optimizer = make(self.params)

    def timed_step(self, kind: str | None = None) -> float:
        """Seconds of one step on this rank, all starting together.

        `kind` is what a rowmuon optimizer must be about to do, so that nothing else is timed.
        """
        for param, buffer, grad in zip(self.params, self._buffers, self.grads, strict=True):
            param.grad = buffer.copy_(grad)  # some peers overwrite their gradients
        if kind is not None and self.optimizer.next_step_kind != kind:  # type: ignore[attr-defined]
            raise RuntimeError(f"about to time a {kind} step, but the next one is {self.optimizer.next_step_kind}")  # type: ignore[attr-defined]
        synchronize(self.workplace.device)
        if self.workplace.mesh is not None:
            dist.barrier()
        start = time.perf_counter()
        self.optimizer.step()
        synchronize(self.workplace.device)
        return time.perf_counter() - start

    def timed_period(self, period: int) -> list[float]:
        """Seconds of a refresh and of the row steps after it."""
        return [self.timed_step("refresh" if i == 0 else "row") for i in range(period)]


def periodic(matrices: Sequence[Matrix], workplace: Workplace, period: int | None, **options: Any) -> Contender:
    """`rowmuon.PeriodicRowMuon` with the settings of the peers, and `options`; a period of None never refreshes."""

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        settings = {"lr": LR, "weight_decay": WEIGHT_DECAY, "adjust_lr_fn": "match_rms_adamw"}
        return rowmuon.PeriodicRowMuon(_groups(matrices, params), period=period, **options, **settings)  # type: ignore[arg-type]

    return Contender(matrices, workplace, make)


def _groups(matrices: Sequence[Matrix], params: Iterable[Tensor]) -> list[dict[str, object]]:
    """A group for each number of chunks."""
    groups: dict[int, list[Tensor]] = {}
    for matrix, param in zip(matrices, params, strict=True):
        groups.setdefault(matrix.chunks, []).append(param)
    return [{"params": params, "chunks": chunks} for chunks, params in groups.items()]
