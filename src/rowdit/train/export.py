"""A trained model as one file to pass on: safetensors, with its config as JSON in the header. Reading it executes
nothing.

The header's metadata holds `rowdit.export` (a version), `model` (the fields of `DiTConfig`) and `origin` (the run's
whole config, step, images seen, which weights, the data's fingerprint), all JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from rowdit.models.dit import DiT, DiTConfig
from rowdit.train import checkpoint
from rowdit.train.checkpoint import CheckpointError
from rowdit.train.config import ConfigError, from_dict
from rowdit.train.log import write_bytes
from rowdit.train.resume import read_json

VERSION = "1"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    run: Path | str,
    out: Path | str,
    *,
    which: str = "ema",
    step: int | None = None,
    std: float | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Writes the weights of a run, whole and plain, into one file.

    Args:
        run: the run's folder.
        out: the file.
        which: `"ema"`, `"model"`, or another average's label.
        step: of the checkpoint; None is the newest.
        std: instead of `which`, a width of a power-function average, put together from the run's snapshots.
        dtype: of the weights in the file.

    Returns:
        The origin, as in the header.

    Raises:
        CheckpointError: no such checkpoint, or no such average.
        ConfigError: an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: must be one of {', '.join(DTYPES)}")
    run, out = Path(run), Path(out)
    found = checkpoint.find(run, step)
    header, dataset = checkpoint.read_header(found), run / "dataset.json"
    origin = {
        "which": which,
        "step": found.step,
        "images_seen": header["images_seen"],
        "config": header["config"],
        "data": read_json(dataset, "fingerprint")["fingerprint"] if dataset.exists() else None,
    }
    if std is None:
        model = checkpoint.load_model(run, which, step=found.step)
    else:
        from rowdit.train.averages import reconstruct

        model = checkpoint.load_model(run, "model", step=found.step)
        origin |= {"which": f"power_{std:g}, put together", "snapshots": reconstruct(run, model, std, found.step)}
    tensors = {name: p.detach().to(DTYPES[dtype]).contiguous() for name, p in model.named_parameters()}
    metadata = {"rowdit.export": VERSION, "model": json.dumps(asdict(model.config)), "origin": json.dumps(origin)}
    write_bytes(out, safetensors.torch.save(tensors, metadata))
    return origin


def load_export(path: Path | str, device: torch.device | str = "cpu") -> DiT:
    """The model in an exported file, in eval mode; its shape is `model.config`.

    Raises:
        CheckpointError: it isn't an export, or is cut short; the file is named.
    """
    metadata = read_metadata(path)
    try:
        config = from_dict(DiTConfig, json.loads(metadata["model"]), "model")
        tensors = safetensors.torch.load_file(path, device=str(device))
    except (ValueError, OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from error
    with torch.device("meta"):
        model = DiT(config)
    model.to_empty(device=device)
    model.init_buffers()
    missing, extra = model.load_state_dict(tensors, strict=False)
    missing = [name for name in missing if name not in dict(model.named_buffers())]
    if missing or extra:
        raise CheckpointError(f"{path} doesn't fit its own config: missing {missing[:3]}, unexpected {list(extra)[:3]}")
    return model.eval()


def read_metadata(path: Path | str) -> dict[str, str]:
    """The header's metadata of an exported file.

    Raises:
        CheckpointError: it isn't an export of this version.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from error
    if metadata.get("rowdit.export") != VERSION:
        raise CheckpointError(f"{path} wasn't written by `rowdit export`, or by another version of it")
    return metadata
