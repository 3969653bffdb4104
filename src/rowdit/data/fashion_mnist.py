"""Fashion-MNIST: the subset that ships with the package, and the full set where there is one.

70,000 grey 28 x 28 photographs of clothes in ten classes (Xiao, Rasul and Vollgraf, arXiv:1708.07747; MIT licence, its
notice lies beside the bundled files). The bundled subset is the first 1,200 images of each class of the training set
and the first 200 of each class of the test set, as :mod:`rowdit.data.make_bundled` takes them; ``split="reference"`` is
the test set in both.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import zlib
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np
from PIL import Image

from rowdit.data.batch import ArrayDataset, DataError, check_labels, fingerprint
from rowdit.data.resize import resize_rule, resize_square

CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
SIZE = 28  # pixels a side, as published
SPLITS = ("train", "reference")
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist

# Bundled sheets: (file, images in a row of the sheet, images of a class, sha256 of the pixels in the images' order).
SHEETS = {
    "train": ("fashion_mnist_train.png", 60, 1200, "42c98d1edf0167333bae4d32eebf75ce2f0ca8a72fadf723d1e18354bca8d538"),
    "reference": (
        "fashion_mnist_reference.png",
        40,
        200,
        "a9a3fef60943d6c23d218c668ff2a8e2537003dbf7a653b962a95bcf38a209bb",
    ),
}

# The full set: of each split the images' and the labels' file.
IDX_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "reference": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
# sha256 of what the gzip files hold. (Debian's package compresses them anew, so the files themselves differ.)
IDX_SHA256 = {
    "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_MAX_IDX_BYTES = 1 << 30  # no idx file of this kind is larger; a damaged gzip file might unpack to anything


def bundled(split: str = "train", image_size: int = SIZE) -> ArrayDataset:
    """The subset that ships with the package: 12,000 training or 2,000 reference images, balanced over ten classes.

    Image i is of class i % 10, so every beginning of the dataset is balanced too.

    Args:
        split: ``"train"`` or ``"reference"``.
        image_size: pixels a side, >= 1. 28 is native; see :mod:`rowdit.data.resize` for the others.

    Returns:
        A dataset of (1, image_size, image_size) images.

    Raises:
        ValueError: another split or size.
        DataError: the installed file is damaged.

    Example:
        >>> dataset = bundled("reference", image_size=14)
        >>> len(dataset), dataset.image_shape, dataset.class_names[9]
        (2000, (1, 14, 14), 'Ankle boot')
    """
    _check_split(split)
    images = _bundled_images(split)
    labels = np.arange(len(images), dtype=np.int64) % len(CLASS_NAMES)
    return _dataset(f"fashion-mnist-bundled/{split}", images, labels, SHEETS[split][3], image_size)


def full(
    folder: str | os.PathLike[str] | None = None, split: str = "train", image_size: int = SIZE, check: bool = True
) -> ArrayDataset:
    """The full set: 60,000 training or 10,000 reference images in their published order.

    Args:
        folder: holds the published files (``train-images-idx3-ubyte.gz`` and the three others), unpacked ones too.
            None looks where Debian's package ``dataset-fashion-mnist`` puts them, then where
            ``rowdit data get fashion-mnist`` does.
        split: ``"train"`` or ``"reference"`` (the published test set).
        image_size: pixels a side, as for :func:`bundled`.
        check: refuse content that isn't the published one. Without it any idx files of 28 x 28 images in ten classes
            with these names will do (MNIST, KMNIST); their own hash is in the fingerprint.

    Returns:
        A dataset of (1, image_size, image_size) images.

    Raises:
        ValueError: another split or size.
        DataError: files that are missing, damaged, of another format or not the published ones.
    """
    _check_split(split)
    found = find_full() if folder is None else Path(folder).expanduser()
    if found is None:
        raise DataError(
            f"Fashion-MNIST's full set is neither in {DEBIAN_FOLDER} (Debian package dataset-fashion-mnist) nor in "
            f"{cache_folder()}; fetch it with 'rowdit data get fashion-mnist', name its folder, or use 'bundled'"
        )
    images_file, labels_file = IDX_FILES[split]
    images, images_sha256 = read_idx(found, images_file, num_dims=3, check=check)
    labels, labels_sha256 = read_idx(found, labels_file, num_dims=1, check=check)
    if images.shape[1:] != (SIZE, SIZE) or len(images) != len(labels):
        raise DataError(
            f"{found}: {images_file} holds images of shape {images.shape} and {labels_file} {len(labels)} labels; "
            f"expected (N, {SIZE}, {SIZE}) and N"
        )
    digest = hashlib.sha256(f"{images_sha256} {labels_sha256}".encode()).hexdigest()
    check_labels(labels, len(CLASS_NAMES), str(found / labels_file))
    return _dataset(f"fashion-mnist/{split}", images[:, None], labels, digest, image_size)


def find_full() -> Path | None:
    """The first folder that holds all four files of the full set: Debian's, or the cache."""
    for folder in (DEBIAN_FOLDER, cache_folder()):
        if all((folder / name).is_file() for name in IDX_SHA256):
            return folder
    return None


