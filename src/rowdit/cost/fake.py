"""The model and its optimizer without memory: fake tensors have shapes and no data, and torch computes with them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

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


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made under the mode and are alive (``now``), and their maximum (``peak``).

    Works on real and on fake tensors. What an operator allocates inside isn't seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage() for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage not in given and storage not in self._seen:
                    self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        size = storage.nbytes()
        self._seen[storage] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size
