"""Fingerprints: plain data that says how a thing was made, kept in its file, compared before two are used together."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor


def canonical_json(data: Any) -> str:
    """One text per value: sorted keys, no spaces. JSON knows no tuples, so (1, 28) and [1, 28] are the same."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def digest(data: Any) -> str:
    """Sha256 of the canonical JSON, as hex."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()


def check_same(
    first_name: str,
    first: Mapping[str, Any],
    second_name: str,
    second: Mapping[str, Any],
    ignore: tuple[str, ...] = (),
) -> None:
    """Raise unless two fingerprints agree.

    Args:
        first_name, second_name: what they are the fingerprints of, for the message.
        first, second: nested mappings of plain data.
        ignore: entries that may differ, with dots: "sampling.seed".

    Raises:
        ValueError: names the entries that differ and shows both fingerprints.
    """
    first_flat, second_flat = _flatten(first), _flatten(second)
    names = [name for name in dict.fromkeys([*first_flat, *second_flat]) if name not in ignore]
    absent = "nothing"
    differing = [
        f"  {name}: {first_flat.get(name, absent)} against {second_flat.get(name, absent)}"
        for name in names
        if canonical_json(first_flat.get(name)) != canonical_json(second_flat.get(name))
    ]
    if differing:
        raise ValueError(
            "\n".join(
                [
                    f"{first_name} and {second_name} don't belong together, they differ in",
                    *differing,
                    f"fingerprint of {first_name}: {canonical_json(first)}",
                    f"fingerprint of {second_name}: {canonical_json(second)}",
                ]
            )
        )


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} to {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def save_tensors(path: Path, tensors: Mapping[str, Tensor], file_format: str, fingerprint: Mapping[str, Any]) -> None:
    """Write a safetensors file whose header holds the format and the fingerprint as JSON. Whole or not at all."""
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(path, save(content, {"format": file_format, "fingerprint": canonical_json(fingerprint)}))


def load_tensors(path: Path, file_format: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote: the tensors, on the CPU, and the fingerprint.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it can't be read, or is of another format.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} can't be read ({error}); delete it, and it will be made again") from error
    if metadata.get("format") != file_format:
        raise ValueError(
            f"{path} isn't a {file_format} file (its format: {metadata.get('format')}); delete it, or name another file"
        )
    return tensors, json.loads(metadata["fingerprint"])


def write_whole(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write beside the goal, then rename: a kill or a full disk leaves the old file or none, never half of one.

    Args:
        path: the file; its folder is made.
        content: all of it.
        sync: force it to the disk first, so that a power cut leaves no half of it either.

    Raises:
        OSError: it can't be written; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise OSError(
            error.errno, f"can't write {path}: {error.strerror}; free some space or choose another folder"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
