"""The model and its optimizer without memory: fake tensors have shapes and no data, and torch computes with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rowdit.models import DiT, DiTConfig


@contextmanager
def fake_mode() -> Iterator[None]:
    """Tensors made inside have no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to load

    with FakeTensorMode():
        yield


def fake_model(config: DiTConfig, block_dtype: torch.dtype = torch.float32) -> DiT:
    """The model with fake tensors for parameters and buffers. Call it under :func:`fake_mode`.

    Args:
        config: its shape.
        block_dtype: of the blocks' parameters; all others are float32.
    """
    with torch.device("meta"):
        model = DiT(config)
    for path, module in model.named_modules():
        dtype = block_dtype if path.startswith("blocks.") else torch.float32
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(value.shape, dtype=dtype), value.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape))
    return model
