"""Encoders: images to the distributions of their latents, and latents to images.

    identity            pixels; the latent is the image in [-1, 1], of deviation zero
    vae:FOLDER          what ``rowdit train-vae`` wrote
    diffusers:FOLDER    diffusers' AutoencoderKL, a folder with config.json and safetensors
    diffusers:NAME      the same by its name on the Hugging Face hub, fetched once

An encoder's latents are scaled, ``(z - shift) * scale``, so that they have a standard deviation of about 1; what it
decodes are such latents. Weights are read from safetensors only, so that no file executes anything.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rowdit.data.batch import DataError, to_float, to_uint8
from rowdit.models.vae import ConvVAE, VAEConfig

VAE_FORMAT = "rowdit-vae/1"


class Encoder(Protocol):
    """What :mod:`rowdit.encode.job` needs of an encoder.

    Attributes:
        name: its kind, short.
        hash: sha256 over what it computes with, hexadecimal.
        in_channels: of the images.
        downsample_factor: pixels a latent pixel's side.
        has_deviations: whether its latents are distributions rather than points.
    """

    name: str
    hash: str
    in_channels: int
    downsample_factor: int
    has_deviations: bool

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) uint8 to means and deviations (B, c, h, w), float32 on the CPU, scaled."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """(B, c, h, w) float32, scaled, to (B, C, H, W) uint8 on the CPU."""
        ...

    def latent_shape(self, image_size: int) -> tuple[int, int, int]:
        """(c, h, w) of an image of ``image_size`` a side."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the manifest says of it, JSON-able: name, hash, scale, shift, spec, ..."""
        ...


class IdentityEncoder:
    """Pixels are their own latents.

    Args:
        in_channels: of the images.
    """

    name = "identity"
    hash = hashlib.sha256(b"x = u / 127.5 - 1").hexdigest()
    downsample_factor = 1
    has_deviations = False

    def __init__(self, in_channels: int = 3) -> None:
        self.in_channels = in_channels

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        means = to_float(images.cpu())
        return means, torch.zeros_like(means)

    def decode(self, latents: Tensor) -> Tensor:
        return to_uint8(latents.cpu())

    def latent_shape(self, image_size: int) -> tuple[int, int, int]:
        return self.in_channels, image_size, image_size

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "spec": "identity", "hash": self.hash, "scale": 1.0, "shift": 0.0, "factor": 1}


class VAEEncoder:
    """A :class:`rowdit.models.vae.ConvVAE` with the scale that was measured when it was trained.

    Args:
        folder: holds ``vae.json`` and ``vae.safetensors``.
        device: where it computes.

    Raises:
        DataError: a file is missing, damaged, of another format, or doesn't fit the other.
    """

    name = "vae"
    has_deviations = True

    def __init__(self, folder: Path, device: torch.device) -> None:
        from safetensors.torch import load_file

        try:
            facts = json.loads((folder / "vae.json").read_text(encoding="utf-8"))
            if facts["format"] != VAE_FORMAT:
                raise DataError(f"{folder / 'vae.json'}: the format is {facts['format']!r}, not {VAE_FORMAT!r}")
            config = VAEConfig(**facts["config"])
            self.scale, self.shift = float(facts["scale"]), float(facts["shift"])
            self._vae = ConvVAE(config)
            self._vae.load_state_dict(load_file(folder / "vae.safetensors"))
        except FileNotFoundError as error:
            raise DataError(f"{error.filename or folder} doesn't exist; make it with `rowdit train-vae`") from None
        except DataError:
            raise
        except Exception as error:  # safetensors, JSON and torch each have their own
            raise DataError(f"{folder} holds no autoencoder that can be read ({_one_line(error)})") from error
        self._vae.to(device).eval().requires_grad_(False)
        self._device, self._folder = device, folder
        self.hash = weights_hash(self._vae, {**vars(config), "scale": self.scale, "shift": self.shift})
        self.in_channels, self.downsample_factor = config.in_channels, config.downsample_factor

    @torch.no_grad()
    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self._vae.encode(to_float(images.to(self._device)))
        return ((mean - self.shift) * self.scale).cpu(), ((0.5 * log_variance).exp() * self.scale).cpu()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        return to_uint8(self._vae.decode(latents.to(self._device) / self.scale + self.shift)).cpu()

    def latent_shape(self, image_size: int) -> tuple[int, int, int]:
        return self._vae.latent_shape(image_size)

    def describe(self) -> dict[str, Any]:
        facts = {"name": self.name, "spec": f"vae:{self._folder.resolve()}", "hash": self.hash}
        return facts | {"scale": self.scale, "shift": self.shift, "factor": self.downsample_factor}


