"""Latents as the images that an autoencoder makes of them: what samples of a model of latents are compared with.

The autoencoder's own loss is in both then, so such a distance says how well the model has learned the latents. What it
is from the real images `rowdit eval --reference` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rowdit.data.batch import model_input
from rowdit.evaluate.fingerprint import digest
from rowdit.evaluate.generate import Decoder, describe_decoder

if TYPE_CHECKING:
    from rowdit.data.batch import Dataset


class DecodedDataset:
    """A dataset of latents, decoded where it is fetched from; a `rowdit.data.Dataset` of uint8 images.

    Args:
        latents: whose images are float32 (c, h, w), scaled as models train on them.
        decoder: that fits them.
        batch_size: latents decoded at once.
    """

    def __init__(self, latents: Dataset, decoder: Decoder, batch_size: int = 64) -> None:
        self._latents, self._decoder, self._batch_size = latents, decoder, batch_size
        self.num_classes, self.class_names = latents.num_classes, latents.class_names
        first, _ = self.fetch(np.arange(1))
        channels, height, width = first.shape[1:]
        self.image_shape = (int(channels), int(height), int(width))
        self.fingerprint = f"{latents.fingerprint}, decoded by {digest(describe_decoder(decoder))[:16]}"

    def __len__(self) -> int:
        return len(self._latents)

    @torch.no_grad()
    def fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Images (B, C, H, W) uint8 and labels (B,) int64 of `indices`, (B,) integers in 0 .. len - 1."""
        latents, labels = self._latents.fetch(indices)
        pieces = model_input(np.asarray(latents)).split(self._batch_size)
        return torch.cat([self._decoder.decode(piece) for piece in pieces]).numpy(), labels
