"""`rowdit train-vae`: a small autoencoder for `rowdit encode`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from rowdit.commands.limits import check_count, check_images
from rowdit.commands.outputs import check_folder, no_empty_folder
from rowdit.commands.parsing import fail, parse, set_threads

if TYPE_CHECKING:
    from rowdit.encode.train_vae import VAETraining
    from rowdit.models.vae import VAEConfig


@dataclass(frozen=True)
class TrainVAECommand:
    """Trains a small convolutional autoencoder on images and writes OUT/vae.json and OUT/vae.safetensors, which
    `rowdit encode --encoder vae:OUT` takes. The defaults take about a minute on one core with the bundled images.

    Args:
        source: the images, as for `rowdit encode`.
        out: the folder.
        image_size: pixels a side; needed where the source has no size of its own.
        channels: 3 for RGB, 1 for grey; by default what the source has.
        bad_images: what becomes of images that can't be used.
        image_key: the member of a sample, or the column, that is the image; by default the usual one.
        label_key: likewise the label, which isn't used.
        steps: of training.
        batch_size: images a step.
        lr: at the start; it falls to zero.
        seed: of everything random.
        latent_channels: channels of a latent.
        downsample_factor: pixels a latent pixel's side; a power of two.
        hidden_channels: of the first level.
        pixel_deviation: smaller gives sharper images and less regular latents.
        device: cuda or cpu.
        threads: processor threads; all cores by default.
    """

    source: tyro.conf.Positional[str]
    out: Path
    image_size: int | None = None
    channels: int | None = None
    bad_images: Literal["error", "skip", "replace"] = "error"
    image_key: str | None = None
    label_key: str | None = None
    steps: int = 800
    batch_size: int = 64
    lr: float = 2e-3
    seed: int = 0
    latent_channels: int = 4
    downsample_factor: int = 4
    hidden_channels: int = 32
    pixel_deviation: float = 0.1
    device: str = "cpu"
    threads: int | None = None


def run(arguments: list[str]) -> int:
    command = parse("train-vae", TrainVAECommand, arguments)
    check_folder(command.out)
    check_images(command.batch_size, command.image_size, command.channels)
    check_count("seed", command.seed, least=0, most=2**63 - 1)
    from rowdit.commands.loading import open_device
    from rowdit.data import open_dataset
    from rowdit.encode.train_vae import train_vae

    set_threads(command.threads)
    try:
        device = str(open_device(command.device))
    except ValueError as error:
        return fail(str(error))
    dataset = open_dataset(
        command.source,
        "train",
        command.image_size,
        channels=command.channels,
        bad_images=command.bad_images,
        image_key=command.image_key,
        label_key=command.label_key,
    )
    try:
        config, training = _settings(command, dataset.image_shape[0])
    except ValueError as error:
        return fail(str(error))
    every = max(1, command.steps // 10)

    def show(step: int, loss: float) -> None:
        if step % every == 0:
            print(f"step {step}/{command.steps}  loss {loss:.4f}", flush=True)

    with no_empty_folder(command.out):
        facts = train_vae(dataset, command.out, config, training, device=device, on_step=show)
    shape = "x".join(map(str, (config.latent_channels, *[dataset.image_shape[1] // config.downsample_factor] * 2)))
    print(f"{command.out}: latents of {shape}, PSNR {facts['psnr']:.1f} dB, scale {facts['scale']:.3f}")
    return 0


def _settings(command: TrainVAECommand, in_channels: int) -> tuple[VAEConfig, VAETraining]:
    from rowdit.encode.train_vae import VAETraining
    from rowdit.models.vae import VAEConfig

    config = VAEConfig(
        in_channels=in_channels,
        latent_channels=command.latent_channels,
        downsample_factor=command.downsample_factor,
        hidden_channels=command.hidden_channels,
        pixel_deviation=command.pixel_deviation,
    )
    return config, VAETraining(command.steps, command.batch_size, command.lr, command.seed)
