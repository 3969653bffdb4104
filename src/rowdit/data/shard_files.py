"""Which files a pattern names, and which of them are of a split.

A pattern is a file, a folder (all files in it with the source's extension, at any depth), a shell pattern
(``shards/*.tar``), or has a brace list or range (``train-{000..123}.tar``, ``{a,b}.tar``), as WebDataset writes them.

Splits are read off the names below the folder: a file is of the split ``train`` if its name or one of its folders'
begins so (``train/0.tar``, ``train-00000-of-00010.parquet``), and likewise of ``reference``, ``val``, ``valid``,
``validation`` and ``test``. Where no name says ``train``, the source has no splits, and every tenth sample of a class
is held out.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from rowdit.data.batch import DataError
from rowdit.data.encoded import Part

REFERENCE_NAMES = ("reference", "val", "valid", "validation", "test")

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_WORD = re.compile(r"[a-z]+", re.IGNORECASE)
_MAX_NAMED = 1_000_000


def find_files(pattern: str | os.PathLike[str], extensions: Sequence[str]) -> tuple[Path, list[Path]]:
    """The files that a pattern names, sorted, and the folder above all of them.

    Args:
        pattern: the module's docstring has the forms.
        extensions: of files that count where the pattern is a folder, with the dot.

    Raises:
        DataError: nothing is found, or a file that a brace list names is missing.
    """
    text = os.path.expanduser(os.fspath(pattern))
    if os.path.isdir(text):
        found = [path for path in Path(text).rglob("*") if path.suffix in extensions and not _is_hidden(path, text)]
        if not found:
            raise DataError(f"{text}: no file with the extension {' or '.join(extensions)} in this folder")
        return Path(text), sorted(found)
    names = expand_braces(text)
    paths = {name: [name] if os.path.exists(name) else sorted(glob.glob(name)) for name in names}
    missing = [name for name in names if not paths[name]]
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(f"{missing[0]} doesn't exist{more}; name a file, a folder, or a pattern such as shards/*.tar")
    files = sorted({Path(name) for found in paths.values() for name in found})
    return Path(os.path.commonpath([path.parent for path in files]) if files else "."), files


def expand_braces(pattern: str) -> list[str]:
    """All names of a pattern with brace lists and ranges.

    Example:
        >>> expand_braces("{a,b}-{08..10}.tar")
        ['a-08.tar', 'a-09.tar', 'a-10.tar', 'b-08.tar', 'b-09.tar', 'b-10.tar']
    """
    pieces = _BRACES.split(pattern)
    choices = [[piece] if place % 2 == 0 else _choices(piece) for place, piece in enumerate(pieces)]
    if np.prod([float(len(choice)) for choice in choices]) > _MAX_NAMED:
        raise DataError(f"{pattern} names more than {_MAX_NAMED} files")
    return ["".join(choice) for choice in itertools.product(*choices)]


def _choices(piece: str) -> list[str]:
    found = _RANGE.fullmatch(piece)
    if not found:
        return piece.split(",")
    first, last = found.groups()
    if abs(int(last) - int(first)) >= _MAX_NAMED or int(last) < int(first):
        raise DataError(f"the range {{{piece}}} must rise, over at most {_MAX_NAMED} numbers")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def files_of_split(root: Path, files: Sequence[Path], split: Literal["train", "reference"]) -> tuple[list[Path], Part]:
    """The files of a split, and which part of their samples are of it.

    Raises:
        DataError: there are training files and no reference ones.
    """
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(root)), []).append(file)
    if "train" not in by_split:
        return list(files), split
    if split == "train":
        return by_split["train"], "all"
    for name in REFERENCE_NAMES:
        if name in by_split:
            return by_split[name], "all"
    raise DataError(
        f"{root} has files of the split train, but none whose name begins with {', '.join(REFERENCE_NAMES)}; "
        f"name the folder, or a pattern that both have"
    )


def _split_of(path: Path) -> str:
    for part in path.parts:
        word = _WORD.match(part)
        if word and word[0].lower() in ("train", *REFERENCE_NAMES):
            return word[0].lower()
    return ""


def _is_hidden(path: Path, root: str) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)
