"""A folder with a sub-folder for each class, read image by image.

    PATH/cat/1.png  PATH/cat/more/2.jpg  PATH/dog/1.webp     two classes, "cat" (0) and "dog" (1)

Classes are numbered, and files ordered, by their sorted names; :mod:`rowdit.data.folder_scan` says what is found,
:mod:`rowdit.data.decode` how a file becomes bytes. Images are read when they are asked for, in the caller's process.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from rowdit.data.batch import DataError, check_indices, fingerprint
from rowdit.data.decode import MAX_PIXELS, WHITE, BadImageError, read_image
from rowdit.data.folder_scan import Entry, check_folder, list_folder, scan_classes

EXTENSIONS = (
    *(".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tga"),
    *(".tif", ".tiff", ".webp"),
)
REFERENCE_NAMES = ("reference", "val", "valid", "validation", "test")

HELD_OUT_EVERY = 10  # one image in so many is reference where a folder has no splits

_FEW_BYTES = 256 << 20  # hashed without being asked: about a second

BadImages = Literal["error", "skip", "replace"]
Part = Literal["all", "train", "reference"]


class ImageFolder:
    """Labelled images from a folder; a :class:`rowdit.data.Dataset`.

    Args:
        path: the folder.
        image_size: >= 1, pixels a side; :mod:`rowdit.data.decode` says how images get there.
        channels: 3 for RGB, 1 for grey.
        class_names: the classes and their order, where it isn't that of the sub-folders: those of the training set, for
            the reference set to have the same labels. A class without a sub-folder is then allowed, a sub-folder
            without a class is not.
        part: ``"all"`` images, or, for a folder without splits, ``"reference"``: of each class in its order every tenth
            (the 10th, 20th, ...), or ``"train"``: the others.
        bad_images: what becomes of an image that can't be used (damaged, truncated, too large, without a stated scale).
            ``"error"``: BadImageError when its turn comes. ``"skip"``: all files are decoded once at opening, and the
            bad ones aren't part of the dataset. ``"replace"``: the next good image of its class, in the folder's order
            and beginning anew at its end, takes its place; which one that is depends on the folder alone.
        background: RGB bytes that show through transparent images.
        max_pixels: an image with more is bad.
        extensions: of the files that are images, lower case, with the dot.
        cache: keep decoded images in memory, N x C x image_size^2 bytes when all have been read.
        hash_contents: what the fingerprint hashes: the files' contents, which reads every file once, or their names and
            sizes, which doesn't see a change that keeps a size. None: contents where that is little work, at most
            256 MiB in all. The fingerprint says which it was.

    Attributes:
        files: their paths below the folder, in the order of the indices.
        bad_files: path -> reason, of the bad ones found so far.
        num_replaced: how many images were served in place of bad ones.
        ignored: extension -> how many files in the classes' folders have it and so aren't images.

    Raises:
        ValueError: an argument out of its range.
        DataError: no such folder, no sub-folder, a class without an image, or a sub-folder that isn't a known class.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        image_size: int,
        *,
        channels: int = 3,
        class_names: Sequence[str] | None = None,
        part: Part = "all",
        bad_images: BadImages = "error",
        background: tuple[int, int, int] = WHITE,
        max_pixels: int = MAX_PIXELS,
        extensions: Sequence[str] = EXTENSIONS,
        cache: bool = False,
        hash_contents: bool | None = None,
    ) -> None:
        _check_arguments(image_size, channels, bad_images, part, background)
        self.path = Path(path).expanduser()
        self.image_shape = (channels, image_size, image_size)
        self.bad_images = bad_images
        self.bad_files: dict[str, str] = {}
        self.num_replaced = 0
        self._background, self._max_pixels = background, max_pixels

        classes, self.ignored = scan_classes(self.path, tuple(extensions))
        self.class_names = tuple(classes) if class_names is None else tuple(class_names)
        self.num_classes = len(self.class_names)
        self._check_classes(classes)
        classes = {name: _part_of(entries, part) for name, entries in classes.items()}
        if not any(classes.values()):
            raise DataError(
                f"{self.path}: no class has {HELD_OUT_EVERY} images, so none is held out as reference; "
                f"make sub-folders train and reference, each with a sub-folder for each class"
            )
        entries = [entry for name in self.class_names for entry in classes.get(name, [])]
        counts = [len(classes.get(name, [])) for name in self.class_names]
        labels = np.repeat(np.arange(self.num_classes, dtype=np.int64), counts)
        self.files = [entry.path for entry in entries]
        self._cache = np.empty((len(entries), *self.image_shape), np.uint8) if cache else None
        self._cached = np.zeros(len(entries), bool)
        if bad_images == "skip":
            good = self._find_good(labels)
            entries, labels = [entries[index] for index in good], labels[good]
            self.files = [self.files[index] for index in good]
            if self._cache is not None:
                self._cache, self._cached = self._cache[good], self._cached[good]
        self.labels = labels
        self.fingerprint = self._fingerprint(entries, hash_contents)

    def __len__(self) -> int:
        return len(self.files)

    def fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Images (B, C, H, W) uint8 and labels (B,) int64 of ``indices``, (B,) integers in 0 .. len - 1.

        Raises:
            IndexError: an index out of its range.
            BadImageError: a bad image under ``bad_images="error"``.
            DataError: under ``"replace"``, a class without a single good image.
        """
        indices = check_indices(indices, len(self))
        images = np.empty((len(indices), *self.image_shape), np.uint8)
        for row, index in enumerate(indices.tolist()):
            images[row] = self._fetch_one(index)
        return images, self.labels[indices]

    def _fetch_one(self, index: int) -> np.ndarray:
        try:
            return self._read(index)
        except BadImageError as error:
            if self.bad_images != "replace":
                raise BadImageError(
                    error.name,
                    f"{error.reason}; mend or remove it, or open the folder with bad_images='skip' or 'replace'",
                ) from error
        label = self.labels[index]
        first, after = np.searchsorted(self.labels, [label, label + 1]).tolist()  # labels are in ascending order
        for candidate in (*range(index + 1, after), *range(first, index)):
            try:
                image = self._read(candidate)
            except BadImageError:
                continue
            self.num_replaced += 1
            return image
        name = self.class_names[int(label)]
        raise DataError(
            f"{self.path / name}: none of its {after - first} images can be used, the first because of "
            f"{self.bad_files[self.files[first]]!r}; mend them or remove the class"
        )

    def _read(self, index: int) -> np.ndarray:
        if self._cache is not None and self._cached[index]:
            return self._cache[index]
        file = self.files[index]
        if file in self.bad_files:
            raise BadImageError(str(self.path / file), self.bad_files[file])
        channels, size, _ = self.image_shape
        try:
            image = read_image(
                self.path / file, size, channels=channels, background=self._background, max_pixels=self._max_pixels
            )
        except BadImageError as error:
            self.bad_files[file] = error.reason
            raise
        if self._cache is not None:
            self._cache[index], self._cached[index] = image, True
        return image

    def _find_good(self, labels: np.ndarray) -> np.ndarray:
        """Decode all; the indices of those that can be used."""
        good = np.zeros(len(self.files), bool)
        for index in range(len(self.files)):
            try:
                self._read(index)
                good[index] = True
            except BadImageError:
                continue
        gone = sorted(set(labels.tolist()) - set(labels[good].tolist()))
        if gone:
            names = ", ".join(self.class_names[label] for label in gone)
            file = next(file for file in self.bad_files if file.startswith(f"{self.class_names[gone[0]]}/"))
            raise DataError(
                f"{self.path}: without the bad images none is left of class {names} "
                f"({file}: {self.bad_files[file]}); mend them or remove the class"
            )
        return np.flatnonzero(good)

    def _check_classes(self, classes: dict[str, list[Entry]]) -> None:
        unknown = [name for name in classes if name not in self.class_names]
        if unknown:
            raise DataError(
                f"{self.path / unknown[0]} is not one of the {self.num_classes} classes that were given "
                f"({_listed(self.class_names)}); {len(unknown)} such sub-folder(s). Remove them or name their classes"
            )
        if not any(classes.values()):
            raise DataError(f"{self.path}: no image in any of the sub-folders {_listed(list(classes))}" + self._seen())
        empty = [name for name, entries in classes.items() if not entries]
        if empty:
            raise DataError(
                f"{self.path / empty[0]}: no image in this class ({len(empty)} such: {_listed(empty)})"
                + self._seen()
                + "; add images or remove the folder"
            )

    def _seen(self) -> str:
        others = ", ".join(f"{count} of {extension or 'no extension'}" for extension, count in self.ignored.items())
        return f"; files that are no images here: {others}" if others else ""

    def _fingerprint(self, entries: list[Entry], hash_contents: bool | None) -> str:
        if hash_contents is None:
            hash_contents = sum(entry.num_bytes for entry in entries) <= _FEW_BYTES
        digest = hashlib.sha256()
        for name in self.class_names:
            digest.update(os.fsencode(name) + b"\n")
        for entry in entries:
            content = _sha256(self.path / entry.path) if hash_contents else str(entry.num_bytes)
            digest.update(os.fsencode(entry.path) + b"\0" + content.encode() + b"\n")
        rule = "square-bicubic"
        if self._background != WHITE:
            rule += "-on-{:02x}{:02x}{:02x}".format(*self._background)
        kind = "contents" if hash_contents else "names"
        return fingerprint(f"folder-{kind}", self.image_shape, len(entries), digest.hexdigest(), resize=rule)


def _check_arguments(
    image_size: int, channels: int, bad_images: str, part: str, background: tuple[int, int, int]
) -> None:
    for name, value, known in (("bad_images", bad_images, BadImages), ("part", part, Part)):
        if value not in get_args(known):
            raise ValueError(f"{name} {value!r} is not one of {', '.join(get_args(known))}")
    if image_size < 1 or channels not in (1, 3):
        raise ValueError(f"image_size {image_size} must be >= 1, and channels {channels} 1 or 3")
    if len(background) != 3 or not all(0 <= value <= 255 for value in background):
        raise ValueError(f"background {background} must be three bytes, 0..255")


def _part_of(entries: list[Entry], part: Part) -> list[Entry]:
    held_out = entries[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    if part == "train":
        return [entry for place, entry in enumerate(entries, start=1) if place % HELD_OUT_EVERY]
    return held_out if part == "reference" else entries


def open_split(
    path: str | os.PathLike[str], split: Literal["train", "reference"], image_size: int, **options: Any
) -> ImageFolder:
    """The training or the reference images of a folder.

    A folder whose sub-folders are ``train`` and any of ``reference``, ``val``, ``valid``, ``validation`` and ``test``
    (the first of these that is there), and nothing else, has its splits made; the training set's classes hold for both.
    Any other folder has a sub-folder for each class, and every tenth image of each class is held out as reference.

    Args:
        path: the folder.
        split: which images.
        image_size, options: as for :class:`ImageFolder`.

    Raises:
        DataError: as from :class:`ImageFolder`, or there is nothing that could be this split.
    """
    root = Path(path).expanduser()
    names = [found.name for found in list_folder(check_folder(root)) if found.is_folder]
    if "train" not in names or not set(names) <= {"train", *REFERENCE_NAMES}:
        return ImageFolder(root, image_size, **{"part": split, **options})
    if split == "train":
        return ImageFolder(root / "train", image_size, **options)
    found = [name for name in REFERENCE_NAMES if name in names]
    if not found:
        raise DataError(f"{root} has the split train, but none called {', '.join(REFERENCE_NAMES)}")
    extensions = tuple(options.get("extensions", EXTENSIONS))
    class_names = tuple(scan_classes(root / "train", extensions)[0])
    return ImageFolder(root / found[0], image_size, **{"class_names": class_names, **options})


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "missing"


def _listed(names: Sequence[str], at_most: int = 5) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more
