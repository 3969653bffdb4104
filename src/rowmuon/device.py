"""What a tensor's arithmetic should be cut for."""

from __future__ import annotations

import sys

from torch import Tensor

__all__ = ["compute_device"]


def compute_device(tensor: Tensor) -> str:
    """The device type that the arithmetic should be cut for: "cpu" means for a CPU's caches.

    A fake tensor has no data and is no CPU's, whatever it says: it is "fake", and treated like an accelerator's,
    so that a dry run of a cluster counts what the cluster would do.
    """
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # not loaded: then there are none, and it is slow to load
    return "fake" if fake is not None and isinstance(tensor, fake.FakeTensor) else tensor.device.type
