"""Images to be scored, from wherever they are: a folder, an npz file, a dataset of `rowdit.data`.

All give (B, C, H, W) uint8 of one size. Nothing is resized or cropped unless `image_size` asks for it, and then as
`rowdit.data.decode` does, which the fingerprint says.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from PIL import Image, UnidentifiedImageError

from rowdit.data import DataError, Dataset, open_dataset
from rowdit.data.decode import read_image
from rowdit.data.image_folder import EXTENSIONS

GREY_MODES = ("1", "L", "I", "F")


class ImagesError(ValueError):
    """The images can't be scored as they are. The message names the file, what is wrong and the way out."""


class ImageSource(Protocol):
    """A finite, ordered set of images of one size.

    Attributes:
        image_shape: (C, H, W).
        signature: a line that changes when the images do, as far as that shows without reading them.
        how: what was done to their pixels, such as "as they are".
        identity: the line that stands for the images in fingerprints, if it is known without reading them.
    """

    @property
    def image_shape(self) -> tuple[int, int, int]: ...

    @property
    def signature(self) -> str: ...

    @property
    def how(self) -> str: ...

    @property
    def identity(self) -> str | None: ...

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray) -> np.ndarray:
        """(B, C, H, W) uint8."""
        ...


class DatasetImages:
    """The images of a `rowdit.data.Dataset`."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.image_shape = dataset.image_shape
        self.signature, self.identity, self.how = dataset.fingerprint, dataset.fingerprint, ""

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: np.ndarray) -> np.ndarray:
        images, _ = self.dataset.fetch(indices)
        if images.dtype != np.uint8:
            raise ImagesError(
                f"{self.signature}: its images are {images.dtype}, latents rather than pixels; name the images that "
                "they were encoded from"
            )
        return images


class FolderImages:
    """All image files below a folder, in the order of their paths.

    Args:
        path: the folder.
        image_size: crop and resize to this many pixels a side; None takes the images as they are, which must then be
            squares of one size.
        channels: 1 or 3; None is what the first image has. Grey images become RGB where it is 3; where it is 1, an
            image in colour is refused.
        limit: take the first so many files as if there were no others; None takes all.

    Raises:
        ImagesError: no folder, or no image in it.
    """

    identity = None

    def __init__(
        self, path: Path, image_size: int | None = None, channels: int | None = None, *, limit: int | None = None
    ) -> None:
        if not path.is_dir():
            raise ImagesError(f"there is no folder {path}")
        self.path, self.image_size = path, image_size
        self.files = sorted(
            file
            for file in path.rglob("*")
            if file.suffix.lower() in EXTENSIONS and not any(p.startswith(".") for p in file.relative_to(path).parts)
        )[:limit]
        if not self.files:
            raise ImagesError(f"{path} holds no images ({', '.join(EXTENSIONS)})")
        with self._open(self.files[0]) as first:
            size, grey = first.size, _is_grey(first)
        if image_size is None and size[0] != size[1]:
            raise ImagesError(f"{self.files[0]} is {_size(size)}, no square; say how large with --image-size")
        self.channels = channels or (1 if grey else 3)
        self.image_shape = (self.channels, image_size or size[0], image_size or size[0])
        self.how = "as they are" if image_size is None else f"centre crop, bicubic to {image_size}"
        stats = [(str(file.relative_to(path)), file.stat()) for file in self.files]
        listing = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
        self.signature = f"folder:{self.how}:{self.channels}:{hashlib.sha256(listing.encode()).hexdigest()}"

    def __len__(self) -> int:
        return len(self.files)

    def fetch(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([self._read(self.files[index]) for index in indices])

    def _read(self, file: Path) -> np.ndarray:
        side = self.image_shape[-1]
        with self._open(file) as image:
            if self.image_size is None and image.size != (side, side):
                raise ImagesError(
                    f"{file} is {_size(image.size)}, but {self.files[0].name} is {_size((side, side))}; all must be of "
                    "one size, or --image-size says how large to make them"
                )
            if self.channels == 1 and not _is_grey(image):
                raise ImagesError(f"{file} is in colour (mode {image.mode}), but {self.files[0].name} is grey")
        return read_image(file, side, channels=self.channels)

    @staticmethod
    def _open(file: Path) -> Image.Image:
        try:
            return Image.open(file)
        except (UnidentifiedImageError, OSError) as error:
            raise ImagesError(f"{file} can't be read as an image ({error}); remove it or make it again") from None


class ArrayImages:
    """Images in an npz or npy file: uint8, (N, H, W, C) as others' evaluators keep them, or (N, C, H, W), C = 1 or 3.

    What isn't compressed is mapped, not loaded, so N isn't bounded by the memory. Nothing is unpickled.

    Args:
        path: of the file.
        key: of the array in an npz; by default "arr_0", or the only one there is.

    Raises:
        ImagesError: it can't be read, or holds something else.
    """

    how, identity = "as they are", None

    def __init__(self, path: Path, key: str | None = None) -> None:
        self.path = path
        array = _open_array(path, key)
        if array.dtype != np.uint8:
            raise ImagesError(
                f"{path}: images of {array.dtype}; they must be uint8 in 0..255. Make them so where they come from "
                "(x in [-1, 1]: round((x + 1) * 127.5)), for no scale can be told from the file"
            )
        if array.ndim != 4 or 0 in array.shape:
            raise ImagesError(f"{path}: shape {array.shape}; images have (N, H, W, C) with C = 1 or 3")
        if array.shape[3] not in (1, 3):
            if array.shape[1] not in (1, 3):
                raise ImagesError(f"{path}: shape {array.shape}; images have (N, H, W, C) with C = 1 or 3")
            array = array.transpose(0, 2, 3, 1)
        self._array_NHWC = array
        _, height, width, channels = array.shape
        self.image_shape = (channels, height, width)
        stat = path.stat()
        self.signature = f"array:{key}:{stat.st_size}:{stat.st_mtime_ns}:{path.resolve()}"

    def __len__(self) -> int:
        return len(self._array_NHWC)

    def fetch(self, indices: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(self._array_NHWC[indices].transpose(0, 3, 1, 2))


def open_images(
    spec: str | Path,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    split: Literal["train", "reference"] = "reference",
    reading: Mapping[str, Any] | None = None,
) -> ImageSource:
    """Images by their name.

    Args:
        spec: a folder; a file that ends in .npz or .npy; or a dataset by the names of `rowdit.data.open_dataset`, such
            as "bundled" or "folder:PATH".
        image_size: pixels a side to crop and resize to; None takes images as they are. Not for files of arrays.
        channels: 1 or 3; None is what they have.
        split: of a dataset.
        reading: more options of `open_dataset`.

    Raises:
        ImagesError, DataError: there are no such images, or they can't be used; the message says why.
    """
    path = Path(spec).expanduser()
    if path.suffix in (".npz", ".npy"):
        if image_size is not None:
            raise ImagesError(f"{path}: arrays are taken as they are; leave --image-size out")
        return ArrayImages(path)
    if is_run(path):
        raise ImagesError(f"{path} is a run; name images: the folder that rowdit sample made of it, say")
    if path.is_dir():
        samples = path / "images" if (path / "sampling.json").is_file() else path  # a grid beside them is no sample
        return FolderImages(samples, image_size, channels)
    try:
        options = {"channels": channels, **(reading or {})}
        return DatasetImages(open_dataset(str(spec), split, image_size, **options))
    except DataError as error:
        if "unknown dataset" in str(error):
            raise ImagesError(f"{spec} is neither a folder, nor an npz or npy file, nor a dataset: {error}") from None
        raise


def is_run(path: Path) -> bool:
    """Whether this is the folder of a run, whose pictures are grids and whose samples lie deeper."""
    return (path / "checkpoints").is_dir() or (path / "config.json").is_file()


def _open_array(path: Path, key: str | None) -> np.ndarray:
    if not path.is_file():
        raise ImagesError(f"there is no file {path}")
    try:
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            wanted = key or ("arr_0" if "arr_0" in names else names[0] if len(names) == 1 else "")
            if wanted not in names:
                raise ImagesError(f"{path}: there is no array {wanted or 'arr_0'!r} in it, but {', '.join(names)}")
            member = archive.getinfo(f"{wanted}.npy")
            if member.compress_type == zipfile.ZIP_STORED:
                return _map_member(path, member)
        with np.load(path, allow_pickle=False) as content:
            return content[wanted]
    except (zipfile.BadZipFile, EOFError, ValueError, OSError) as error:
        if isinstance(error, ImagesError):
            raise
        raise ImagesError(f"{path} can't be read ({error}); is it whole?") from None


def _map_member(path: Path, member: zipfile.ZipInfo) -> np.ndarray:
    """An array that lies uncompressed in an archive, mapped into memory."""
    with open(path, "rb") as file:
        file.seek(member.header_offset)
        local = file.read(30)  # the member's own header: its name and extra field may differ from the directory's
        file.seek(int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little"), 1)
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read_header(file)
        if dtype.hasobject:
            raise ImagesError(f"{path}: {member.filename} holds Python objects; save plain arrays")
        if np.prod(shape) == 0:
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran_order else "C")


def _is_grey(image: Image.Image) -> bool:
    return image.mode in GREY_MODES or image.mode.startswith("I;16")


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]} pixels"
