"""Image features for the Frechet and kernel distances."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rowdit.evaluate import efficientnet


class FeatureNetwork(Protocol):
    """A function from images to feature vectors, with what is needed to tell one from another."""

    name: str
    sha256: str
    dim: int

    def __call__(self, images: Tensor) -> Tensor:
        """(N, C, H, W) uint8 to (N, dim) float32."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Plain data that names the network, its weights and its preprocessing."""
        ...


class EfficientNetLite0Features:
    """The 320 pooled features before the head of EfficientNet-Lite0, trained on ImageNet.

    An image is resized to 64 x 64 in float32 (bilinear, half-pixel centres; antialiased along a side that shrinks; the
    result isn't rounded to integers), grey is repeated to RGB, and (x - 127) / 128 is applied to the range 0..255.
    All of it is done in full float32, whatever autocast or the TF32 switches say, so a score doesn't depend on them.

    Args:
        device: where the network runs.
        batch_size: images per forward pass; bounds the memory, changes the features by float noise only.
        weights: the weights file; by default the one of the installed package.

    Raises:
        ModuleNotFoundError: the weights package isn't installed; the message gives the command.
        ValueError: the file's hash isn't the expected one.
    """

    name = "effnet_lite0"
    sha256 = efficientnet.WEIGHTS_SHA256
    dim = efficientnet.FEATURE_CHANNELS
    input_size = 64

    def __init__(
        self, device: str | torch.device = "cpu", *, batch_size: int = 64, weights: Path | None = None
    ) -> None:
        self.device = torch.device(device)
        self.batch_size = batch_size
        network = efficientnet.load_efficientnet_lite0(weights)
        self._network = network.to(self.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return (N, 320) float32 on the network's device.

        Args:
            images: (N, C, H, W) uint8 with C = 1 or 3, on any device; any size.

        Raises:
            TypeError: the images aren't uint8. Samples in [-1, 1] become uint8 by `rowdit.data.batch.to_uint8` alone.
            ValueError: the shape isn't (N, 1 or 3, H, W), or there are no pixels.
        """
        check_images(images)
        features = images.new_empty((len(images), self.dim), dtype=torch.float32, device=self.device)
        with full_float32(self.device):
            for start in range(0, len(images), self.batch_size):
                batch = images[start : start + self.batch_size].to(self.device)
                features[start : start + len(batch)] = self._network.features(self._prepare(batch))
        return features

    def fingerprint(self) -> dict[str, Any]:
        """Plain data that names the network, its weights and its preprocessing."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "layer": "pooled before head",
            "dim": self.dim,
            "input_size": self.input_size,
            "resize": "bilinear, antialias, float32",
            "scale": "(x - 127) / 128",
        }

    def _prepare(self, images_BCHW: Tensor) -> Tensor:
        x = images_BCHW.float()
        if x.shape[-2:] != (self.input_size, self.input_size):
            size = (self.input_size, self.input_size)
            # With antialias, a side that grows is interpolated plainly: the filter never gets narrower than a pixel.
            x = F.interpolate(x, size=size, mode="bilinear", align_corners=False, antialias=True)
        x = (x - 127.0) / 128.0
        return x.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """No autocast, and no TF32 or bfloat16 inside convolutions (cuDNN's TF32 is on by default)."""
    convolutions: Any = None
    if device.type in ("cuda", "cpu"):
        backend: Any = torch.backends.cudnn if device.type == "cuda" else torch.backends.mkldnn
        convolutions = backend.conv
        before = convolutions.fp32_precision
        convolutions.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if convolutions is not None:
            convolutions.fp32_precision = before


def check_images(images: Tensor) -> None:
    if images.dtype != torch.uint8:
        raise TypeError(
            f"images must be uint8 in 0..255, got {images.dtype}; "
            "convert samples in [-1, 1] with rowdit.data.batch.to_uint8"
        )
    if images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape[2:]:
        raise ValueError(f"images must have shape (N, 1 or 3, H, W), got {tuple(images.shape)}")
