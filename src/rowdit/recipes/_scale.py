"""What the recipes `scale_1p3b` to `scale_15b` share: Periodic Row-wise Muon at 1.3 to 15 billion parameters.

The paper (arXiv:2608.20818) trained models of these sizes for 60,000 steps on 256 H100 with K = 3. Its depths, widths,
batch, data and learning rates aren't public, so the shapes and every other setting here are this project's choice.
"""

from __future__ import annotations

from rowdit.models import preset
from rowdit.models.parallel import ParallelConfig
from rowdit.train.config import DataConfig, EvaluateConfig, OptimizerConfig, RunConfig, TrainConfig


def scale_run(size: str) -> RunConfig:
    """The run of one size: on 256 ranks 16 images a rank; bf16 from fp32 master weights.

    Args:
        size: "1.3B", "2B", "4B", "9B" or "15B".
    """
    return RunConfig(
        model=preset(size),
        data=DataConfig(source="latents:data/imagenet256"),
        optimizer=OptimizerConfig(name="periodic", lr=3e-4, adamw_lr=1e-4, weight_decay=0.01, period=3, row_scale=0.25),
        train=TrainConfig(
            batch_size=4096,
            steps=60_000,
            ema_decay=0.9999,
            time_sampling="logit_normal",
            warmup_steps=2000,
            grad_clip=1.0,
            checkpoint_every=1000,
        ),
        evaluate=EvaluateConfig(num_evaluations=30, num_samples=10_000, num_steps=25, at_start=True),
        parallel=ParallelConfig(param_dtype="bfloat16", activation_checkpointing=size in ("9B", "15B"), compile=True),
    )
