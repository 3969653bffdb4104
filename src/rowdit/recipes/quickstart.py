"""The first comparison: a small Diffusion Transformer on real images, three optimizers, minutes on a laptop.

command   rowdit compare quickstart
model     0.5 M parameters, 49 tokens; Fashion-MNIST, 12,000 images of 28 x 28 in ten classes, from the package
run       batch 64; four evaluations of 1,000 + 1,000 samples by 10 Euler steps, no guidance
"""

from __future__ import annotations

from rowdit.models.dit import DiTConfig
from rowdit.study.comparison import Comparison
from rowdit.train.config import DataConfig, EvaluateConfig, OptimizerConfig, TrainConfig


def recipe() -> Comparison:
    """See the module."""
    return Comparison(
        model=DiTConfig(
            image_size=28, in_channels=1, patch_size=4, hidden_size=96, depth=3, num_heads=3, num_classes=10
        ),
        data=DataConfig(source="bundled"),
        train=TrainConfig(batch_size=64, steps=1000, ema_decay=0.99, warmup_steps=20, grad_clip=1.0),
        evaluate=EvaluateConfig(num_evaluations=4, num_samples=1000, num_steps=10),
        optimizers={
            "adamw": OptimizerConfig(name="adamw", lr=1e-3),
            "muon": OptimizerConfig(name="muon", lr=3e-3, adamw_lr=1e-3),
            "periodic": OptimizerConfig(name="periodic", lr=3e-3, adamw_lr=1e-3, period=3, row_scale=0.5),
        },
    )
