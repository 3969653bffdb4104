"""Where images come from, and in which order.

:func:`open_dataset` opens any source by name; :func:`batch_at` gives the batch that belongs to a place in training. The
order, the flips and the share of each rank follow from (seed, images seen) alone, so nothing here keeps a state that a
checkpoint would have to hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

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
from rowdit.data.decode import BadImageError
from rowdit.data.encoded import BadImages
from rowdit.data.hub import HubImages, open_hub
from rowdit.data.image_folder import ImageFolder, open_split
from rowdit.data.index import batch_at, stream_indices
from rowdit.data.latents import Latents, open_latents
from rowdit.data.loader import Loader
from rowdit.data.parquet import ParquetImages, open_parquet
from rowdit.data.tar_shards import TarShards, open_tar

__all__ = [
    "ArrayDataset",
    "BadImageError",
    "Batch",
    "DataError",
    "Dataset",
    "DrawnDataset",
    "HubImages",
    "ImageFolder",
    "Latents",
    "Loader",
    "ParquetImages",
    "TarShards",
    "batch_at",
    "check_image_size",
    "check_labels",
    "check_num_classes",
    "model_input",
    "open_dataset",
    "stream_indices",
    "to_float",
    "to_uint8",
]

Split = Literal["train", "reference"]

# source -> what opens one of its splits: (place, split, image_size, channels=, bad_images=, **options)
OPENERS: dict[str, Callable[..., Dataset]] = {
    "folder": open_split,
    "tar": open_tar,
    "parquet": open_parquet,
    "hf": open_hub,
}
SPECS = (
    *("bundled", "fashion-mnist", "fashion-mnist:FOLDER", "folder:PATH", "tar:PATTERN", "parquet:PATTERN", "hf:NAME"),
    "latents:PATH",
)


def open_dataset(
    spec: str,
    split: Split = "train",
    image_size: int | None = None,
    *,
    channels: int | None = None,
    bad_images: BadImages = "error",
    num_classes: int | None = None,
    image_key: str | None = None,
    label_key: str | None = None,
    **options: Any,
) -> Dataset:
    """Open a dataset by its name.

    Args:
        spec: ``"bundled"``, the subset of Fashion-MNIST in the package; ``"fashion-mnist"``, the full set where it is
            found, or ``"fashion-mnist:FOLDER"``; ``"folder:PATH"``, a folder with a sub-folder for each class, with or
            without ``train`` and ``reference`` above them (:func:`rowdit.data.image_folder.open_split`);
            ``"tar:PATTERN"`` (:mod:`rowdit.data.tar_shards`), ``"parquet:PATTERN"`` (:mod:`rowdit.data.parquet`),
            ``"hf:NAME"`` (:mod:`rowdit.data.hub`); ``"latents:PATH"``, what ``rowdit encode`` wrote
            (:mod:`rowdit.data.latents`).
        split: ``"train"`` or ``"reference"``.
        image_size: pixels a side (of latents: their own side); None is the native size, which a folder hasn't.
        channels: 3 for RGB, 1 for grey; None is what the source has, RGB where images may be of any kind.
        bad_images: what becomes of images that can't be used (:mod:`rowdit.data.encoded`). Sources that are whole from
            the start, the bundled ones and latents, have none.
        num_classes: how many classes the labels of tar shards, Parquet and Hugging Face datasets are of; None takes
            the names that come with them, or the largest label. Folders and latents name their classes.
        image_key, label_key: of the same sources, which member or column is the image and which the label; None is the
            usual one.
        **options: handed to the source: :class:`ImageFolder` has many.

    Returns:
        The dataset; :class:`Dataset` says what it offers.

    Raises:
        DataError: an unknown source or split, a size or number out of its range, or data that is missing or can't be
            used.
        ValueError: another option out of its range.

    Example:
        >>> open_dataset("bundled", split="reference").image_shape
        (1, 28, 28)
    """
    if split not in get_args(Split):
        raise DataError(f"split {split!r} is not one of {', '.join(get_args(Split))}")
    if channels not in (None, 1, 3) and not spec.startswith("latents:"):
        raise DataError(f"channels {channels} must be 3 for RGB or 1 for grey")
    for name, value in (("image_size", image_size), ("num_classes", num_classes)):
        if value is not None and value < 1:
            raise DataError(f"{name} {value} must be >= 1")
    kind, _, place = spec.partition(":")
    if kind in OPENERS and place:
        if image_size is None:
            raise DataError(f"{spec} needs an image_size, for its images may be of any")
        options |= {"channels": 3 if channels is None else channels, "bad_images": bad_images}
        keys = {"image_key": image_key, "label_key": label_key}
        if kind != "folder":
            options |= keys | {"num_classes": num_classes}
        else:
            _refuse(spec, keys)
        return OPENERS[kind](place, split, image_size, **options)
    _refuse(spec, {"image_key": image_key, "label_key": label_key})
    size = fashion_mnist.SIZE if image_size is None else image_size
    dataset: Dataset
    if kind == "bundled" and not place:
        dataset = fashion_mnist.bundled(split, size, **options)
    elif kind == "fashion-mnist":
        dataset = fashion_mnist.full(place or None, split, size, **options)
    elif kind == "latents" and place:
        dataset = open_latents(place, split, image_size, **options)
    else:
        raise DataError(f"unknown dataset {spec!r}: it is one of {', '.join(SPECS)}")
    if channels not in (None, dataset.image_shape[0]):
        raise DataError(f"{spec} has {dataset.image_shape[0]} channel(s), not {channels}; leave channels out")
    return dataset


def check_num_classes(dataset: Dataset, spec: str, num_classes: int | None) -> None:
    """Refuses a number of classes that the source, which names its own, contradicts.

    Raises:
        DataError: naming both numbers.
    """
    if num_classes not in (None, dataset.num_classes):
        raise DataError(f"{spec} has {dataset.num_classes} classes, not {num_classes}; leave num_classes out")


def _refuse(spec: str, keys: dict[str, str | None]) -> None:
    for name, value in keys.items():
        if value is not None:
            raise DataError(f"{spec} has no keys or columns to choose from; leave out {name} (it is {value!r})")
