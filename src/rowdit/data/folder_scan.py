"""What lies in a folder of class folders, without opening any image.

Names are sorted, so the order depends on them alone. Hidden files and folders are ignored; symbolic links are followed,
and each real folder is entered once a class, so loops end.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rowdit.data.batch import DataError


@dataclass(frozen=True)
class Entry:
    """A file of a class: its path below the root with "/" between, and its bytes (-1 for a dangling link)."""

    path: str
    num_bytes: int


@dataclass(frozen=True)
class Found:
    """What a folder holds: ``num_bytes`` is -1 for a dangling link and None for what is no file."""

    name: str
    is_folder: bool
    num_bytes: int | None


def scan_classes(root: Path, extensions: tuple[str, ...]) -> tuple[dict[str, list[Entry]], Counter[str]]:
    """The classes of a folder in sorted order, each with its images in sorted order; and what was ignored.

    Raises:
        DataError: ``root`` is no folder, can't be listed, or has no sub-folder.
    """
    real_root = _identity(check_folder(root))
    listing = list_folder(root)
    names = [found.name for found in listing if found.is_folder and _identity(root / found.name) != real_root]
    if not names:
        num_images = sum(found.name.lower().endswith(extensions) for found in listing)
        raise DataError(
            f"{root} has no sub-folder and {num_images} image(s); the images of a class belong in a sub-folder named "
            f"after it (in one sub-folder, if there are no classes)"
        )
    classes, ignored = {}, Counter[str]()
    for name in names:
        entries: list[Entry] = []
        _scan(root, name, extensions, {real_root}, entries, ignored)
        classes[name] = sorted(entries, key=lambda entry: entry.path)
    return classes, ignored


def _scan(
    root: Path,
    relative: str,
    extensions: tuple[str, ...],
    entered: set[tuple[int, int]],
    entries: list[Entry],
    ignored: Counter[str],
) -> None:
    folder = root / relative
    identity = _identity(folder)
    if identity in entered:
        return
    entered.add(identity)
    for found in list_folder(folder):
        path = f"{relative}/{found.name}"
        if found.is_folder:
            _scan(root, path, extensions, entered, entries, ignored)
        elif found.num_bytes is not None and found.name.lower().endswith(extensions):
            entries.append(Entry(path, found.num_bytes))
        else:
            ignored[os.path.splitext(found.name)[1].lower()] += 1


def list_folder(folder: Path) -> list[Found]:
    """What isn't hidden, sorted by name; links are followed."""
    try:
        with os.scandir(folder) as entries:
            found = [_look_at(entry) for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder} can't be listed ({error.strerror})") from error
    return sorted(found, key=lambda one: one.name)


def _look_at(entry: os.DirEntry[str]) -> Found:
    try:
        status = entry.stat()
    except OSError:  # a link to nothing, or to itself: as a file, it is one that can't be read
        return Found(entry.name, is_folder=False, num_bytes=-1)
    is_file = stat.S_ISREG(status.st_mode)  # a pipe isn't, and would block its reader
    return Found(entry.name, stat.S_ISDIR(status.st_mode), status.st_size if is_file else None)


def check_folder(root: Path) -> Path:
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "doesn't exist"
        raise DataError(f"{root} {what}; name a folder with a sub-folder for each class")
    return root


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino
