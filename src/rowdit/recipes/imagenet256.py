"""Class-conditional DiT on the latents of ImageNet at 256 x 256 pixels: `imagenet256` is B/2; or `imagenet256:XL/2`.

    torchrun --standalone --nproc-per-node 8 -m rowdit encode folder:IMAGENET --out OUT --image-size 256 \\
        --encoder diffusers:stabilityai/sd-vae-ft-ema --num-workers 8            # once; docs/data.md
    torchrun --standalone --nproc-per-node 8 -m rowdit train imagenet256:XL/2 --data.source latents:OUT
    rowdit plan imagenet256:XL/2 --world-size 8                      # what it takes, before

machine   8 GPUs of 80 GB for XL/2; one for B/2
gave      not run

The settings are a starting point, not a result: batch 1024, learning rate 2e-4, beta2 0.95 and logit-normal times are
what recent AdamW runs of this model use, with Muon's learning rates in the convention that has AdamW's scale.
"""

from __future__ import annotations

from rowdit.models import preset
from rowdit.models.parallel import ParallelConfig
from rowdit.train.config import (
    ConfigError,
    DataConfig,
    EvaluateConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    nearest,
)

SIZES = tuple(f"{size}/{patch}" for size in ("S", "B", "L", "XL") for patch in (2, 4, 8))


def recipe(size: str = "B/2") -> RunConfig:
    """See the module.

    Args:
        size: S, B, L or XL, a slash, and the patch size 2, 4 or 8.

    Raises:
        ConfigError: another size.
    """
    if size not in SIZES:
        raise ConfigError(f"imagenet256 has no size {size!r}{nearest(size, SIZES)}")
    return RunConfig(
        model=preset(size, learn_sigma=False),  # the flow has no use for a variance
        data=DataConfig(source="latents:data/imagenet256"),
        optimizer=OptimizerConfig(name="periodic", lr=3e-4, adamw_lr=2e-4, weight_decay=0.01, period=3, row_scale=0.25),
        train=TrainConfig(
            batch_size=1024,
            micro_batch_size=32,
            steps=400_000,
            ema_decay=0.9999,
            time_sampling="logit_normal",
            warmup_steps=2000,
            grad_clip=1.0,
            checkpoint_every=5000,
        ),
        evaluate=EvaluateConfig(num_evaluations=40, num_samples=10_000, num_steps=25, at_start=True),
        parallel=ParallelConfig(param_dtype="bfloat16", compile=True),
    )
