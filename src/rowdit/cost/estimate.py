"""Everything about a run that follows from its config and the number of ranks, with no GPU and no weights in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rowdit.cost.activations import activations
from rowdit.cost.fake import fake_mode, fake_model
from rowdit.cost.memory import Memory, memory_of
from rowdit.cost.mesh import RankMesh
from rowdit.cost.optimizer import OptimizerCost, Refresh, optimizer_cost
from rowdit.models import forward_flops
from rowdit.models.parallel import DTYPES
from rowdit.train.config import RunConfig


@dataclass(frozen=True)
class Batch:
    """How the images of one optimizer step are divided.

    Args:
        num_images: over all ranks.
        images_per_rank: each rank's share, rounded up.
        micro_batch_size: images of one forward pass on a rank.
        num_micro_batches: forward passes of a rank in one step.
        num_tokens: of an image.
    """

    num_images: int
    images_per_rank: int
    micro_batch_size: int
    num_micro_batches: int
    num_tokens: int

    @staticmethod
    def of(config: RunConfig, mesh: RankMesh) -> Batch:
        num_images, world_size = config.train.batch_size, mesh.world_size
        per_rank = -(-num_images // world_size)
        micro = min(config.train.micro_batch_size or per_rank, per_rank)
        return Batch(num_images, per_rank, micro, -(-per_rank // micro), config.model.num_tokens)

    def problem(self, world_size: int) -> str:
        """Why these ranks couldn't train on this batch, and what to change; empty if they can."""
        if self.num_images % world_size == 0:
            return ""
        near = max(1, round(self.num_images / world_size)) * world_size
        return (
            f"train.batch_size = {self.num_images} can't be shared evenly by {world_size} ranks, so they won't train: "
            f"give --train.batch-size {near}, or another multiple of {world_size}. All else here holds for "
            f"{self.images_per_rank} on each rank"
        )


@dataclass(frozen=True)
class Estimate:
    """What :func:`estimate` gives."""

    config: RunConfig
    mesh: RankMesh
    refresh: str
    batch: Batch
    optimizer: OptimizerCost
    memory: Memory

    @property
    def num_parameters(self) -> int:
        return sum(p.numel for p in self.optimizer.parameters)

    @property
    def model_flops_per_rank(self) -> int:
        """Forward and backward of a rank's share of the batch: three forward passes' worth of matrix products."""
        return 3 * forward_flops(self.config.model) * self.batch.images_per_rank

    def to_dict(self) -> dict[str, Any]:
        """Plain data for machines; the keys are described in docs/plan.md."""
        cost = self.optimizer
        bytes_mean, bytes_max = cost.mean("bytes_sent")
        flops_mean, flops_max = cost.mean("flops")
        kinds = {
            kind: {
                "bytes_sent": step.bytes_sent.mean,
                "bytes_sent_max": step.bytes_sent.max,
                "flops": step.flops.mean,
                "flops_max": step.flops.max,
                "num_collectives": step.num_collectives,
                "num_orthogonalizations_max": step.num_orthogonalizations,
                "peak_bytes": step.peak_bytes,
            }
            for kind, step in (("refresh", cost.refresh), ("row", cost.row))
        }
        return {
            "world_size": self.mesh.world_size,
            "num_replicas": self.mesh.num_replicas,
            "num_shards": self.mesh.num_shards,
            "optimizer": self.config.optimizer.name,
            "refresh_mode": self.refresh,
            "refresh_share": cost.refresh_share,
            "num_parameters": self.num_parameters,
            "num_parameters_muon": sum(p.numel for p in cost.parameters if p.algorithm == "muon"),
            "optimizer_bytes_per_step": bytes_mean,
            "optimizer_bytes_per_step_max": bytes_max,
            "optimizer_flops_per_step": flops_mean,
            "optimizer_flops_per_step_max": flops_max,
            "optimizer_steps": kinds,
            "model_flops_per_step": self.model_flops_per_rank,
            "memory_bytes_per_rank": self.memory.parts(),
            "peak_memory_bytes_per_rank": self.memory.peak,
            "batch": {
                "num_images": self.batch.num_images,
                "images_per_rank": self.batch.images_per_rank,
                "micro_batch_size": self.batch.micro_batch_size,
                "num_micro_batches": self.batch.num_micro_batches,
                "tokens_per_image": self.batch.num_tokens,
            },
        }


def estimate(
    config: RunConfig,
    mesh: RankMesh,
    *,
    refresh: Refresh | None = None,
    device: str = "cuda",
) -> Estimate:
    """Prices a run. Takes a second or so, for any model and any number of ranks.

    Args:
        config: the run.
        mesh: the ranks, and how they hold the model.
        refresh: how the optimizer would gather its matrices; None is the config's own choice.
        device: "cuda" or "cpu"; decides what a product of symmetric matrices costs, and temporaries.

    Example:
        >>> from rowdit.models import preset
        >>> from rowdit.train.config import OptimizerConfig, TrainConfig
        >>> run = RunConfig(preset("1.3B"), optimizer=OptimizerConfig("periodic"), train=TrainConfig(batch_size=1024))
        >>> found = estimate(run, RankMesh(256))
        >>> found.num_parameters
        1283776528
    """
    batch = Batch.of(config, mesh)
    with fake_mode():
        model = fake_model(config.model)
        cost = optimizer_cost(model, config.optimizer, mesh, refresh, device)
        buffers = sum(buffer.numel() * buffer.dtype.itemsize for buffer in model.buffers())
    parallel = config.parallel
    passes = activations(
        config.model,
        batch.micro_batch_size,
        dtype=DTYPES[parallel.param_dtype],
        checkpointing=parallel.activation_checkpointing,
    )
    memory = memory_of(
        cost.parameters,
        mesh,
        parallel,
        passes,
        num_micro_batches=batch.num_micro_batches,
        num_averages=1 + len(config.train.ema_decays) + len(config.train.ema_stds),
        buffers=buffers,
        refresh=max(cost.refresh.peak_bytes, cost.row.peak_bytes),
    )
    mode = cost.refresh_plan.options.refresh if cost.refresh_plan else "none"
    return Estimate(config, mesh, mode, batch, cost, memory)
