"""Latents of images, as ``rowdit encode`` writes them.

    PATH/train/manifest.json             written last; without it the folder isn't whole
    PATH/train/shard-00000.safetensors   some thousand images
    PATH/train/shard-00000.json          its size, hash, labels' counts and bad files
    PATH/train/job.json                  what is being encoded, and how
    PATH/reference/...

Tensors of a shard (n images; c, h, w of a latent): ``labels`` (n,) int64; ``indices`` (n,) int64, the images' numbers
in the source; and either

    means, deviations                    (n, c, h, w) float16 or float32, scaled as the manifest says
    means_flipped, deviations_flipped    the same of the mirrored images: an autoencoder doesn't commute with mirroring

or, of the identity encoder, ``pixels`` (n, c, h, w) uint8. Nothing in a shard or in the manifest is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rowdit import streams
from rowdit.data.batch import DataError, check_indices, check_labels, fingerprint, to_float

FORMAT = "rowdit-latents/1"
MANIFEST = "manifest.json"
DTYPES = {"F16": np.float16, "F32": np.float32, "U8": np.uint8, "I64": np.int64}  # safetensors' names

_FEW_BYTES = 256 << 20  # hashed without being asked: about a second
_MAX_HEADER_BYTES = 1 << 20
_MAX_OPEN_SHARDS = 256


class Latents:
    """The latents of one split; a :class:`rowdit.data.DrawnDataset`.

    Images are float32 and scaled: of standard deviation about 1, if the encoder's scale is right. ``fetch`` gives
    means, ``draw`` mean + deviation * noise, of the image or its mirror image, noise and flip by (seed, position).

    Args:
        path: the split's folder, the one that holds ``manifest.json``.
        check_hashes: read every shard at opening and compare its hash. None: where that is little work, at most 256 MiB
            in all. Sizes are always compared.

    Attributes:
        manifest: what ``manifest.json`` says: encoder, scale, source, crop, size, classes, counts, bad files, shards.

    Raises:
        DataError: no such folder, an encoding that isn't whole, or a shard that is missing, damaged or of another size.
    """

    def __init__(self, path: str | os.PathLike[str], *, check_hashes: bool | None = None) -> None:
        self.path = Path(path).expanduser()
        self.manifest = read_manifest(self.path)
        self.class_names: tuple[str, ...] = tuple(self.manifest["class_names"])
        self.num_classes = len(self.class_names)
        channels, height, width = self.manifest["latent_shape"]
        self.image_shape: tuple[int, int, int] = (channels, height, width)
        self.bad_files: dict[str, str] = dict(self.manifest["bad_files"])
        self._shards = [ShardFile(self.path / shard["file"], shard) for shard in self.manifest["shards"]]
        if check_hashes is None:
            check_hashes = sum(shard["num_bytes"] for shard in self.manifest["shards"]) <= _FEW_BYTES
        for shard in self._shards:
            shard.check(hashes=check_hashes)
        self._ends = np.cumsum([shard["num_images"] for shard in self.manifest["shards"]])
        self._open_shards: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()
        self.labels = self._read_labels()
        encoder = {key: value for key, value in self.manifest["encoder"].items() if key != "spec"}  # wherever it lies
        content = json.dumps(self.manifest | {"encoder": encoder}, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()
        self.fingerprint = fingerprint(
            f"latents-{encoder['name']}-{encoder['hash'][:16]}",
            self.image_shape,
            len(self),
            digest,
            resize=f"{self.manifest['image_size']}px-{self.manifest['crop']}",
        )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open_shards": OrderedDict()}  # mapped files are opened anew in each process

    def fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Means (B, c, h, w) float32 and labels (B,) int64 of ``indices``, (B,) integers in 0 .. len - 1."""
        indices = check_indices(indices, len(self))
        none = np.zeros(len(indices), bool)
        means, _ = self._read(indices, none)
        return means, self.labels[indices]

    def draw(
        self, indices: np.ndarray, positions: Tensor, *, seed: int, flip: bool = False
    ) -> tuple[Tensor, np.ndarray]:
        """Latents (B, c, h, w) float32 and labels (B,) int64: mean + deviation * noise.

        Args:
            indices: (B,) integers in 0 .. len - 1.
            positions: (B,) int64, places in the stream; noise and flip depend on (seed, position) alone.
            seed: of the streams ``"latent"`` and ``"flip"``.
            flip: take the mirror image's latent with probability 1/2.

        Raises:
            DataError: a flip is asked for, and the mirror images weren't encoded.
        """
        indices = check_indices(indices, len(self))
        flipped = np.zeros(len(indices), bool)
        if flip:
            if not self.manifest["flips"]:
                raise DataError(f"{self.path} has no mirror images; encode without --no-flips, or train without flip")
            flipped = (streams.uniform(seed, "flip", positions) < 0.5).numpy()
        means, deviations = self._read(indices, flipped)
        latents = torch.from_numpy(means)
        if deviations is not None:
            noise = streams.normal(seed, "latent", positions, self.image_shape)
            latents += torch.from_numpy(deviations) * noise
        return latents, self.labels[indices]

    def _read(self, indices: np.ndarray, flipped: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Means and deviations (None: they are zero), float32."""
        means = np.empty((len(indices), *self.image_shape), np.float32)
        deviations = np.empty_like(means) if self.manifest["deviations"] else None
        shard_of = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(shard_of).tolist():
            tensors = self._tensors(number)
            begin = int(self._ends[number - 1]) if number else 0
            for mirror in (False, True):
                where = np.flatnonzero((shard_of == number) & (flipped == mirror))
                rows = indices[where] - begin
                if not len(where):
                    continue
                if "pixels" in tensors:
                    pixels = tensors["pixels"][rows]
                    means[where] = to_float(pixels[..., ::-1] if mirror else pixels)
                    continue
                suffix = "_flipped" if mirror else ""
                means[where] = tensors[f"means{suffix}"][rows]
                if deviations is not None:
                    deviations[where] = tensors[f"deviations{suffix}"][rows]
        return means, deviations

    def _tensors(self, number: int) -> dict[str, np.ndarray]:
        """The mapped tensors of a shard; the shards used last are kept open."""
        if number in self._open_shards:
            self._open_shards.move_to_end(number)
            return self._open_shards[number]
        self._open_shards[number] = self._shards[number].tensors()
        if len(self._open_shards) > _MAX_OPEN_SHARDS:
            self._open_shards.popitem(last=False)
        return self._open_shards[number]

    def _read_labels(self) -> np.ndarray:
        pieces = []
        for number, shard in enumerate(self._shards):
            labels = np.array(self._tensors(number)["labels"])
            check_labels(labels, self.num_classes, str(shard.path))
            pieces.append(labels)
        return np.concatenate(pieces)


class ShardFile:
    """A safetensors file, mapped into memory.

    Args:
        path: of the file.
        facts: its ``num_images``, ``num_bytes`` and ``sha256``.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self.facts = path, facts

    def check(self, *, hashes: bool) -> None:
        """Raise a DataError unless the file has its size, and with ``hashes`` its hash."""
        again = "encode into this folder again with the same command, which makes only what is missing"
        try:
            found = self.path.stat().st_size
            if found == self.facts["num_bytes"] and hashes:
                with open(self.path, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest != self.facts["sha256"]:
                    raise DataError(
                        f"{self.path} is damaged: its sha256 is {digest}, not {self.facts['sha256']}; {again}"
                    )
        except FileNotFoundError:
            raise DataError(f"{self.path} is missing; {again}") from None
        if found != self.facts["num_bytes"]:
            raise DataError(f"{self.path} has {found} bytes, not {self.facts['num_bytes']}; {again}")

    def tensors(self) -> dict[str, np.ndarray]:
        """Name -> read-only array. (Format: https://huggingface.co/docs/safetensors, 8 bytes of length, JSON, data.)"""
        data = np.memmap(self.path, np.uint8, mode="r")
        try:
            length = int.from_bytes(data[:8].tobytes(), "little")
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(data[8 : 8 + length].tobytes())
            header.pop("__metadata__", None)
            body = data[8 + length :]
            return {name: _view(body, entry) for name, entry in header.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{self.path} isn't a shard of latents ({error}); encode it again") from error


def _view(body: np.ndarray, entry: dict[str, Any]) -> np.ndarray:
    begin, end = entry["data_offsets"]
    return body[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a split's folder.

    Raises:
        DataError: it is missing, no JSON, or of another format.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict):
            raise ValueError("not a table")
    except (FileNotFoundError, NotADirectoryError):
        begun = (path / "job.json").exists()
        state = "the encoding isn't finished: run the same `rowdit encode` again" if begun else "no latents lie there"
        raise DataError(f"{path / MANIFEST} doesn't exist; {state}") from None
    except ValueError as error:
        raise DataError(f"{path / MANIFEST} isn't JSON ({error}); run the same `rowdit encode` again") from error
    if manifest.get("format") != FORMAT:
        raise DataError(f"{path / MANIFEST} has the format {manifest.get('format')!r}; this version reads {FORMAT!r}")
    if not manifest["shards"] or not sum(shard["num_images"] for shard in manifest["shards"]):
        raise DataError(f"{path} holds no images")
    return manifest


def open_latents(
    path: str | os.PathLike[str], split: Literal["train", "reference"], image_size: int | None = None, **options: Any
) -> Latents:
    """One split of what ``rowdit encode`` wrote into ``path``.

    Args:
        path: the folder given as ``--out``, which holds one folder a split.
        split: which of them.
        image_size: side of a latent, to be compared; None takes what is there.
        **options: of :class:`Latents`.

    Raises:
        DataError: as from :class:`Latents`; no such split; or latents of another side.
    """
    folder = Path(path).expanduser()
    if not (folder / split).is_dir() and folder.is_dir():
        there = sorted(found.parent.name for found in folder.glob(f"*/{MANIFEST}"))
        raise DataError(f"{folder} has no split {split!r}, only {', '.join(there) or 'none'}; encode it with --split")
    latents = Latents(folder / split, **options)
    if image_size is not None and latents.image_shape[1] != image_size:
        raise DataError(
            f"{folder}: its latents are {latents.image_shape[1]} a side, not {image_size}; set the model's image_size "
            f"(for a latent model, the latents' side) to {latents.image_shape[1]}"
        )
    return latents
