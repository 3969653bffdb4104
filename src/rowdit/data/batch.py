"""What a data source hands over, and the one formula between bytes and numbers.

Shapes: B images, C channels, H height, W width. Images are uint8 in 0..255 wherever they are kept, sent, saved and
scored, and float32 in [-1, 1] inside the model. Latents of images are float32, of standard deviation about 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor


class DataError(ValueError):
    """The data can't be used as it is. The message names the file, what is wrong with it and the way out."""


@dataclass(frozen=True)
class Batch:
    """Consecutive samples of the training stream.

    Attributes:
        images: (B, C, H, W) float32, in [-1, 1] or latents.
        labels: (B,) int64 in 0 .. num_classes - 1.
        positions: (B,) int64, the sample's place in the endless stream: how many images come before it. All of its
            random numbers (noise, time, class dropout, flip) are drawn by this index.
    """

    images: Tensor
    labels: Tensor
    positions: Tensor


@runtime_checkable
class Dataset(Protocol):
    """A finite, ordered set of labelled images of one size.

    Attributes:
        num_classes: labels are 0 .. num_classes - 1; ``num_classes`` itself is the model's null class.
        class_names: one name a class, in the order of the labels.
        image_shape: (C, H, W).
        fingerprint: a line of text that says which images these are and how they were resized. Two datasets with equal
            fingerprints give equal images; scores and statistics carry it.
    """

    @property
    def num_classes(self) -> int: ...

    @property
    def class_names(self) -> tuple[str, ...]: ...

    @property
    def image_shape(self) -> tuple[int, int, int]: ...

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Images (B, C, H, W) uint8 and labels (B,) int64 of ``indices``, (B,) integers in 0 .. len - 1.

        Of latents the images are float32, the means of their distributions.
        """
        ...


@runtime_checkable
class DrawnDataset(Dataset, Protocol):
    """A dataset whose samples are distributions, to be drawn anew at each place in the stream: latents."""

    def draw(
        self, indices: np.ndarray, positions: Tensor, *, seed: int, flip: bool = False
    ) -> tuple[Tensor, np.ndarray]:
        """Images (B, C, H, W) float32 and labels (B,) int64; random by (seed, position) alone.

        Args:
            indices: (B,) integers in 0 .. len - 1, which samples.
            positions: (B,) int64, their places in the stream.
            seed: of the streams ``"latent"`` and ``"flip"``.
            flip: mirror each image with probability 1/2.
        """
        ...


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """Images that are already in memory.

    Args:
        images: (N, C, H, W) uint8.
        labels: (N,) integers in 0 .. len(class_names) - 1.
        class_names: one name a class.
        name: what the images are; it opens the fingerprint, which ends with a hash of images and labels.

    Raises:
        DataError: no images, another type or shape, or a label that is out of range.

    Example:
        >>> grey = ArrayDataset(np.zeros((2, 1, 4, 4), np.uint8), np.array([0, 1]), ("a", "b"), name="grey")
        >>> grey.image_shape, len(grey), grey.num_classes
        ((1, 4, 4), 2, 2)
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    name: str
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4 or 0 in self.images.shape:
            raise DataError(
                f"{self.name}: images must be uint8 of shape (N, C, H, W) with none of them 0, "
                f"not {self.images.dtype} of shape {self.images.shape}"
            )
        if self.labels.shape != self.images.shape[:1]:
            raise DataError(f"{self.name}: {len(self.images)} images, but labels of shape {self.labels.shape}")
        check_labels(self.labels, len(self.class_names), self.name)
        object.__setattr__(self, "labels", self.labels.astype(np.int64))
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", fingerprint(self.name, self.image_shape, len(self), self._digest()))

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        _, channels, height, width = self.images.shape
        return channels, height, width

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        indices = check_indices(indices, len(self))
        return self.images[indices], self.labels[indices]

    def _digest(self) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(self.images).data)
        digest.update(np.ascontiguousarray(self.labels, dtype="<i8").data)
        return digest.hexdigest()


def fingerprint(name: str, image_shape: tuple[int, int, int], num_images: int, digest: str, resize: str = "") -> str:
    """The line of text that stands for a dataset: ``name:2000x1x28x28:resize:sha256-0123456789abcdef``."""
    shape = "x".join(str(size) for size in (num_images, *image_shape))
    return ":".join(part for part in (name, shape, resize, f"sha256-{digest[:16]}") if part)


