"""Memory of one rank, by part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch

from rowdit.cost.mesh import RankMesh
from rowdit.cost.optimizer import Routed


@dataclass(frozen=True)
class Memory:
    """Bytes on rank 0, which holds as much as any other.

    weights: this rank's part, in the dtype that the optimizer steps.
    gradients: this rank's part, after the reduce-scatter.
    optimizer: its state.
    ema: averaged weights.
    buffers: what every rank holds whole (fixed positions).
    activations: the largest amount in forward and backward of one micro-batch, saved and temporary.
    unsharded: what FSDP gathers and reduces at a time: two blocks of weights, one block of gradients, the ends.
    refresh: what a refresh of the optimizer takes beside its state.
    """

    weights: int
    gradients: int
    optimizer: int
    ema: int
    buffers: int
    activations: int
    unsharded: int
    refresh: int

    @property
    def resident(self) -> int:
        """There at all times."""
        return self.weights + self.gradients + self.optimizer + self.ema + self.buffers

    @property
    def peak(self) -> int:
        """Most at a time: forward and backward don't overlap with the optimizer's step."""
        return self.resident + max(self.activations + self.unsharded, self.refresh)

    def parts(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def sharded_bytes(parameters: Iterable[Routed], mesh: RankMesh) -> dict[str, int]:
    """Weights, gradients, optimizer state and one average of the weights, in float32 but for the state."""
    known = list(parameters)
    weights = sum(4 * mesh.numel(p.shape) for p in known)
    trained = [p for p in known if p.algorithm != "frozen"]
    gradients = sum(4 * mesh.numel(p.shape) for p in trained)
    optimizer = sum(p.state_bytes * mesh.numel(p.shape) for p in trained)
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "ema": gradients}


def unsharded_bytes(
    parameters: Sequence[Routed], mesh: RankMesh, dtype: torch.dtype, reduce_dtype: torch.dtype = torch.float32
) -> int:
    """What FSDP2 has gathered and has yet to reduce, at most, with each block a unit of its own and the rest the root.

    In the backward pass of a block: its weights and the next one's (prefetched), the root's; the block's gradients in
    the dtype of computing, and the flat buffer from which they are reduced, with what comes out of it.
    """
    if mesh.num_shards == 1:
        return 0
    blocks: dict[str, int] = {}
    root = 0
    for p in parameters:
        if p.name.startswith("blocks."):
            index = p.name.split(".")[1]
            blocks[index] = blocks.get(index, 0) + mesh.num_shards * mesh.numel(p.shape)
        else:
            root += mesh.num_shards * mesh.numel(p.shape)
    block = max(blocks.values(), default=0)
    gathered = (2 * block + root) * dtype.itemsize
    reducing = block * (dtype.itemsize + reduce_dtype.itemsize) + block * reduce_dtype.itemsize // mesh.num_shards
    return gathered + reducing
