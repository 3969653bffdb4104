"""Memory of a forward and a backward pass, beside weights and gradients: the model itself runs on fake tensors."""

from __future__ import annotations

import dataclasses

import torch
from torch.utils.checkpoint import checkpoint

from rowdit.cost.fake import LiveBytes, fake_mode, fake_model
from rowdit.models import DiT, DiTConfig

_DEPTHS = (2, 4)  # every further block takes as much as the one before, so two depths tell all


def activation_bytes(
    config: DiTConfig, num_images: int, *, dtype: torch.dtype = torch.float32, checkpointing: bool = False
) -> int:
    """Most bytes alive at a time in forward and backward of one micro-batch: saved tensors and temporaries.

    Weights aren't counted, nor is any gradient beyond the moment in which it is made.

    Args:
        config: the model.
        num_images: of the micro-batch on one rank.
        dtype: that the model computes in.
        checkpointing: each block keeps its input alone and computes the rest again in the backward pass.
    """
    if config.depth <= _DEPTHS[1]:
        return _peak(config, num_images, dtype, checkpointing)
    few, more = (_peak(dataclasses.replace(config, depth=depth), num_images, dtype, checkpointing) for depth in _DEPTHS)
    return few + (more - few) * (config.depth - _DEPTHS[0]) // (_DEPTHS[1] - _DEPTHS[0])


def _peak(config: DiTConfig, num_images: int, dtype: torch.dtype, checkpointing: bool) -> int:
    with fake_mode():
        model = fake_model(config, dtype)
        if checkpointing:
            _checkpoint_blocks(model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        shape = (num_images, config.in_channels, config.image_size, config.image_size)
        x, noise, t = torch.empty(shape), torch.empty(shape), torch.empty(num_images)
        y = torch.empty(num_images, dtype=torch.int64)
        with LiveBytes() as live:
            error = model(x.to(dtype), t, y).float() - noise
            error.square().mean().backward()
    return live.peak


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _checkpoint_blocks(model: DiT) -> None:
    for block in model.blocks:
        compute = block.forward
        block.forward = lambda *inputs, compute=compute: checkpoint(compute, *inputs, use_reentrant=False)
