"""Memory of a forward and a backward pass, beside weights and gradients: the model itself runs on fake tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from rowdit.cost.fake import fake_mode, fake_model
from rowdit.cost.live_bytes import LiveBytes
from rowdit.flow import flow_loss
from rowdit.models import DiTConfig
from rowdit.models.parallel import checkpoint_blocks_

_DEPTHS = (2, 4)  # every further block takes as much as the one before, so two depths tell all


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank.

    peak: most that are alive at a time, saved tensors and temporaries; that is when the backward pass begins.
    per_block: what each block has saved by then.
    depth: number of blocks.
    """

    peak: int
    per_block: int
    depth: int


@lru_cache(maxsize=64)  # a sweep asks for the same ones again and again
def activations(
    config: DiTConfig, num_images: int, *, dtype: torch.dtype = torch.float32, checkpointing: bool = False
) -> Activations:
    """Of one forward and backward pass. Weights aren't counted, nor is a gradient beyond the moment when it is made.

    Args:
        config: the model.
        num_images: of the micro-batch on one rank.
        dtype: that the blocks compute in; the rest computes in float32.
        checkpointing: each block keeps its input alone and computes the rest again in the backward pass.
    """
    few, more = (_peak(dataclasses.replace(config, depth=depth), num_images, dtype, checkpointing) for depth in _DEPTHS)
    per_block = (more - few) // (_DEPTHS[1] - _DEPTHS[0])
    if config.depth < _DEPTHS[0]:
        return Activations(_peak(config, num_images, dtype, checkpointing), per_block, config.depth)
    return Activations(few + per_block * (config.depth - _DEPTHS[0]), per_block, config.depth)


def _peak(config: DiTConfig, num_images: int, dtype: torch.dtype, checkpointing: bool) -> int:
    with fake_mode():
        model = fake_model(config, dtype)
        if checkpointing:
            checkpoint_blocks_(model)
        if dtype != torch.float32:
            for block in model.blocks:
                block.register_forward_pre_hook(_cast_inputs)  # as FSDP2 does with its cast_forward_inputs
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        shape = (num_images, config.in_channels, config.image_size, config.image_size)
        y = torch.empty(num_images, dtype=torch.int64)
        if config.caption_dim is not None:
            y = torch.empty(num_images, config.caption_dim)
        with LiveBytes() as live:
            x, noise, t = torch.empty(shape), torch.empty(shape), torch.empty(num_images)
            flow_loss(model, x, y, noise, t).mean().backward()
    return live.peak


def _cast_inputs(block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(block.parameters()).dtype
    return tuple(value.to(dtype) if isinstance(value, Tensor) else value for value in inputs)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
