"""Everything about a run that follows from its config and the number of ranks, with no GPU and no weights in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rowdit.cost.activations import activation_bytes
from rowdit.cost.fake import fake_mode, fake_model
from rowdit.cost.memory import Memory, sharded_bytes, unsharded_bytes
from rowdit.cost.mesh import RankMesh
from rowdit.cost.optimizer import OptimizerCost, Refresh, optimizer_cost
from rowdit.models import forward_flops
from rowdit.train.config import ConfigError, RunConfig


@dataclass(frozen=True)
class Batch:
    """How the images of one optimizer step are divided.

    Args:
        num_images: over all ranks.
        images_per_rank: of the rank with most.
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
        """
        Raises:
            ConfigError: fewer images than ranks.
        """
        num_images, world_size = config.train.batch_size, mesh.world_size
        if num_images < world_size:
            raise ConfigError(
                f"train.batch_size = {num_images}: {world_size} ranks need at least one image each; give "
                f"--train.batch-size {world_size} or more, or fewer ranks"
            )
        per_rank = -(-num_images // world_size)
        micro = min(config.train.micro_batch_size or per_rank, per_rank)
        return Batch(num_images, per_rank, micro, -(-per_rank // micro), config.model.num_tokens)


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

    Raises:
        ConfigError: a batch that the ranks can't divide.

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
    dtype = torch.float32
    memory = Memory(
        **sharded_bytes(cost.parameters, mesh),
        buffers=buffers,
        activations=activation_bytes(config.model, batch.micro_batch_size, dtype=dtype),
        unsharded=unsharded_bytes(cost.parameters, mesh, dtype),
        refresh=max(cost.refresh.peak_bytes, cost.row.peak_bytes),
    )
    mode = cost.refresh_plan.options.refresh if cost.refresh_plan else "none"
    return Estimate(config, mesh, mode, batch, cost, memory)
