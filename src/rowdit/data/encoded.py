"""Images that lie encoded somewhere (PNG, JPEG, ...) and are decoded when they are asked for.

What all such sources share: how an image becomes bytes (:mod:`rowdit.data.decode`), what becomes of one that can't be
used, and which samples are held out where a source has no splits. A source itself, such as a folder or tar shards, says
only where the bytes of row i are and what it is called.

Bad images (damaged, truncated, too large, without a stated scale), by ``bad_images``:

    "error"     BadImageError when its turn comes
    "skip"      every image is decoded once at opening, and the bad ones aren't part of the dataset; of shards, what was
                found is kept until one of them changes, and one process on a machine finds it for all
    "replace"   the next good image of its class, in the source's order and beginning anew at its end, takes its place;
                which one that is depends on the source alone
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import numpy as np

from rowdit.data.batch import DataError, Dataset, check_indices, fingerprint
from rowdit.data.decode import MAX_PIXELS, WHITE, BadImageError, read_image
from rowdit.data.index_cache import cached_arrays

HELD_OUT_EVERY = 10  # one image in so many is reference where a source has no splits
FEW_BYTES = 256 << 20  # hashed without being asked: about a second

BadImages = Literal["error", "skip", "replace"]
Part = Literal["all", "train", "reference"]


@dataclass(frozen=True)
class Decoding:
    """How images are decoded, and what becomes of bad ones.

    Args:
        image_size: >= 1, pixels a side.
        channels: 3 for RGB, 1 for grey.
        bad_images: the module's docstring has the three.
        background: RGB bytes that show through transparent images.
        max_pixels: an image with more is bad.

    Raises:
        ValueError: an argument out of its range.
    """

    image_size: int
    channels: int = 3
    bad_images: BadImages = "error"
    background: tuple[int, int, int] = WHITE
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        if self.bad_images not in get_args(BadImages):
            raise ValueError(f"bad_images {self.bad_images!r} is not one of {', '.join(get_args(BadImages))}")
        if self.image_size < 1 or self.channels not in (1, 3):
            raise ValueError(f"image_size {self.image_size} must be >= 1, and channels {self.channels} 1 or 3")
        if len(self.background) != 3 or not all(0 <= value <= 255 for value in self.background):
            raise ValueError(f"background {self.background} must be three bytes, 0..255")

    @property
    def rule(self) -> str:
        """For fingerprints."""
        on = "" if self.background == WHITE else "-on-{:02x}{:02x}{:02x}".format(*self.background)
        return f"square-bicubic{on}"


@dataclass(frozen=True)
class Scanned:
    """What finding bad images in a source depends on, beside how they are decoded.

    Args:
        rows: names the rows and their order.
        files: that hold them.
    """

    rows: str
    files: Sequence[Path]


class EncodedImages:
    """A :class:`rowdit.data.Dataset` of encoded images; the base of the sources.

    Args:
        place: what errors call the whole source.
        labels: (N,) int64, of the rows.
        class_names: one name a class.
        decoding: how.
        cache: keep decoded images in memory, N x C x image_size^2 bytes when all have been read.
        scanned: under ``"skip"``, what the good rows may be remembered by; None finds them anew each time.

    Attributes:
        labels: of the dataset's images.
        bad_files: name -> reason, of the bad ones found so far.
        num_replaced: how many images were served in place of bad ones.
    """

    fingerprint: str

    def __init__(
        self,
        place: str,
        labels: np.ndarray,
        class_names: Sequence[str],
        decoding: Decoding,
        *,
        cache: bool = False,
        scanned: Scanned | None = None,
    ) -> None:
        self.class_names = tuple(class_names)
        self.num_classes = len(self.class_names)
        self.image_shape = (decoding.channels, decoding.image_size, decoding.image_size)
        self.bad_images = decoding.bad_images
        self.bad_files: dict[str, str] = {}
        self.num_replaced = 0
        self._bad_rows: dict[int, str] = {}  # the same by row: of shards, a name has to be looked up
        self._place, self._decoding = place, decoding
        self._cache = np.empty((len(labels), *self.image_shape), np.uint8) if cache else None
        self._cached = np.zeros(len(labels), bool)
        self._row_labels = labels
        self._rows = np.arange(len(labels))  # of the images that are part of the dataset
        if self.bad_images == "skip":
            self._rows = self._find_good(scanned)
        self.labels = labels[self._rows]
        self._by_class: dict[int, np.ndarray] = {}

    def _open(self, row: int) -> Path | BinaryIO:
        """Where row's encoded bytes are."""
        raise NotImplementedError

    def _name(self, row: int) -> str:
        """What ``bad_files`` calls it."""
        raise NotImplementedError

    def _full_name(self, row: int) -> str:
        """What errors call it."""
        return self._name(row)

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Images (B, C, H, W) uint8 and labels (B,) int64 of ``indices``, (B,) integers in 0 .. len - 1.

        Raises:
            IndexError: an index out of its range.
            BadImageError: a bad image under ``bad_images="error"``.
            DataError: under ``"replace"``, a class without a single good image.
        """
        indices = check_indices(indices, len(self))
        images = np.empty((len(indices), *self.image_shape), np.uint8)
        for place, row in enumerate(self._rows[indices].tolist()):
            images[place] = self._fetch_row(row)
        return images, self.labels[indices]

    def _fetch_row(self, row: int) -> np.ndarray:
        try:
            return self._read(row)
        except BadImageError as error:
            if self.bad_images != "replace":
                raise BadImageError(
                    error.name,
                    f"{error.reason}; mend or remove it, or open the data with bad_images='skip' or 'replace'",
                ) from error
        label = int(self._row_labels[row])
        if label not in self._by_class:
            self._by_class[label] = np.flatnonzero(self._row_labels == label)
        rows = self._by_class[label]
        place = int(np.searchsorted(rows, row))
        for step in range(1, len(rows)):
            try:
                image = self._read(int(rows[(place + step) % len(rows)]))
            except BadImageError:
                continue
            self.num_replaced += 1
            return image
        raise DataError(
            f"{self._place}: none of the {len(rows)} images of class {self.class_names[label]} can be used, the first "
            f"because of {self._bad_rows[int(rows[0])]!r}; mend them or remove the class"
        )

    def _read(self, row: int) -> np.ndarray:
        if self._cache is not None and self._cached[row]:
            return self._cache[row]
        if row in self._bad_rows:
            raise BadImageError(self._full_name(row), self._bad_rows[row])
        decoding = self._decoding
        try:
            image = read_image(
                self._open(row),
                decoding.image_size,
                channels=decoding.channels,
                background=decoding.background,
                max_pixels=decoding.max_pixels,
                name="",
            )
        except BadImageError as error:
            self._bad_rows[row] = self.bad_files[self._name(row)] = error.reason
            raise BadImageError(self._full_name(row), error.reason) from error.__cause__
        if self._cache is not None:
            self._cache[row], self._cached[row] = image, True
        return image

    def _find_good(self, scanned: Scanned | None) -> np.ndarray:
        """The rows that can be used."""
        labels = self._row_labels
        if scanned is None:
            found = self._scan()
        else:
            decoding = self._decoding
            how = f"{scanned.rows}-{decoding.image_size}-{decoding.channels}-{decoding.max_pixels}"
            key = hashlib.sha256(how.encode()).hexdigest()[:16]
            found = cached_arrays(f"scan1-{key}", scanned.files, self._scan)
            self.bad_files = json.loads(found["bad_files"].tobytes())
        good = found["good"].astype(bool)
        gone = sorted(set(labels.tolist()) - set(labels[good].tolist()))
        if gone:
            names = ", ".join(self.class_names[label] for label in gone)
            first = self._name(int(np.flatnonzero(labels == gone[0])[0]))
            raise DataError(
                f"{self._place}: without the bad images none is left of class {names} "
                f"({first}: {self.bad_files[first]}); mend them or remove the class"
            )
        return np.flatnonzero(good)

    def _scan(self) -> dict[str, np.ndarray]:
        """Decode all rows: ``good`` (N,) uint8, and ``bad_files`` as JSON in bytes."""
        good = np.zeros(len(self._row_labels), np.uint8)
        for row in range(len(good)):
            try:
                self._read(row)
                good[row] = 1
            except BadImageError:
                continue
        return {"good": good, "bad_files": np.frombuffer(json.dumps(self.bad_files).encode(), np.uint8)}

    def _mark(self, name: str, digest: str) -> str:
        """The fingerprint."""
        return fingerprint(name, self.image_shape, len(self), digest, resize=self._decoding.rule)


def bad_images_met(dataset: Dataset) -> str:
    """A line about the bad images that a dataset met in this process and its workers; empty where it met none.

    Example:
        >>> from rowdit.data import open_dataset
        >>> bad_images_met(open_dataset("bundled"))
        ''
    """
    bad_files: dict[str, str] = getattr(dataset, "bad_files", {})
    if not bad_files:
        return ""
    first, reason = next(iter(bad_files.items()))
    replaced = getattr(dataset, "num_replaced", 0)
    done = f"; {replaced} images were served in place of bad ones" if replaced else ""
    return f"bad images met by this rank: {len(bad_files)}, the first {first} ({reason}){done}"


def part_rows(labels: np.ndarray, part: Part) -> np.ndarray:
    """The rows of a part of a source without splits, in their order.

    Args:
        labels: (N,) of all rows.
        part: ``"all"``; ``"reference"``, of each class in the rows' order every tenth (the 10th, 20th, ...); or
            ``"train"``, the others.

    Raises:
        ValueError: an unknown part.

    Example:
        >>> part_rows(np.array([0] * 10 + [1] * 20), "reference").tolist()
        [9, 19, 29]
    """
    if part not in get_args(Part):
        raise ValueError(f"part {part!r} is not one of {', '.join(get_args(Part))}")
    if part == "all":
        return np.arange(len(labels))
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    place_in_class = np.arange(len(labels)) - np.searchsorted(ordered, ordered)
    held_out = np.zeros(len(labels), bool)
    held_out[order] = place_in_class % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return np.flatnonzero(held_out if part == "reference" else ~held_out)


def some_rows(labels: np.ndarray, part: Part, place: str) -> np.ndarray:
    """:func:`part_rows`, or a DataError where there are none."""
    rows = part_rows(labels, part)
    if not len(labels):
        raise DataError(f"{place}: no labelled image")
    if not len(rows):
        raise DataError(
            f"{place}: no class has {HELD_OUT_EVERY} images, so none is held out as reference; give the splits "
            f"files of their own, whose names begin with train and reference"
        )
    return rows


def classes_of(
    labels: np.ndarray, class_names: Sequence[str] | None, num_classes: int | None, where: Callable[[int], str]
) -> tuple[str, ...]:
    """The names of the classes of a source whose labels are numbers.

    Args:
        labels: (N,) integers, N >= 1.
        class_names: where they are known.
        num_classes: where only that is known; the names are then the numbers. None: the largest label decides.
        where: row -> what errors call the sample that a label is from.

    Raises:
        DataError: a label out of range; names its sample.
    """
    if class_names is not None:
        names = list(class_names)
        if num_classes not in (None, len(names)):
            raise DataError(f"{len(names)} classes are named ({', '.join(names[:5])}, ...), not {num_classes}")
    else:
        names = [str(number) for number in range(int(labels.max()) + 1 if num_classes is None else num_classes)]
    wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if len(wrong):
        raise DataError(
            f"{where(int(wrong[0]))}: label {int(labels[wrong[0]])} ({len(wrong)} such samples) is outside "
            f"0..{len(names) - 1}; num_classes is {len(names)}, and {len(names)} is the null class"
        )
    return tuple(names)


def digest_files(paths: Iterable[Path], root: Path, hash_contents: bool | None) -> tuple[str, str]:
    """A hash over files for fingerprints, and its kind.

    Args:
        paths: in their order.
        root: names are taken below it.
        hash_contents: True: names and contents; False: names and sizes; None: contents up to 256 MiB in all.

    Returns:
        The sha256, and ``"contents"`` or ``"names"``.
    """
    paths = list(paths)
    sizes = [path.stat().st_size for path in paths]
    if hash_contents is None:
        hash_contents = sum(sizes) <= FEW_BYTES
    digest = hashlib.sha256()
    for path, size in zip(paths, sizes, strict=True):
        content = sha256_of(path) if hash_contents else str(size)
        digest.update(os.fsencode(os.path.relpath(path, root)) + b"\0" + content.encode() + b"\n")
    return digest.hexdigest(), "contents" if hash_contents else "names"


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