class DiffusersEncoder:
    """diffusers' ``AutoencoderKL``; scale and shift are ``scaling_factor`` and ``shift_factor`` of its config.

    Args:
        place: a folder, or a name on the hub such as ``stabilityai/sd-vae-ft-ema``.
        device: where it computes.

    Raises:
        DataError: it can't be found or read, or has no safetensors.
        ModuleNotFoundError: diffusers isn't installed.
    """

    name = "diffusers"
    has_deviations = True

    def __init__(self, place: str, device: torch.device) -> None:
        try:
            from diffusers import AutoencoderKL
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error}; pip install '.[rowdit,data]' in the clone brings diffusers", name=error.name
            ) from error

        folder = Path(place).expanduser()
        try:
            self._vae = AutoencoderKL.from_pretrained(
                str(folder) if folder.is_dir() else place, use_safetensors=True, torch_dtype=torch.float32
            )
        except Exception as error:  # diffusers' and the hub's own, of many types
            raise DataError(
                f"diffusers:{place}: no AutoencoderKL in safetensors there ({_one_line(error)}); name a folder with "
                f"config.json and *.safetensors, or a name on the hub"
            ) from error
        self._vae.to(device).eval().requires_grad_(False)
        self._device, self._spec = device, f"diffusers:{folder.resolve() if folder.is_dir() else place}"
        config = self._vae.config
        self.scale, self.shift = float(config.scaling_factor), float(config.shift_factor or 0.0)
        self.hash = weights_hash(self._vae, {"scale": self.scale, "shift": self.shift})
        self.in_channels = int(config.in_channels)
        self.downsample_factor = 2 ** (len(config.block_out_channels) - 1)

    @torch.no_grad()
    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        posterior = self._vae.encode(to_float(images.to(self._device))).latent_dist
        return ((posterior.mean - self.shift) * self.scale).cpu(), (posterior.std * self.scale).cpu()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        return to_uint8(self._vae.decode(latents.to(self._device) / self.scale + self.shift).sample).cpu()

    def latent_shape(self, image_size: int) -> tuple[int, int, int]:
        side = image_size // self.downsample_factor
        return int(self._vae.config.latent_channels), side, side

    def describe(self) -> dict[str, Any]:
        facts = {"name": self.name, "spec": self._spec, "hash": self.hash}
        return facts | {"scale": self.scale, "shift": self.shift, "factor": self.downsample_factor}


def open_encoder(spec: str, device: str | torch.device = "cpu", in_channels: int = 3) -> Encoder:
    """An encoder by its name; the module's docstring lists them.

    Args:
        spec: which.
        device: where it computes.
        in_channels: of the images; the identity encoder takes any number, the others have theirs.

    Raises:
        DataError: an unknown name, or weights that can't be read.

    Example:
        >>> encoder = open_encoder("identity", in_channels=1)
        >>> encoder.latent_shape(28), encoder.downsample_factor
        ((1, 28, 28), 1)
    """
    kind, _, place = spec.partition(":")
    if spec == "identity":
        return IdentityEncoder(in_channels)
    if kind == "vae" and place:
        return VAEEncoder(Path(place).expanduser(), torch.device(device))
    if kind == "diffusers" and place:
        return DiffusersEncoder(place, torch.device(device))
    raise DataError(f"unknown encoder {spec!r}: it is one of 'identity', 'vae:FOLDER' and 'diffusers:FOLDER-OR-NAME'")


def encoder_of(manifest: dict[str, Any], device: str | torch.device = "cpu") -> Encoder:
    """The encoder that made some latents, to decode what a model trained on them samples.

    Args:
        manifest: of :class:`rowdit.data.latents.Latents`.
        device: where it computes.

    Raises:
        DataError: it isn't where it was, or its weights have changed.
    """
    facts = manifest["encoder"]
    encoder = open_encoder(facts["spec"], device, in_channels=manifest["latent_shape"][0])
    if encoder.hash != facts["hash"]:
        raise DataError(
            f"{facts['spec']} has changed since the latents were made: its hash is {encoder.hash[:16]}..., not "
            f"{facts['hash'][:16]}...; put the former weights there, or encode again"
        )
    return encoder


def weights_hash(module: nn.Module, facts: dict[str, Any]) -> str:
    """sha256 over all tensors of a module by name, and over plain facts."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
