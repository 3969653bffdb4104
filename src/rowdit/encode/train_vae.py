"""Training the small autoencoder of :mod:`rowdit.models.vae`.

Adam at a rate that falls to zero along a cosine. Batches, noise and initial weights are functions of the seed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from rowdit import streams
from rowdit.data.batch import DataError, Dataset, DrawnDataset, check_image_size, to_float
from rowdit.data.index import batch_at
from rowdit.encode.encoders import VAE_FORMAT
from rowdit.models.vae import ConvVAE, VAEConfig

_NUM_MEASURED = 1024  # images that the scale and the error are measured on

OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class VAETraining:
    """How it is trained.

    Args:
        steps: >= 1.
        batch_size: >= 1.
        lr: at the start. > 0.
        seed: of the order, the noise and the initial weights.
    """

    steps: int = 800
    batch_size: int = 64
    lr: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise ValueError(f"steps {self.steps} and batch_size {self.batch_size} must be >= 1")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr {self.lr} must be a finite number > 0")


def train_vae(
    dataset: Dataset,
    folder: Path,
    config: VAEConfig,
    training: VAETraining | None = None,
    *,
    device: str | torch.device = "cpu",
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Train an autoencoder on images and save it as ``vae.json`` and ``vae.safetensors``.

    Args:
        dataset: pixels, with ``config.in_channels`` channels.
        folder: where it goes; made where it is missing. What was there under these names is replaced.
        config: of the autoencoder.
        training: how.
        device: where it computes.
        on_step: called with (step, loss) after each step.

    Returns:
        What ``vae.json`` says: config, training, source, ``shift`` and ``scale`` (mean and 1 / standard deviation of
        the latents), ``psnr`` of decoded means in dB, peak to peak 2.

    Raises:
        DataError: images that don't fit ``config``, or a training that diverged.
    """
    training = training or VAETraining()
    _check(dataset, config)
    vae = ConvVAE(config, training.seed).to(device)
    optimizer = torch.optim.Adam(vae.parameters(), lr=training.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    latent_shape = vae.latent_shape(dataset.image_shape[1])
    for step in range(training.steps):
        batch = batch_at(
            dataset,
            seed=training.seed,
            images_seen=step * training.batch_size,
            batch_size=training.batch_size,
            flip=True,
        )
        noise = streams.normal(training.seed, "vae_noise", batch.positions, latent_shape)
        loss = vae.loss(batch.images.to(device), noise.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if not math.isfinite(value := float(loss.detach())):
            raise DataError(f"the autoencoder's training diverged at step {step}; lower --lr (it is {training.lr:g})")
        if on_step:
            on_step(step + 1, value)
    facts = {
        "format": VAE_FORMAT,
        "config": asdict(config),
        **measure(vae, dataset, training.seed, device),
        "training": asdict(training),
        "source": dataset.fingerprint,
    }
    save(vae, facts, folder)
    return facts


def measure(vae: ConvVAE, dataset: Dataset, seed: int, device: str | torch.device) -> dict[str, float]:
    """Shift, scale and PSNR over up to 1,024 images of the dataset."""
    indices = np.sort(streams.permutation(seed, "vae_measure", 0, len(dataset))[:_NUM_MEASURED])
    latents, squared_errors = [], []
    vae.eval()
    with torch.no_grad():
        for start in range(0, len(indices), 64):
            images = to_float(dataset.fetch(indices[start : start + 64])[0]).to(device)
            mean, log_variance = vae.encode(images)
            squared_errors.append((vae.decode(mean).clamp(-1, 1) - images).square().flatten(1).mean(dim=1).cpu())
            # Of the latents that are drawn: the variances belong to them as well.
            latents.append(torch.stack([mean.mean(), mean.square().mean() + log_variance.exp().mean()]).cpu())
    shift, square = torch.stack(latents).double().mean(dim=0).tolist()
    error = float(torch.cat(squared_errors).double().mean())
    return {"shift": shift, "scale": (square - shift**2) ** -0.5, "psnr": 10 * math.log10(4 / max(error, 1e-12))}


def save(vae: ConvVAE, facts: dict[str, Any], folder: Path) -> None:
    """Both files, each whole or not at all. Without `vae.json` there is no autoencoder: it goes first and comes last,
    so a kill never leaves one training's weights with the scale of another."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vae.json").unlink(missing_ok=True)
    part = folder / f"vae.safetensors.part-{os.getpid()}"
    save_file({name: tensor.cpu().contiguous() for name, tensor in vae.state_dict().items()}, part)
    os.replace(part, folder / "vae.safetensors")
    part = folder / f"vae.json.part-{os.getpid()}"
    part.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    os.replace(part, folder / "vae.json")


def _check(dataset: Dataset, config: VAEConfig) -> None:
    channels, size, _ = dataset.image_shape
    if isinstance(dataset, DrawnDataset):
        raise DataError(f"{dataset.fingerprint} are latents; an autoencoder is trained on images")
    if channels != config.in_channels:
        raise DataError(f"the images have {channels} channel(s), the autoencoder takes {config.in_channels}")
    try:
        check_image_size(size, downsample_factor=config.downsample_factor)
    except ValueError as error:
        raise DataError(str(error)) from None
