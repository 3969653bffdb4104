"""Which sample comes when: a function of (seed, images seen) and of nothing else.

The training stream is endless. Position p lies in epoch p // N, and each epoch is a new permutation of the N samples,
so no sample comes twice in an epoch and none is left out. Batch size, number of ranks and restarts only cut the stream
at other places.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from rowdit import streams
from rowdit.data.batch import Batch, Dataset, to_float


def stream_indices(seed: int, start: int, count: int, num_samples: int) -> np.ndarray:
    """The samples at positions start .. start + count - 1 of the stream.

    Args:
        seed: of the stream ``"order"``.
        start: >= 0, the first position: how many images were seen before it.
        count: >= 0; may run over any number of epochs.
        num_samples: >= 1, the size of the dataset.

    Returns:
        (count,) int64 in 0 .. num_samples - 1.

    Raises:
        ValueError: an argument out of its range.

    Example:
        >>> both = stream_indices(0, 0, 20, 10)
        >>> sorted(both[:10].tolist()) == sorted(both[10:].tolist()) == list(range(10))
        True
        >>> (stream_indices(0, 7, 6, 10) == both[7:13]).all().item()
        True
    """
    if start < 0 or count < 0:
        raise ValueError(f"start {start} and count {count} must be >= 0")
    if num_samples < 1:
        raise ValueError(f"num_samples {num_samples} must be >= 1: the dataset is empty")
    pieces = [np.empty(0, np.int64)]
    while count:
        epoch, offset = divmod(start, num_samples)
        piece = _epoch_order(seed, epoch, num_samples)[offset : offset + count]
        pieces.append(piece)
        start, count = start + len(piece), count - len(piece)
    return np.concatenate(pieces)


def batch_at(
    dataset: Dataset,
    *,
    seed: int,
    images_seen: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    flip: bool = False,
) -> Batch:
    """The batch that follows ``images_seen`` images, or this rank's share of it.

    For micro-batches, call it with the micro-batch's size and advance ``images_seen``: the stream is the same.

    Args:
        dataset: where the images come from.
        seed: of the order, and of the flips.
        images_seen: >= 0, images that all ranks together saw before this batch.
        batch_size: >= 1, over all ranks; a multiple of ``world_size``.
        rank: takes the contiguous share ``rank`` of ``world_size``, so the ranks' shares in their order are the batch.
        world_size: number of ranks.
        flip: mirror each image left to right with probability 1/2 (stream ``"flip"``, by position, so a sample is
            flipped anew in each epoch).

    Returns:
        A Batch of batch_size / world_size images.

    Raises:
        ValueError: an argument out of its range, or a batch that the ranks can't share evenly.
    """
    if batch_size < 1 or images_seen < 0:
        raise ValueError(f"batch_size {batch_size} must be >= 1 and images_seen {images_seen} >= 0")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} must be in 0..world_size - 1, and world_size {world_size} >= 1")
    if batch_size % world_size:
        raise ValueError(
            f"a batch of {batch_size} can't be shared evenly by {world_size} ranks; "
            f"nearest batch sizes: {_nearest_multiples(batch_size, world_size)}"
        )
    share = batch_size // world_size
    start = images_seen + rank * share
    images, labels = dataset.fetch(stream_indices(seed, start, share, len(dataset)))
    positions = torch.arange(start, start + share, dtype=torch.int64)
    if flip:
        mirrored = (streams.uniform(seed, "flip", positions) < 0.5).numpy()
        images = np.where(mirrored[:, None, None, None], images[..., ::-1], images)
    return Batch(images=to_float(images), labels=torch.from_numpy(labels), positions=positions)


@lru_cache(maxsize=2)  # a batch may straddle two epochs
def _epoch_order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    return streams.permutation(seed, "order", epoch, num_samples)


def _nearest_multiples(size: int, multiple: int) -> str:
    below = size // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"
