"""Where images come from, and in which order.

:func:`open_dataset` opens any source by name; :func:`batch_at` gives the batch that belongs to a place in training. The
order, the flips and the share of each rank follow from (seed, images seen) alone, so nothing here keeps a state that a
checkpoint would have to hold.
"""

from __future__ import annotations

from typing import Any, Literal

from rowdit.data import fashion_mnist
from rowdit.data.batch import (
    ArrayDataset,
    Batch,
    DataError,
    Dataset,
    DrawnDataset,
    check_image_size,
    check_labels,
    model_input,
    to_float,
    to_uint8,
)
from rowdit.data.image_folder import ImageFolder, open_split
from rowdit.data.index import batch_at, stream_indices
from rowdit.data.loader import Loader

__all__ = [
    "ArrayDataset",
    "Batch",
    "DataError",
    "Dataset",
    "DrawnDataset",
    "ImageFolder",
    "Loader",
    "batch_at",
    "check_image_size",
    "check_labels",
    "model_input",
    "open_dataset",
    "stream_indices",
    "to_float",
    "to_uint8",
]


def open_dataset(
    spec: str, split: Literal["train", "reference"] = "train", image_size: int | None = None, **options: Any
) -> Dataset:
    """Open a dataset by its name.

    Args:
        spec: ``"bundled"``, the subset of Fashion-MNIST in the package; ``"fashion-mnist"``, the full set where it is
            found, or ``"fashion-mnist:FOLDER"``; ``"folder:PATH"``, a folder with a sub-folder for each class, with or
            without ``train`` and ``reference`` above them (:func:`rowdit.data.image_folder.open_split`).
        split: ``"train"`` or ``"reference"``.
        image_size: pixels a side; None is the native size, which a folder hasn't.
        **options: handed to the source: :class:`ImageFolder` has many.

    Returns:
        The dataset; :class:`Dataset` says what it offers.

    Raises:
        DataError: an unknown source or split, or data that is missing or can't be used.
        ValueError: an option out of its range.

    Example:
        >>> open_dataset("bundled", split="reference").image_shape
        (1, 28, 28)
    """
    if split not in fashion_mnist.SPLITS:
        raise DataError(f"split {split!r} is not one of {', '.join(fashion_mnist.SPLITS)}")
    kind, _, place = spec.partition(":")
    size = fashion_mnist.SIZE if image_size is None else image_size
    if kind == "bundled" and not place:
        return fashion_mnist.bundled(split, size, **options)
    if kind == "fashion-mnist":
        return fashion_mnist.full(place or None, split, size, **options)
    if kind == "folder" and place:
        if image_size is None:
            raise DataError(f"{spec} needs an image_size, for its images may be of any")
        return open_split(place, split, image_size, **options)
    raise DataError(
        f"unknown dataset {spec!r}: it is one of 'bundled', 'fashion-mnist', 'fashion-mnist:FOLDER' and 'folder:PATH'"
    )
