"""A trained model for sampling and evaluation, from a run's folder or from an exported file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rowdit.evaluate.generate import Decoder
    from rowdit.train.config import RunConfig


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, in eval mode, and what is known of it.

    Args:
        model: (x_BCHW, t_B, y_B) -> velocity.
        config: of the run that it is from.
        step: of the checkpoint.
        which: "ema", "model", or the label of another average.
        fingerprint: plain data that names the weights, with their hash.
        decoder: from latents to images; None for a model of pixels.
    """

    model: nn.Module
    config: RunConfig
    step: int
    which: str
    fingerprint: Mapping[str, Any]
    decoder: Decoder | None = None

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of what the model makes."""
        return self.config.model.in_channels, self.config.model.image_size, self.config.model.image_size


def open_model(
    run: Path, which: str, device: torch.device, *, step: int | None = None, decoder: str | None = None
) -> LoadedModel:
    """The weights of a run's checkpoint or of an exported file, and the decoder if it was trained on latents.

    Args:
        run: folder of a run, or a file that `rowdit export` wrote, which has one set of weights.
        which: "ema", "model", or the label of another average.
        device: where model and decoder go.
        step: of the checkpoint; None is the newest.
        decoder: the autoencoder, by the names of `rowdit.encode.open_encoder`; None takes the one that the latents'
            manifest names.

    Raises:
        CheckpointError: there is no such checkpoint, or it can't be read.
        DataError: the decoder can't be found or read.
        ValueError: a model of captions.
    """
    from rowdit.train import checkpoint

    if run.is_file():
        model, config, step, which = _open_export(run, device)
    else:
        found = checkpoint.find(run, step)
        config, step = checkpoint.run_config(found), found.step
        model = checkpoint.load_model(run, which, step=step, device=device)
    if config.model.caption_dim is not None:
        raise ValueError(
            f"{run} is conditioned on captions, which this command has none of; in Python, "
            "rowdit.evaluate.generate takes their embeddings as labels"
        )
    model.requires_grad_(False)
    fingerprint = {"step": step, "which": which, "sha256": weights_hash(model.state_dict())}
    return LoadedModel(model, config, step, which, fingerprint, open_decoder(config, decoder, device))


def _open_export(path: Path, device: torch.device) -> tuple[nn.Module, RunConfig, int, str]:
    from rowdit.train.config import RunConfig, from_dict
    from rowdit.train.export import load_export, read_metadata

    origin = json.loads(read_metadata(path)["origin"])
    config = from_dict(RunConfig, origin["config"])
    return load_export(path, device), config, int(origin["step"]), str(origin["which"])


def open_device(name: str | None) -> torch.device:
    """A device by its name; by default the GPU of LOCAL_RANK, or the CPU.

    Raises:
        ValueError: there is no such device.
    """
    import torch

    from rowdit.evaluate.ranks import default_device

    if name is None:
        return default_device()
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's own, for a name that is none and a device that isn't here
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device


def open_decoder(config: RunConfig, spec: str | None, device: torch.device) -> Decoder | None:
    """The autoencoder of a run on latents; None for one on pixels."""
    kind, _, place = config.data.source.partition(":")
    if spec is None and kind != "latents":
        return None
    from rowdit.encode import encoder_of, open_encoder

    if spec is not None:
        return open_encoder(spec, device)
    from rowdit.data import open_dataset

    return encoder_of(open_dataset(config.data.source).manifest, device)  # type: ignore[attr-defined]


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """Sha256 over names, types, shapes and bytes, in the order of the names; 16 hexadecimal digits of it."""
    import numpy as np
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous().cpu()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}\n".encode())
        digest.update(np.ascontiguousarray(tensor.flatten().view(torch.uint8).numpy()).data)
    return digest.hexdigest()[:16]
