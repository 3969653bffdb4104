"""A DiT of the shape S on all 60,000 images of Fashion-MNIST: hours on one small GPU; on a CPU, days.

    rowdit data get fashion-mnist
    rowdit train fashion_s
    torchrun --standalone --nproc-per-node 2 -m rowdit train fashion_s --parallel.param-dtype bfloat16

model     S with patches of 4 pixels: 49 tokens, 12 blocks of width 384, 32.5 M parameters
machine   one GPU
gave      not run to its end; a test takes its first steps on the bundled images

Learning rates and `row_scale` are those that `quickstart` was tuned to, lowered with the width; nobody has tuned them
at this size.
"""

from __future__ import annotations

from rowdit.models.dit import DiTConfig
from rowdit.train.config import DataConfig, EvaluateConfig, OptimizerConfig, RunConfig, TrainConfig


def recipe() -> RunConfig:
    """See the module."""
    return RunConfig(
        model=DiTConfig(
            image_size=28, in_channels=1, patch_size=4, hidden_size=384, depth=12, num_heads=6, num_classes=10
        ),
        data=DataConfig(source="fashion-mnist"),
        optimizer=OptimizerConfig(name="periodic", lr=4e-3, adamw_lr=1e-3, period=3, row_scale=0.25),
        train=TrainConfig(
            batch_size=256,
            steps=40_000,
            ema_decay=0.9995,
            schedule="trapezoid",
            warmup_steps=500,
            checkpoint_every=1000,
            async_checkpoints=True,
        ),
        evaluate=EvaluateConfig(num_evaluations=20, num_samples=2000, num_steps=20, at_start=True),
    )
