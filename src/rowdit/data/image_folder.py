"""A folder with a sub-folder for each class, read image by image.

    PATH/cat/1.png  PATH/cat/more/2.jpg  PATH/dog/1.webp     two classes, "cat" (0) and "dog" (1)

Classes are numbered, and files ordered, by their sorted names; :mod:`rowdit.data.folder_scan` says what is found,
:mod:`rowdit.data.encoded` what becomes of bad images. Images are read when they are asked for, in the caller's process.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rowdit.data.batch import DataError
from rowdit.data.decode import MAX_PIXELS, WHITE
from rowdit.data.encoded import (
    FEW_BYTES,
    HELD_OUT_EVERY,
    BadImages,
    Decoding,
    EncodedImages,
    Part,
    part_rows,
    sha256_of,
)
from rowdit.data.folder_scan import Entry, check_folder, list_folder, scan_classes

EXTENSIONS = (
    *(".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tga"),
    *(".tif", ".tiff", ".webp"),
)
REFERENCE_NAMES = ("reference", "val", "valid", "validation", "test")


class ImageFolder(EncodedImages):
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
        bad_images: what becomes of an image that can't be used; :mod:`rowdit.data.encoded` has the choices.
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
        decoding = Decoding(image_size, channels, bad_images, background, max_pixels)
        part_rows(np.empty(0, np.int64), part)  # refuses an unknown part before anything is read
        self.path = Path(path).expanduser()
        classes, self.ignored = scan_classes(self.path, tuple(extensions))
        names = tuple(classes) if class_names is None else tuple(class_names)
        self._check_classes(names, classes)
        entries = [entry for name in names for entry in classes.get(name, [])]
        labels = np.repeat(np.arange(len(names), dtype=np.int64), [len(classes.get(name, [])) for name in names])
        rows = part_rows(labels, part)
        if not len(rows):
            raise DataError(
                f"{self.path}: no class has {HELD_OUT_EVERY} images, so none is held out as reference; "
                f"make sub-folders train and reference, each with a sub-folder for each class"
            )
        self._entries = [entries[row] for row in rows.tolist()]
        super().__init__(str(self.path), labels[rows], names, decoding, cache=cache)
        self.files = [self._name(row) for row in self._rows.tolist()]
        self.fingerprint = self._fingerprint(hash_contents)

    def _open(self, row: int) -> Path:
        return self.path / self._entries[row].path

    def _name(self, row: int) -> str:
        return self._entries[row].path

    def _full_name(self, row: int) -> str:
        return str(self._open(row))

    def _check_classes(self, names: tuple[str, ...], classes: dict[str, list[Entry]]) -> None:
        unknown = [name for name in classes if name not in names]
        if unknown:
            raise DataError(
                f"{self.path / unknown[0]} is not one of the {len(names)} classes that were given "
                f"({_listed(names)}); {len(unknown)} such sub-folder(s). Remove them or name their classes"
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

    def _fingerprint(self, hash_contents: bool | None) -> str:
        entries = [self._entries[row] for row in self._rows.tolist()]
        if hash_contents is None:
            hash_contents = sum(entry.num_bytes for entry in entries) <= FEW_BYTES
        digest = hashlib.sha256()
        for name in self.class_names:
            digest.update(os.fsencode(name) + b"\n")
        for entry in entries:
            content = _sha256(self.path / entry.path) if hash_contents else str(entry.num_bytes)
            digest.update(os.fsencode(entry.path) + b"\0" + content.encode() + b"\n")
        return self._mark("folder-contents" if hash_contents else "folder-names", digest.hexdigest())


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
        return sha256_of(path)
    except FileNotFoundError:  # a dangling link, or a file that is gone
        return "missing"


def _listed(names: Sequence[str], at_most: int = 5) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more
