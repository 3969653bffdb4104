"""Which sample comes when: a function of (seed, images seen) and of nothing else.

The training stream is endless. Position p lies in epoch p // N, and each epoch is a new permutation of the N samples,
so no sample comes twice in an epoch and none is left out. Batch size, number of ranks and restarts only cut the stream
at other places.

The permutation is uniform, but where samples can only be read in blocks (row groups of Parquet files): there the blocks
are permuted, and samples within windows of ``Blocks.window`` blocks, so that a reader holds that many blocks at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from rowdit import streams
from rowdit.data.batch import Batch, Dataset, DrawnDataset, to_float


@dataclass(frozen=True, eq=False)
class Blocks:
    """Runs of samples that are read as one.

    Args:
        starts: (num_blocks + 1,) rising integers, 0 to the number of samples: block b begins at starts[b].
        window: >= 1, how many blocks are mixed.
    """

    starts: np.ndarray
    window: int


def stream_indices(seed: int, start: int, count: int, num_samples: int, blocks: Blocks | None = None) -> np.ndarray:
    """The samples at positions start .. start + count - 1 of the stream.

    Args:
        seed: of the stream ``"order"``.
        start: >= 0, the first position: how many images were seen before it.
        count: >= 0; may run over any number of epochs.
        num_samples: >= 1, the size of the dataset.
        blocks: of the dataset, where it has them.

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
        piece = _epoch_order(seed, epoch, num_samples, blocks)[offset : offset + count]
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
        A Batch of batch_size / world_size images: of pixels ``to_float``, of latents what :class:`DrawnDataset` draws.

    Raises:
        ValueError: an argument out of its range, or a batch that the ranks can't share evenly.
    """
    check_share(batch_size, images_seen, rank, world_size)
    share = batch_size // world_size
    start = images_seen + rank * share
    indices = stream_indices(seed, start, share, len(dataset), getattr(dataset, "blocks", None))
    positions = torch.arange(start, start + share, dtype=torch.int64)
    if isinstance(dataset, DrawnDataset):
        images, labels = dataset.draw(indices, positions, seed=seed, flip=flip)
        return Batch(images=images, labels=torch.from_numpy(labels), positions=positions)
    pixels, labels = dataset.fetch(indices)
    if flip:
        rows = np.flatnonzero(streams.uniform(seed, "flip", positions).numpy() < 0.5)
        pixels = pixels.copy()  # the dataset may have given a view of what it keeps
        pixels[rows] = pixels[rows][..., ::-1]
    return Batch(images=to_float(pixels), labels=torch.from_numpy(labels), positions=positions)


def check_share(batch_size: int, images_seen: int, rank: int, world_size: int) -> None:
    """Raise the ValueErrors of :func:`batch_at`."""
    if batch_size < 1 or images_seen < 0:
        raise ValueError(f"batch_size {batch_size} must be >= 1 and images_seen {images_seen} >= 0")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} must be in 0..world_size - 1, and world_size {world_size} >= 1")
    if batch_size % world_size:
        raise ValueError(
            f"a batch of {batch_size} can't be shared evenly by {world_size} ranks; "
            f"nearest batch sizes: {_nearest_multiples(batch_size, world_size)}"
        )


@lru_cache(maxsize=2)  # a batch may straddle two epochs
def _epoch_order(seed: int, epoch: int, num_samples: int, blocks: Blocks | None) -> np.ndarray:
    order = streams.permutation(seed, "order", epoch, num_samples)
    if blocks is None:
        return order
    # Samples sorted by the place of their window, each window in the order of the uniform permutation.
    num_blocks = len(blocks.starts) - 1
    places = np.empty(num_blocks, np.int64)
    places[streams.permutation(seed, "block_order", epoch, num_blocks)] = np.arange(num_blocks)
    windows = np.repeat(places // blocks.window, np.diff(blocks.starts))
    return order[np.argsort(windows[order], kind="stable")]


def _nearest_multiples(size: int, multiple: int) -> str:
    below = size // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"
