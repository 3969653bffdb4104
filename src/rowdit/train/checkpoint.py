"""Checkpoints: the whole state of a run, written whole or not at all, read without executing anything.

    CHECKPOINTS/step_000400/
        model.safetensors       and ema.safetensors, optimizer.safetensors
        state.json              counters, optimizer groups, config, sizes of the files

A checkpoint is written into a hidden folder beside, flushed to the disk, and renamed: a folder that is named
`step_...` is complete, whatever killed the process. The newest is the one with the largest step, never the largest or
the youngest file. Tensors are safetensors and the rest is JSON, so loading a checkpoint runs no code.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from rowdit.train.config import RunConfig, to_dict
from rowdit.train.step import TrainState

FORMAT = 1
_NAME = re.compile(r"step_(\d{6,})")
_COUNTERS = ("step", "images_seen", "num_updates", "num_skipped", "num_skipped_in_row")


class CheckpointError(RuntimeError):
    """A checkpoint can't be written or read; the message names it and says what is left to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int


def save(folder: Path, state: TrainState, config: RunConfig, *, keep: int = 2) -> Checkpoint:
    """Writes the whole state as `folder/step_XXXXXX` and removes all but the `keep` newest checkpoints.

    Raises:
        CheckpointError: it couldn't be written (a full disk, say). Older checkpoints are untouched then.
    """
    final = folder / f"step_{state.step:06d}"
    beside = folder / f".writing_{final.name}"
    files, header = _pack(state)
    header |= {"format": FORMAT, "config": to_dict(config), "files": {name: len(b) for name, b in files.items()}}
    files["state.json"] = (json.dumps(header, indent=1) + "\n").encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        beside.mkdir()
        for name, content in files.items():
            _write(beside / name, content)
        _sync(beside)
        if final.exists():
            shutil.rmtree(final)
        os.replace(beside, final)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(_explain(error, final, sum(map(len, files.values())), newest(folder))) from error
    for old in _complete(folder)[:-keep]:
        shutil.rmtree(old.path, ignore_errors=True)
    return Checkpoint(final, state.step)


def newest(folder: Path) -> Checkpoint | None:
    """The complete checkpoint with the largest step, or None."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def load(checkpoint: Checkpoint, state: TrainState) -> None:
    """Puts the saved state into `state`, whose model, optimizer and average were built from the same config.

    Raises:
        CheckpointError: a file is missing, cut short or of another model; the file is named.
    """
    header = read_header(checkpoint)
    tensors = {}
    for name in ("model", "ema", "optimizer"):
        path = checkpoint.path / f"{name}.safetensors"
        try:
            tensors[name] = safetensors.torch.load_file(path)
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"can't read {path}: {error}") from error
    try:
        state.model.load_state_dict(tensors["model"])
        state.optimizer.load_state_dict(_decode(header["optimizer"], tensors["optimizer"]))
        state.ema.load_state_dict(tensors["ema"], header["ema_num_updates"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{checkpoint.path} doesn't fit this run: {' '.join(str(error).split())}") from error
    for name in _COUNTERS:
        setattr(state, name, header[name])


def read_header(checkpoint: Checkpoint) -> dict[str, Any]:
    """The counters and the config of a checkpoint, after checking that its files have the sizes that were written."""
    path = checkpoint.path / "state.json"
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        sizes = {name: (checkpoint.path / name).stat().st_size for name in header["files"]}
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from error
    if header["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {header['format']}, this version reads {FORMAT}")
    for name, size in header["files"].items():
        if sizes[name] != size:
            raise CheckpointError(
                f"{checkpoint.path / name}: {sizes[name]} bytes, {size} were written; "
                f"remove {checkpoint.path} to go on from the checkpoint before it, or from the start"
            )
    return header


def _complete(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints by step."""
    if not folder.is_dir():
        return []
    found = [(path, _NAME.fullmatch(path.name)) for path in folder.iterdir()]
    checkpoints = [Checkpoint(path, int(m[1])) for path, m in found if m and (path / "state.json").is_file()]
    return sorted(checkpoints, key=lambda c: c.step)


def _pack(state: TrainState) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files' contents and the header."""
    optimizer_tensors: dict[str, Tensor] = {}
    header = {name: getattr(state, name) for name in _COUNTERS}
    header["ema_num_updates"] = state.ema.num_updates
    header["optimizer"] = _encode(state.optimizer.state_dict(), "", optimizer_tensors)
    groups = {
        "model.safetensors": state.model.state_dict(),
        "ema.safetensors": state.ema.state_dict(),
        "optimizer.safetensors": optimizer_tensors,
    }
    return {name: safetensors.torch.save(_plain(tensors)) for name, tensors in groups.items()}, header


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies on the CPU: safetensors refuses views and tensors that share memory."""
    return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for a nested optimizer state; tensors move to `tensors`, and what JSON lacks is tagged."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"__tensor__": path}
    if isinstance(value, dict):
        return {"__dict__": [[k, _encode(v, f"{path}.{k}" if path else str(k), tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        return {"__tuple__": items} if isinstance(value, tuple) else items
    if isinstance(value, torch.dtype):
        return {"__dtype__": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        f"optimizer state {path!r} is a {type(value).__name__}; checkpoints hold tensors and plain data"
    )


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `_encode`."""
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    match tag:
        case "__tensor__":
            return tensors[content]
        case "__dict__":
            return {k: _decode(v, tensors) for k, v in content}
        case "__tuple__":
            return tuple(_decode(item, tensors) for item in content)
        case "__dtype__":
            return getattr(torch, content)
    raise ValueError(f"unknown tag {tag!r} in the optimizer state")


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Flushes a folder's own entries, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Half-written checkpoints of killed processes."""
    for path in folder.glob(".writing_step_*"):
        shutil.rmtree(path, ignore_errors=True)


def _explain(error: OSError, path: Path, num_bytes: int, last: Checkpoint | None) -> str:
    reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
    kept = f"the last good checkpoint, {last.path}, is kept" if last else "there is no earlier checkpoint"
    return f"can't write {path} ({num_bytes / 1e6:.1f} MB): {reason}; {kept}. Make room and run the same command again."
