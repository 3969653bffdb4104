"""Your own images: a folder with a sub-folder for each class.

    rowdit train folder --data.source folder:PATH --model.num-classes 12
    torchrun --standalone --nproc-per-node 4 -m rowdit train folder --data.source folder:PATH --model.num-classes 12

model     as B but with 64 x 64 RGB pixels in patches of 4: 256 tokens, 12 blocks of width 768, 130 M parameters
machine   one GPU; smaller with --model.hidden-size 384 --model.num-heads 6
gave      not run: what it gives depends on the images

Larger images go through an encoder first: `rowdit encode`, then `--data.source latents:OUT`, with `model.image_size`
and `model.in_channels` of the latents. The number of classes is asked for, and a wrong one is refused with the right
one. Turn `--data.flip` on where a mirrored image is as good as the image.
"""

from __future__ import annotations

from rowdit.models.dit import DiTConfig
from rowdit.train.config import DataConfig, EvaluateConfig, OptimizerConfig, RunConfig, TrainConfig


def recipe() -> RunConfig:
    """See the module."""
    return RunConfig(
        model=DiTConfig(
            image_size=64, in_channels=3, patch_size=4, hidden_size=768, depth=12, num_heads=12, num_classes=10
        ),
        data=DataConfig(source="folder:images", num_workers=4),
        optimizer=OptimizerConfig(name="periodic", lr=2e-3, adamw_lr=5e-4, period=3, row_scale=0.25),
        train=TrainConfig(
            batch_size=256,
            steps=100_000,
            ema_decay=0.9999,
            schedule="trapezoid",
            warmup_steps=1000,
            time_sampling="logit_normal",
            checkpoint_every=1000,
            async_checkpoints=True,
        ),
        evaluate=EvaluateConfig(num_evaluations=20, num_samples=2000, num_steps=25, guidance=1.0, at_start=True),
    )
