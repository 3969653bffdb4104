"""Writing latent shards: any number of ranks, any number of kills, one result.

Shard k holds the source's images k * shard_images .. (k + 1) * shard_images - 1, and rank r of W makes the shards
r, r + W, r + 2 W, ... Ranks need not know each other: each writes its shards under another name, renames them when they
are whole, and then writes the shard's JSON, which is what counts. Whoever finds all of them there writes the manifest.
So the result is the same at every world size, a killed job goes on with what is missing, and two ranks that come to the
end at once write the same manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from rowdit.data.batch import DataError, Dataset, DrawnDataset, check_image_size, resize_of
from rowdit.data.decode import BadImageError
from rowdit.data.latents import FORMAT, MANIFEST, Latents
from rowdit.data.loader import read_ahead
from rowdit.encode.encoders import Encoder

JOB = "job.json"
OnProgress = Callable[[int, int], None]
Piece = tuple[np.ndarray, np.ndarray, np.ndarray]  # images, labels, and their numbers in the source


@dataclass(frozen=True)
class EncodeOptions:
    """How latents are written.

    Args:
        flips: encode the mirror images too.
        dtype: of means and deviations. float16 has 11 bits, which is far finer than an autoencoder's deviations.
        shard_images: images a shard. >= 1.
        batch_size: images encoded at once. >= 1.
        skip_bad: leave bad images out, and list them in the manifest; otherwise the first one ends the job.
        num_workers: >= 0, processes that decode ahead of the encoder; 0 decodes in this one.
    """

    flips: bool = True
    dtype: Literal["float16", "float32"] = "float16"
    shard_images: int = 4096
    batch_size: int = 64
    skip_bad: bool = False
    num_workers: int = 0

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ValueError(f"num_workers {self.num_workers} must be >= 0")
        if self.shard_images < 1 or self.batch_size < 1:
            raise ValueError(f"shard_images {self.shard_images} and batch_size {self.batch_size} must be >= 1")
        if self.dtype not in ("float16", "float32"):
            raise ValueError(f"dtype {self.dtype!r} is not one of float16, float32")


def encode_split(
    dataset: Dataset,
    encoder: Encoder,
    folder: Path,
    options: EncodeOptions | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    on_progress: OnProgress | None = None,
) -> bool:
    """Make this rank's shards of one split, and the manifest if they are the last.

    Args:
        dataset: the images; with ``options.skip_bad``, opened so that bad ones raise.
        encoder: takes their channels and size.
        folder: of the split; made where it is missing.
        options: how.
        rank, world_size: which share of the shards.
        on_progress: called with (images of this rank's shards done, images in all of them).

    Returns:
        Whether the split is whole: False while other ranks have shards to make.

    Raises:
        DataError: ``folder`` holds another encoding, or images don't fit the encoder.
        BadImageError: a bad image, without ``skip_bad``.
    """
    options = options or EncodeOptions()
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} must be in 0..world_size - 1, and world_size {world_size} >= 1")
    job = describe_job(dataset, encoder, options)
    folder.mkdir(parents=True, exist_ok=True)
    claim(folder, job)
    ranges = cut(range(len(dataset)), options.shard_images)
    mine = range(rank, len(ranges), world_size)
    missing = [number for number in mine if shard_facts(folder, number) is None]
    total = sum(len(ranges[number]) for number in mine)
    done = total - sum(len(ranges[number]) for number in missing)
    if on_progress:
        on_progress(done, total)
    batches = [batch for number in missing for batch in cut(ranges[number], options.batch_size)]
    read = partial(read_piece, skip_bad=options.skip_bad)
    with contextlib.closing(read_ahead(dataset, batches, read, num_workers=options.num_workers)) as pieces:
        for number in missing:
            before = set(_bad_files(dataset)), getattr(dataset, "num_replaced", 0)
            tensors: list[dict[str, Tensor]] = []
            for batch in cut(ranges[number], options.batch_size):
                tensors.append(encode_piece(encoder, next(pieces), options))
                done += len(batch)
                if on_progress:
                    on_progress(done, total)
            found = {name: why for name, why in sorted(_bad_files(dataset).items()) if name not in before[0]}
            num_replaced = getattr(dataset, "num_replaced", 0) - before[1]
            write_shard(folder, number, tensors, len(dataset.class_names), found, num_replaced)
    return write_manifest(folder, job, len(ranges))


def describe_job(dataset: Dataset, encoder: Encoder, options: EncodeOptions) -> dict[str, Any]:
    """All that decides what the shards hold, JSON-able."""
    channels, image_size, _ = dataset.image_shape
    if isinstance(dataset, DrawnDataset):
        raise DataError(f"{dataset.fingerprint} are latents already; encode the images that they were made from")
    if channels != encoder.in_channels:
        raise DataError(
            f"the images have {channels} channel(s) and the encoder {encoder.name} takes {encoder.in_channels}; "
            f"set --channels, or take another encoder"
        )
    try:
        check_image_size(image_size, downsample_factor=encoder.downsample_factor)
    except ValueError as error:
        raise DataError(str(error)) from None
    return {
        "format": FORMAT,
        "encoder": encoder.describe(),
        "source": {"fingerprint": dataset.fingerprint, "num_images": len(dataset)},
        "class_names": list(dataset.class_names),
        "image_size": image_size,
        "channels": channels,
        "crop": resize_of(dataset.fingerprint),
        "latent_shape": list(encoder.latent_shape(image_size)),
        "deviations": encoder.has_deviations,
        "flips": options.flips or not encoder.has_deviations,
        "dtype": options.dtype if encoder.has_deviations else "uint8",
        "shard_images": options.shard_images,
        "skip_bad": options.skip_bad,
    }


def claim(folder: Path, job: dict[str, Any]) -> None:
    """Write the job into the folder, or compare it with the one that is there."""
    text = json.dumps(job, indent=1)
    path = folder / JOB
    if not path.exists():
        part = _part(path)
        part.write_text(text + "\n", encoding="utf-8")
        try:
            os.link(part, path)  # unlike a rename, fails where another rank was quicker
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            os.replace(part, path)
        part.unlink(missing_ok=True)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} isn't JSON ({error}); remove {folder} to start over") from error
    wanted = json.loads(text)
    differing = [
        f"{key}: {found.get(key)!r} there, {wanted.get(key)!r} now"
        for key in wanted | found
        if _same(found.get(key)) != _same(wanted.get(key))
    ]
    if differing:
        raise DataError(f"{folder} holds another encoding ({'; '.join(differing)}); name another --out, or remove it")


def _same(value: Any) -> Any:
    """What is compared: an encoder is its hash, wherever it lies."""
    return {key: item for key, item in value.items() if key != "spec"} if isinstance(value, dict) else value


def cut(indices: range, size: int) -> list[range]:
    """``indices`` cut into ranges of ``size``, the last one shorter.

    Example:
        >>> cut(range(5, 12), 3)
        [range(5, 8), range(8, 11), range(11, 12)]
    """
    return [range(start, min(start + size, indices.stop)) for start in range(indices.start, indices.stop, size)]


def shard_facts(folder: Path, number: int) -> dict[str, Any] | None:
    """What a whole shard's JSON says; None where there is no such shard, or its file isn't what the JSON says."""
    path = folder / f"shard-{number:05d}.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        whole = (folder / facts["file"]).stat().st_size == facts["num_bytes"]
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return None
    return facts if whole else None


def read_piece(dataset: Dataset, indices: range, *, skip_bad: bool) -> Piece:
    """Images, labels and indices of a few images of the source; with ``skip_bad`` without the bad ones.

    Raises:
        BadImageError: without ``skip_bad``.
    """
    wanted = np.array(indices, dtype=np.int64)
    try:
        return *dataset.fetch(wanted), wanted
    except BadImageError:
        if not skip_bad:
            raise
    none = np.empty((0, *dataset.image_shape), np.uint8), np.empty(0, np.int64), np.empty(0, np.int64)
    good = [none]
    for index in wanted:
        with contextlib.suppress(BadImageError):  # the dataset notes it
            good.append((*dataset.fetch(np.array([index])), np.array([index])))
    images, labels, kept = (np.concatenate(parts) for parts in zip(*good, strict=True))
    return images, labels, kept


def encode_piece(encoder: Encoder, piece: Piece, options: EncodeOptions) -> dict[str, Tensor]:
    """The tensors of a few images, as :mod:`rowdit.data.latents` lists them."""
    images, labels, indices = piece
    tensors = {"labels": torch.from_numpy(labels), "indices": torch.from_numpy(indices)}
    if not encoder.has_deviations:
        return tensors | {"pixels": torch.from_numpy(images)}
    dtype = torch.float16 if options.dtype == "float16" else torch.float32
    for suffix, pixels in (("", images), ("_flipped", images[..., ::-1].copy()))[: 1 + options.flips]:
        means, deviations = encoder.encode(torch.from_numpy(pixels))
        _check_finite(means, deviations, indices, dtype)
        tensors |= {f"means{suffix}": means.to(dtype), f"deviations{suffix}": deviations.to(dtype)}
    return tensors


def write_shard(
    folder: Path,
    number: int,
    pieces: list[dict[str, Tensor]],
    num_classes: int,
    bad_files: dict[str, str],
    num_replaced: int,
) -> None:
    """Write the pieces as one file, which is there whole or not at all, and then describe it beside."""
    tensors = {name: torch.cat([piece[name] for piece in pieces]).contiguous() for name in pieces[0]}
    name = f"shard-{number:05d}"
    path = folder / f"{name}.safetensors"
    for left in folder.glob(f"{name}.*.part-*"):  # of a killed process: each shard has one maker
        left.unlink(missing_ok=True)
    part = _part(path)
    save_file(tensors, part)
    with open(part, "rb+") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    facts = {
        "file": path.name,
        "num_images": len(tensors["labels"]),
        "num_bytes": part.stat().st_size,
        "sha256": digest,
        "class_counts": np.bincount(tensors["labels"].numpy(), minlength=num_classes).tolist(),
        "bad_files": bad_files,
        "num_replaced": num_replaced,
    }
    os.replace(part, path)
    _write_json(folder / f"{name}.json", facts)


def _bad_files(dataset: Dataset) -> dict[str, str]:
    return getattr(dataset, "bad_files", {})  # sources without files have none


def _check_finite(means: Tensor, deviations: Tensor, indices: np.ndarray, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for name, values in (("mean", means), ("deviation", deviations)):
        good = (values.abs() <= largest).flatten(1).all(dim=1)  # False for NaN too
        if not bool(good.all()):
            first = int(indices[(~good).numpy()][0])
            raise DataError(
                f"the encoder's {name} of image {first} isn't finite as {dtype}; use --dtype float32, or check the "
                f"encoder"
            )


def write_manifest(folder: Path, job: dict[str, Any], num_shards: int) -> bool:
    """Write the manifest if every shard is whole; returns whether it is."""
    shards = [shard_facts(folder, number) for number in range(num_shards)]
    if any(facts is None for facts in shards):
        return False
    whole = [facts for facts in shards if facts is not None]
    manifest = job | {
        "num_images": sum(facts["num_images"] for facts in whole),
        "class_counts": np.sum([facts["class_counts"] for facts in whole], axis=0).tolist(),
        "bad_files": dict(sorted(bad for facts in whole for bad in facts["bad_files"].items())),
        "num_replaced": sum(facts["num_replaced"] for facts in whole),
        "shards": [{key: facts[key] for key in ("file", "num_images", "num_bytes", "sha256")} for facts in whole],
    }
    _write_json(folder / MANIFEST, manifest)
    return True


def verify(folder: Path) -> dict[str, Any]:
    """Read every shard of a split and compare its hash; returns the manifest.

    Raises:
        DataError: names the first shard that isn't as the manifest says. The shard's JSON is removed, so that the same
            ``rowdit encode`` makes it again.
    """
    try:
        return Latents(folder, check_hashes=True).manifest
    except DataError as error:
        for facts in sorted(folder.glob("shard-*.json")):
            if str(facts.with_suffix(".safetensors")) in str(error):
                facts.unlink()
        raise


def _write_json(path: Path, data: dict[str, Any]) -> None:
    part = _part(path)
    with open(part, "w", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part-{os.getpid()}")