def cache_folder() -> Path:
    """Where downloads are kept: ``$XDG_CACHE_HOME/rowdit/fashion-mnist``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "rowdit" / "fashion-mnist"


def read_idx(folder: Path, name: str, num_dims: int, check: bool = True) -> tuple[np.ndarray, str]:
    """One idx file of unsigned bytes, packed or not.

    The format (http://yann.lecun.com/exdb/mnist): bytes 0 0, type 8, number of dimensions; the dimensions as big-endian
    32-bit integers; the values in C order.

    Args:
        folder: where it lies.
        name: its published name, ending in ``.gz``; without a file of that name, the one without ``.gz`` is read.
        num_dims: 3 for images, 1 for labels.
        check: compare the content's sha256 with the published one.

    Returns:
        The values, uint8 and read-only, and the sha256 of the content.

    Raises:
        DataError: the file is missing, damaged, of another format or (with ``check``) not the published one.
    """
    path = folder / name
    plain = folder / name.removesuffix(".gz")
    if not path.is_file():
        if not plain.is_file():
            raise DataError(f"{path} doesn't exist; the full set is four files: {', '.join(IDX_SHA256)}")
        path = plain
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            content = file.read(_MAX_IDX_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} can't be read ({error}); fetch it anew") from error
    shape = _idx_shape(content, path, num_dims)
    sha256 = hashlib.sha256(content).hexdigest()
    if check and sha256 != IDX_SHA256[name]:
        raise DataError(
            f"{path} isn't the published file: the sha256 of its content is {sha256}, not {IDX_SHA256[name]}; fetch it "
            f"anew, or open it with check=False if another set is meant"
        )
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dims).reshape(shape), sha256


def _idx_shape(content: bytes, path: Path, num_dims: int) -> tuple[int, ...]:
    header = 4 + 4 * num_dims
    if len(content) < header or content[:4] != bytes((0, 0, 8, num_dims)):
        raise DataError(
            f"{path} isn't an idx file of unsigned bytes with {num_dims} dimension(s): it begins with "
            f"{content[:4].hex(' ') or 'nothing'}, not 00 00 08 0{num_dims}"
        )
    shape = struct.unpack(f">{num_dims}I", content[4:header])
    if len(content) != header + math.prod(shape) or 0 in shape:
        raise DataError(
            f"{path} is damaged: its header says {shape}, that is {math.prod(shape)} bytes, but "
            f"{len(content) - header} follow; fetch it anew"
        )
    return shape


@lru_cache(maxsize=2)  # one for each split: decoding takes about 0.1 s
def _bundled_images(split: str) -> np.ndarray:
    """(N, 1, 28, 28) uint8, cut from the sheet and checked."""
    name, num_columns, _, sha256 = SHEETS[split]
    asset = resources.files("rowdit.data") / "assets" / name
    try:
        with asset.open("rb") as file, Image.open(file) as sheet:
            pixels = np.asarray(sheet)
        num_rows = pixels.shape[0] // SIZE
        squares = pixels.reshape(num_rows, SIZE, num_columns, SIZE).swapaxes(1, 2)
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{asset}: the bundled images can't be read ({error}); reinstall the package") from error
    images = np.ascontiguousarray(squares).reshape(-1, 1, SIZE, SIZE)
    if hashlib.sha256(images.data).hexdigest() != sha256:
        raise DataError(f"{asset}: the bundled images have changed (wrong sha256); reinstall the package")
    images.setflags(write=False)
    return images


def _dataset(name: str, images: np.ndarray, labels: np.ndarray, digest: str, image_size: int) -> ArrayDataset:
    resized = resize_square(images, image_size)
    shape = (1, image_size, image_size)
    mark = fingerprint(name, shape, len(images), digest, resize=resize_rule(SIZE, image_size))
    return ArrayDataset(resized, labels, CLASS_NAMES, name=name, fingerprint=mark)


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
