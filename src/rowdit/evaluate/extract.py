"""Features of images, in parts on disk: shared by any number of ranks, kept through a kill, the same for all of them.

    FOLDER/part-00012.safetensors     features of images 12 * 500 and on, and the hash of their pixels

Parts don't depend on the number of ranks, and what is computed from them is computed in their order: so is the score.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowdit.evaluate.features import FeatureNetwork
from rowdit.evaluate.fingerprint import canonical_json, digest, load_tensors, save_tensors
from rowdit.evaluate.images import ImageSource
from rowdit.evaluate.ranks import Ranks

FORMAT = "rowdit.features/1"
PART_IMAGES = 500

Progress = Callable[[int, int], None]  # (images of this rank done, images of this rank in all)


@dataclass(frozen=True)
class Extracted:
    """Features and what they are of.

    Args:
        features: (N, D) float32 on the CPU, in the order of the images.
        dataset: the line that stands for the images: their number, shape, and the hash of their pixels.
        image_shape: (C, H, W).
        network: its fingerprint.
    """

    features: Tensor
    dataset: str
    image_shape: tuple[int, int, int]
    network: dict[str, Any]


def extract(
    source: ImageSource,
    indices: np.ndarray,
    network: FeatureNetwork,
    folder: Path,
    *,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Extracted | None:
    """Features of the images with these numbers. A collective over the ranks.

    Args:
        source: the images.
        indices: (N,) their numbers, N >= 1.
        network: the feature network.
        folder: keeps the parts, in a sub-folder that is named after what they are of. Seen by all ranks.
        ranks: the processes that share the work; None is this one alone.
        progress: called after every part.

    Returns:
        The features on rank 0, None on the others.

    Raises:
        ImagesError, DataError: an image can't be used.
        OSError: a part can't be written, on a full disk, say. The same call goes on from there.
    """
    ranks = ranks or Ranks()
    key = {
        "images": source.signature,
        "indices": hashlib.sha256(np.ascontiguousarray(indices, dtype="<i8").tobytes()).hexdigest(),
        "network": network.fingerprint(),
    }
    home = folder / f"features-{network.name}-{digest(key)[:16]}"
    numbers = range(-(-len(indices) // PART_IMAGES))
    missing = ranks.from_first([n for n in numbers if not _part(home, n).is_file()] if ranks.is_first else None)
    own = ranks.share(missing)
    for done, number in enumerate(own, start=1):
        images = source.fetch(indices[number * PART_IMAGES : (number + 1) * PART_IMAGES])
        features = network(torch.from_numpy(images)).cpu()
        pixels = hashlib.sha256(np.ascontiguousarray(images).data).hexdigest()
        save_tensors(_part(home, number), {"features": features}, FORMAT, key | {"part": number, "pixels": pixels})
        if progress is not None:
            progress(done * PART_IMAGES, len(own) * PART_IMAGES)
    ranks.wait()
    return _collect(home, numbers, key, source, network, len(indices)) if ranks.is_first else None


def _collect(
    home: Path, numbers: range, key: dict[str, Any], source: ImageSource, network: FeatureNetwork, num_images: int
) -> Extracted:
    parts, pixels = [], hashlib.sha256()
    for number in numbers:
        tensors, fingerprint = load_tensors(_part(home, number), FORMAT)
        same = canonical_json({name: fingerprint.get(name) for name in key}) == canonical_json(key)
        length = min(PART_IMAGES, num_images - number * PART_IMAGES)
        if not same or tuple(tensors["features"].shape) != (length, network.dim):
            raise ValueError(f"{_part(home, number)} holds other features; delete {home}, and it will be made again")
        parts.append(tensors["features"])
        pixels.update(fingerprint["pixels"].encode())
    if source.identity and num_images == len(source):
        identity = source.identity
    elif source.identity:
        identity = f"{source.identity}:{num_images} of them:sha256-{pixels.hexdigest()[:16]}"
    else:
        shape = "x".join(map(str, (num_images, *source.image_shape)))
        identity = f"images:{shape}:{source.how}:sha256-{pixels.hexdigest()[:16]}"
    return Extracted(torch.cat(parts), identity, source.image_shape, network.fingerprint())


def _part(home: Path, number: int) -> Path:
    return home / f"part-{number:05d}.safetensors"


def choose(num_there: int, num_wanted: int | None, what: str, *, first: bool = False) -> np.ndarray:
    """Which images to take: all; the first; or a random draw in their order, for a folder is sorted by its classes.

    Args:
        num_there: how many there are.
        num_wanted: how many to take; None takes all.
        what: they are, for the message.
        first: the first ones, for samples, whose classes take turns.

    Raises:
        ValueError: there aren't so many, or fewer than 2 are wanted.
    """
    from rowdit import streams

    num_wanted = num_there if num_wanted is None else num_wanted
    if not 2 <= num_wanted <= num_there:
        raise ValueError(f"{num_wanted} images of {what} were asked for; it must be 2..{num_there}, what is there")
    if first or num_wanted == num_there:
        return np.arange(num_wanted)
    return np.sort(streams.permutation(0, "evaluated_images", 0, num_there)[:num_wanted])
