"""What is measured while a run on latents trains: its samples and held-out latents, both decoded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rowdit.commands.monitor import Monitor
from rowdit.data.batch import Dataset
from rowdit.encode.encoders import IdentityEncoder
from rowdit.evaluate.decoded import DecodedDataset
from rowdit.train.state import build_state
from rowdit.train.world import World
from toy_training import toy_config, toy_dataset


class Latents:
    """The toy images as their own latents, scaled by two."""

    def __init__(self, num_images: int) -> None:
        self._images = toy_dataset(num_images, seed=1)
        self.num_classes, self.class_names = self._images.num_classes, self._images.class_names
        self.image_shape, self.fingerprint = self._images.image_shape, "toy-latents"

    def __len__(self) -> int:
        return len(self._images)

    def fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images, labels = self._images.fetch(indices)
        return (2 * (images.astype(np.float32) / 127.5 - 1)).astype(np.float32), labels


class Halving:
    """Decodes `Latents`; remembers the sizes of its batches."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(latents))
        return IdentityEncoder(1).decode(latents / 2)

    def describe(self) -> dict[str, Any]:
        return {"name": "halving", "spec": "/somewhere"}


def test_decoded_latents_are_the_images_whatever_the_batches() -> None:
    latents, images, decoder = Latents(10), toy_dataset(10, seed=1), Halving()
    decoded = DecodedDataset(latents, decoder, batch_size=3)
    assert isinstance(decoded, Dataset) and len(decoded) == 10 and decoded.image_shape == (1, 8, 8)
    indices = np.array([9, 0, 4, 4, 7, 1, 2])
    for found, expected in zip(decoded.fetch(indices), images.fetch(indices), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert decoder.batches[1:] == [3, 3, 1]


def test_the_fingerprint_names_latents_and_decoder_and_not_where_it_lies() -> None:
    decoder, elsewhere, other = Halving(), Halving(), Halving()
    elsewhere.describe = lambda: {"name": "halving", "spec": "/elsewhere"}  # type: ignore[method-assign]
    other.describe = lambda: {"name": "other", "spec": "/somewhere"}  # type: ignore[method-assign]
    prints = [DecodedDataset(Latents(2), d).fingerprint for d in (decoder, elsewhere, other)]
    assert prints[0].startswith("toy-latents, decoded by ") and prints[0] == prints[1] != prints[2]


def measure(folder: Path, held_out: Dataset, source: str, decoder: Any, num_val_images: int = 16) -> dict[str, Any]:
    config = toy_config("adamw")
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, source=source),
        evaluate=dataclasses.replace(config.evaluate, num_val_images=num_val_images),
    )
    state = build_state(config)
    return Monitor(config, held_out, folder, World(), decoder=decoder)(state.model.eval(), 3)


def test_latents_that_are_pixels_score_as_the_pixels_do(tmp_path: Path) -> None:
    """Identity latents of the held-out images and their decoder: the same samples against the same images."""
    pixels = measure(tmp_path / "pixels", toy_dataset(16, seed=1), "bundled", None)
    latents = measure(tmp_path / "latents", toy_dataset(16, seed=1), "latents:absent", IdentityEncoder(1))
    assert latents["score_report"] == pixels["score_report"] > 0 and latents["kid"] == pixels["kid"]
    reference = latents["fingerprint"]["reference"]["dataset"]
    assert reference.startswith(pixels["fingerprint"]["reference"]["dataset"] + ", decoded by ")
    assert (tmp_path / "latents" / latents["grid"]).is_file()


def test_no_more_latents_are_decoded_than_are_measured(tmp_path: Path) -> None:
    measured = measure(tmp_path, Latents(40), "latents:absent", Halving(), num_val_images=8)
    assert measured["fingerprint"]["reference"]["num_images"] == 12  # evaluate.num_samples
    measured = measure(tmp_path, Latents(40), "latents:absent", Halving(), num_val_images=30)
    assert measured["fingerprint"]["reference"]["num_images"] == 30


def test_a_model_whose_samples_are_not_finite_has_no_score(tmp_path: Path) -> None:
    config = dataclasses.replace(toy_config("adamw"), data=dataclasses.replace(toy_config().data, source="latents:x"))
    state = build_state(config)
    with torch.no_grad():
        for p in state.model.parameters():
            p.fill_(float("nan"))
    measured = Monitor(config, Latents(16), tmp_path, World(), decoder=Halving())(state.model.eval(), 3)
    assert np.isnan(measured["score_report"]) and np.isnan(measured["kid"]) and "grid" not in measured