def resize_of(mark: str) -> str:
    """How the images of a :func:`fingerprint` got their size and crop; ``"native"`` where it says nothing.

    Example:
        >>> resize_of(fingerprint("pets", (3, 4, 4), 10, "0" * 64, resize="square-bicubic"))
        'square-bicubic'
    """
    rule = mark.split(":")[-2]
    return "native" if rule.replace("x", "").isdigit() else rule


def to_float(images: np.ndarray | Tensor) -> Tensor:
    """Bytes to numbers: x = u / 127.5 - 1, so 0 is -1 and 255 is 1.

    Args:
        images: uint8, any shape.

    Returns:
        float32 of the same shape, on the same device, in [-1, 1].

    Raises:
        TypeError: another dtype; floats would be scaled twice.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(images)) if isinstance(images, np.ndarray) else images
    if tensor.dtype != torch.uint8:
        raise TypeError(f"to_float takes uint8 images, not {tensor.dtype}")
    return tensor.to(torch.float32).div_(127.5).sub_(1)


def model_input(images: np.ndarray) -> Tensor:
    """What ``fetch`` gave, as the model takes it: pixels by :func:`to_float`, latents as they are."""
    return torch.from_numpy(images) if images.dtype == np.float32 else to_float(images)


def to_uint8(images: Tensor) -> Tensor:
    """Numbers to bytes: u = round(clip((x + 1) * 127.5, 0, 255)), halves to even. Inverts :func:`to_float` exactly.

    Args:
        images: floating point, any shape; what lies outside [-1, 1] is clipped.

    Returns:
        uint8 of the same shape.

    Raises:
        TypeError: not a floating-point tensor.
        ValueError: NaN, which has no byte; the model that made it has diverged.

    Example:
        >>> to_uint8(torch.tensor([-1.0, 0.0, 1.0, 7.0])).tolist()
        [0, 128, 255, 255]
    """
    if not images.is_floating_point():
        raise TypeError(f"to_uint8 takes floating-point images, not {images.dtype}")
    if torch.isnan(images).any():
        raise ValueError("to_uint8: the images hold NaN, so the model that made them has diverged")
    return ((images.to(torch.float32) + 1) * 127.5).clamp(0, 255).round().to(torch.uint8)


def check_labels(labels: np.ndarray, num_classes: int, where: str) -> None:
    """Raise a DataError that names ``where`` and the first label outside 0 .. num_classes - 1."""
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{where}: labels must be integers, not {labels.dtype}")
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{where}: label {int(labels[first])} (image {first}; {len(wrong)} such labels) is outside "
            f"0..{num_classes - 1}; num_classes is {num_classes}, and {num_classes} is the null class"
        )


def check_indices(indices: np.ndarray | Sequence[int], num_images: int) -> np.ndarray:
    """``indices`` as an integer array, or an IndexError: a negative index would silently count from the end."""
    array = np.asarray(indices, dtype=np.int64)
    if array.ndim != 1:
        raise IndexError(f"indices must be one-dimensional, not of shape {array.shape}")
    if len(array) and (array.min() < 0 or array.max() >= num_images):
        raise IndexError(f"indices {array.min()}..{array.max()} are outside 0..{num_images - 1}")
    return array


def check_image_size(image_size: int, patch_size: int = 1, downsample_factor: int = 1) -> None:
    """Refuse an image size that doesn't come out as whole patches.

    Args:
        image_size: pixels a side.
        patch_size: latent pixels (or pixels, without an encoder) a patch's side.
        downsample_factor: pixels a latent pixel's side; 1 without an encoder.

    Raises:
        ValueError: names the nearest valid sizes.

    Example:
        >>> check_image_size(28, patch_size=4)
        >>> check_image_size(250, patch_size=2, downsample_factor=8)
        Traceback (most recent call last):
        ValueError: image_size 250 isn't divisible by patch_size 2 x downsample_factor 8 = 16; nearest valid: 240 or 256
    """
    multiple = patch_size * downsample_factor
    if image_size < 1 or patch_size < 1 or downsample_factor < 1:
        raise ValueError(
            f"image_size {image_size}, patch_size {patch_size} and downsample_factor {downsample_factor} must be >= 1"
        )
    if image_size % multiple:
        below = image_size // multiple * multiple
        nearest = f"{below} or {below + multiple}" if below else f"{multiple}"
        factor = f" x downsample_factor {downsample_factor} = {multiple}" if downsample_factor > 1 else ""
        raise ValueError(
            f"image_size {image_size} isn't divisible by patch_size {patch_size}{factor}; nearest valid: {nearest}"
        )
