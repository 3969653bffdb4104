"""Memory of one rank, by part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from rowdit.cost.activations import Activations
from rowdit.cost.mesh import RankMesh
from rowdit.cost.optimizer import Routed
from rowdit.models.parallel import DTYPES, ParallelConfig


@dataclass(frozen=True)
class Memory:
    """Bytes on rank 0, which holds as much as any other.

    weights: this rank's part, in the dtype that the optimizer steps.
    gradients: this rank's part, after the reduce-scatter.
    optimizer: its state.
    ema: averaged weights.
    buffers: what every rank holds whole (fixed positions).
    activations: the largest amount in forward and backward of one micro-batch, saved and temporary.
    unsharded: what FSDP has gathered and not yet reduced at that time.
    refresh: what a refresh of the optimizer takes beside its state.
    peak: the most at a time; not the sum, for they aren't all alive at once.
    """

    weights: int
    gradients: int
    optimizer: int
    ema: int
    buffers: int
    activations: int
    unsharded: int
    refresh: int
    peak: int

    def parts(self) -> dict[str, int]:
        """All but the peak."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "peak"}


def memory_of(
    parameters: Sequence[Routed],
    mesh: RankMesh,
    parallel: ParallelConfig,
    passes: Activations,
    *,
    num_micro_batches: int,
    num_averages: int,
    buffers: int,
    refresh: int,
) -> Memory:
    """Puts the parts together.

    A step has three peaks. When its backward pass begins, most activations are alive and, in the first micro-batch, no
    gradient is; when it ends it is the other way round; and in the optimizer's step there are gradients and its own
    buffers.
    """
    sharded = sharded_bytes(parameters, mesh, num_averages)
    unsharded = unsharded_bytes(parameters, mesh, parallel, num_micro_batches, passes.per_block)
    always = sharded["weights"] + sharded["optimizer"] + sharded["ema"] + buffers
    gradients = sharded["gradients"]
    begins = passes.peak + unsharded + (gradients if num_micro_batches > 1 else 0)
    ends = passes.peak - passes.depth * passes.per_block + unsharded + gradients
    peak = always + max(begins, ends, gradients + refresh)
    return Memory(**sharded, buffers=buffers, activations=passes.peak, unsharded=unsharded, refresh=refresh, peak=peak)


def sharded_bytes(parameters: Iterable[Routed], mesh: RankMesh, num_averages: int = 1) -> dict[str, int]:
    """Weights, gradients, optimizer state and averages of the weights, in float32 but for the state."""
    known = list(parameters)
    weights = sum(4 * mesh.numel(p.shape) for p in known)
    trained = [p for p in known if p.algorithm != "frozen"]
    gradients = sum(4 * mesh.numel(p.shape) for p in trained)
    optimizer = sum(p.state_bytes * mesh.numel(p.shape) + p.whole_bytes for p in trained)
    optimizer += sum(p.mean_bytes * mesh.numel(p.mean_shape) for p in trained)
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "ema": num_averages * gradients}


def unsharded_bytes(
    parameters: Sequence[Routed], mesh: RankMesh, parallel: ParallelConfig, num_micro_batches: int, per_block: int
) -> int:
    """What FSDP2 has gathered and has yet to reduce when most is alive: blocks are units, the rest is the root.

    While the backward pass is in a block there are: its weights and those of the next one, prefetched; the root's
    weights and gradients; the block's gradients in the dtype of computing, and the flat buffer from which those of the
    block before it are reduced. In the first block of the pass that buffer isn't there yet; in the second the first
    one's activations are gone.

    Args:
        per_block: bytes of activations that a block has saved.
    """
    if mesh.world_size == 1 and not parallel.needs_sharding:
        return 0
    compute, reduce = DTYPES[parallel.param_dtype].itemsize, DTYPES[parallel.reduce_dtype].itemsize
    blocks: dict[str, int] = {}
    root = 0
    for p in parameters:
        numel = mesh.num_shards * mesh.numel(p.shape)  # padded
        if p.name.startswith("blocks."):
            index = p.name.split(".")[1]
            blocks[index] = blocks.get(index, 0) + numel
        else:
            root += numel
    block = max(blocks.values())
    gathered = min(2, len(blocks)) if parallel.reshard_after_forward else len(blocks)
    weights = gathered * block * compute + root * 4
    gradients = block * compute + root * 4
    if num_micro_batches > 1 and parallel.accumulate_unsharded:
        gradients = sum(blocks.values()) * max(compute, reduce) + root * 4
    elif num_micro_batches > 1 and mesh.num_replicas > 1:
        gradients += (sum(blocks.values()) + root) * reduce // mesh.num_shards
    reducing = block * reduce if len(blocks) > 1 else 0
    return weights + gradients + max(0, reducing - per_block)
