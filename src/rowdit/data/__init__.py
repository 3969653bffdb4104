"""Where images come from, and in which order.

:func:`open_dataset` opens any source by name; :func:`batch_at` gives the batch that belongs to a place in training. The
order, the flips and the share of each rank follow from (seed, images seen) alone, so nothing here keeps a state that a
checkpoint would have to hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rowdit.data import fashion_mnist
from rowdit.data.batch import (
    ArrayDataset,
    Batch,
    DataError,
    Dataset,
    check_image_size,
    check_labels,
    to_float,
    to_uint8,
)
from rowdit.data.index import batch_at, stream_indices

__all__ = [
    "ArrayDataset",
    "Batch",
    "DataError",
    "Dataset",
    "batch_at",
    "check_image_size",
    "check_labels",
    "open_dataset",
    "stream_indices",
    "to_float",
    "to_uint8",
]


def open_dataset(spec: str, split: str = "train", image_size: int | None = None, **options: Any) -> Dataset:
    """Open a dataset by its name.

    Args:
        spec: ``"bundled"``, the subset of Fashion-MNIST in the package; ``"fashion-mnist"``, the full set where it is
            found, or ``"fashion-mnist:FOLDER"``.
        split: ``"train"`` or ``"reference"``.
        image_size: pixels a side; None is the native size.
        **options: handed to the source.

    Returns:
        The dataset; :class:`Dataset` says what it offers.

    Raises:
        ValueError: an unknown source, split or size.
        DataError: data that is missing or can't be used.

    Example:
        >>> open_dataset("bundled", split="reference").image_shape
        (1, 28, 28)
    """
    kind, _, place = spec.partition(":")
    size = fashion_mnist.SIZE if image_size is None else image_size
    if kind == "bundled" and not place:
        return fashion_mnist.bundled(split, size, **options)
    if kind == "fashion-mnist":
        return fashion_mnist.full(Path(place) if place else None, split, size, **options)
    raise ValueError(f"unknown dataset {spec!r}")
