"""Learning-rate schedules: one factor a step, multiplied into each group's own base learning rate.

A schedule here is a pure function of the step, so resuming needs no scheduler state, and two parameter groups with
different base rates keep their ratio through warm-up and decay.
"""

from __future__ import annotations

import math

import torch

from rowdit.train.config import TrainConfig


def lr_factor(step: int, config: TrainConfig) -> float:
    """The factor for the step with this index (from 0), in [0, 1].

    Warm-up is linear, and its first step isn't zero: (step + 1) / warmup_steps. Then

        constant:   1
        cosine:     f + (1 - f) (1 + cos(pi p)) / 2     p: done share of the steps after warm-up, f: final factor
        trapezoid:  1, then linear to f over the last `decay_fraction` of all steps
        inverse_sqrt:  1, from `reference_steps` on (reference_steps / step)^(1/2)

    >>> [round(lr_factor(s, TrainConfig(steps=4, schedule="cosine")), 3) for s in range(5)]
    [1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    final = config.final_lr_factor
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    if config.schedule == "inverse_sqrt":
        return math.sqrt(config.reference_steps / max(step, config.reference_steps))
    decay_steps = max(1, round(config.decay_fraction * config.steps))
    return final + (1 - final) * min(1.0, max(0.0, (config.steps - step) / decay_steps))


def apply_lr_factor_(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets every group's `lr` to its `initial_lr` times `factor`; the first call takes `lr` as `initial_lr`."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", float(group["lr"]))
        group["lr"] = group["initial_lr"] * factor
