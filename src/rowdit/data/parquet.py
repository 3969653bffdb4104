"""Parquet files with a column of encoded images and one of labels, as the Hugging Face hub keeps image datasets.

A Parquet file is read by row groups: to get one image, a reader must decompress the group that it is in. So where the
files are larger than 256 MiB in all, the order isn't a uniform permutation, but one that stays within ``window`` groups
at a time (:class:`rowdit.data.index.Blocks`), and that many groups are kept in memory, in each process that reads.
Rows sorted by class want a window of many groups, or better, to be shuffled or encoded first (``rowdit encode``).
"""

from __future__ import annotations

import io
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rowdit.data.batch import DataError
from rowdit.data.decode import MAX_PIXELS, WHITE, BadImageError
from rowdit.data.encoded import (
    FEW_BYTES,
    BadImages,
    Decoding,
    EncodedImages,
    Part,
    Scanned,
    classes_of,
    digest_files,
    some_rows,
)
from rowdit.data.index import Blocks
from rowdit.data.shard_files import files_of_split, find_files

if TYPE_CHECKING:
    import pyarrow

IMAGE_NAMES = ("image", "img", "jpg", "png")
LABEL_NAMES = ("label", "labels", "cls", "class", "fine_label")

_WINDOW_BYTES = 512 << 20
_WINDOW_RANGE = (4, 64)


class ParquetImages(EncodedImages):
    """Labelled images in Parquet files; a :class:`rowdit.data.Dataset`.

    Args:
        files: in their order.
        image_size, channels, bad_images, background, max_pixels: as for :class:`rowdit.data.encoded.Decoding`.
        part: of a source without splits, which samples; see :func:`rowdit.data.encoded.part_rows`.
        class_names: one name a class. None: the file's own, from its Hugging Face metadata or a column of names.
        num_classes: where there are no names. None: the largest label decides.
        image_key: column of the images: bytes, or a struct with a field ``bytes``. None: one of ``IMAGE_NAMES``.
        label_key: column of the labels: integers, or the classes' names. None: one of ``LABEL_NAMES``.
        window: >= 1, row groups to be mixed. None: as many as 512 MiB hold, 4 to 64; all, in a uniform permutation,
            where the files have no more than 256 MiB.
        hash_contents: as for :func:`rowdit.data.encoded.digest_files`.
        root: names in errors and fingerprints are taken below it.

    Raises:
        DataError: a file that can't be read, no such column or one of another type, a label that is missing or out of
            range.
        ModuleNotFoundError: pyarrow isn't installed.
    """

    def __init__(
        self,
        files: Sequence[Path],
        image_size: int,
        *,
        channels: int = 3,
        bad_images: BadImages = "error",
        part: Part = "all",
        class_names: Sequence[str] | None = None,
        num_classes: int | None = None,
        image_key: str | None = None,
        label_key: str | None = None,
        background: tuple[int, int, int] = WHITE,
        max_pixels: int = MAX_PIXELS,
        window: int | None = None,
        hash_contents: bool | None = None,
        root: Path | None = None,
    ) -> None:
        decoding = Decoding(image_size, channels, bad_images, background, max_pixels)
        if window is not None and window < 1:
            raise ValueError(f"window {window} must be >= 1")
        self._files = list(files)
        root = Path(os.path.commonpath([path.parent for path in self._files])) if root is None else root
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self._readers: OrderedDict[int, Any] = OrderedDict()
        schema = self._reader(0).schema_arrow
        self._image_key = choose_column(schema, image_key, IMAGE_NAMES, "image_key", self._files[0])
        label_column = choose_column(schema, label_key, LABEL_NAMES, "label_key", self._files[0])
        labels, group_rows, group_bytes = self._read_labels(label_column)
        self._group_starts = np.concatenate([[0], np.cumsum([num for _, _, num in group_rows])])
        self._group_files = [(file, group) for file, group, _ in group_rows]
        number_labels, found_names = to_numbers(labels, names_in_metadata(schema, label_column), class_names)
        self._part_rows = some_rows(number_labels, part, str(root))
        number_labels = number_labels[self._part_rows]
        names = classes_of(number_labels, class_names or found_names, num_classes, self._full_name)
        few = sum(group_bytes) <= FEW_BYTES
        self._window = window or (len(group_rows) if few else _window(group_bytes))
        scanned = Scanned(f"parquet-{self._image_key}-{label_column}-{part}", self._files)
        super().__init__(str(root), number_labels, names, decoding, scanned=scanned)
        self.blocks = None if few and window is None else self._blocks()
        digest, kind = digest_files(self._files, root, hash_contents)
        mixed = f"-window{self._window}" if self.blocks else ""
        self.fingerprint = self._mark(f"parquet-{kind}{mixed}{'' if part == 'all' else f'-{part}'}", digest)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_groups": OrderedDict(), "_readers": OrderedDict()}

    def _blocks(self) -> Blocks:
        """The row groups, of the rows that are part of the dataset."""
        starts = np.searchsorted(self._part_rows[self._rows], self._group_starts)
        return Blocks(np.unique(starts), self._window)  # a group of which no row is left is none

    def _read_labels(self, column: str) -> tuple[Any, list[tuple[int, int, int]], list[int]]:
        """All labels; (file, group, number of rows) and the images' bytes of each row group."""
        import pyarrow

        pieces, rows, sizes = [], [], []
        for number, file in enumerate(self._files):
            reader = self._reader(number)
            for name in (column, self._image_key):
                if name not in reader.schema_arrow.names:
                    raise DataError(f"{file} has no column {name!r}, only {', '.join(reader.schema_arrow.names)}")
            pieces.append(reader.read(columns=[column]).column(column).combine_chunks())
            for group in range(reader.num_row_groups):
                facts = reader.metadata.row_group(group)
                rows.append((number, group, facts.num_rows))
                sizes.append(facts.total_byte_size)
            if pieces[-1].null_count:
                first = int(np.flatnonzero(pieces[-1].is_null())[0])
                raise DataError(f"{file}: row {first} has no {column}; {pieces[-1].null_count} such rows")
        return pyarrow.chunked_array(pieces), rows, sizes

    def _reader(self, number: int) -> Any:
        import_pyarrow()
        from pyarrow import ArrowException, parquet

        if number not in self._readers:
            try:
                self._readers[number] = parquet.ParquetFile(self._files[number])
            except (ArrowException, OSError, ValueError) as error:
                raise DataError(f"{self._files[number]} isn't a Parquet file that can be read ({error})") from error
            if len(self._readers) > 64:
                self._readers.popitem(last=False)[1].close()
        return self._readers[number]

    def _group_of(self, row: int) -> tuple[int, int]:
        """The row group, and the row in it."""
        row = int(self._part_rows[row])
        group = int(np.searchsorted(self._group_starts, row, side="right")) - 1
        return group, row - int(self._group_starts[group])

    def _open(self, row: int) -> io.BytesIO:
        group, place = self._group_of(row)
        if group in self._groups:
            self._groups.move_to_end(group)
        else:
            self._groups[group] = self._read_group(group)
            if len(self._groups) > self._window + 1:  # the end of a window and the beginning of the next
                self._groups.popitem(last=False)
        value = self._groups[group][place].as_py()
        value = value.get("bytes") if isinstance(value, dict) else value
        if value is None:
            raise BadImageError("", "the row has no image")
        return io.BytesIO(value)

    def _read_group(self, group: int) -> Any:
        from pyarrow import ArrowException

        file, number = self._group_files[group]
        try:
            table = self._reader(file).read_row_group(number, columns=[self._image_key])
        except (ArrowException, OSError) as error:
            raise DataError(f"{self._files[file]}: row group {number} can't be read ({error}); copy it anew") from error
        return table.column(self._image_key)

    def _name(self, row: int) -> str:
        group, place = self._group_of(row)
        file, number = self._group_files[group]
        first = next(index for index, (other, _) in enumerate(self._group_files) if other == file)
        before = int(self._group_starts[group] - self._group_starts[first])
        return f"{self._files[file].name}: row {before + place}"

    def _full_name(self, row: int) -> str:
        return f"{self._files[self._group_files[self._group_of(row)[0]][0]].parent}/{self._name(row)}"


def _window(group_bytes: Sequence[int]) -> int:
    least, most = _WINDOW_RANGE
    return max(least, min(most, int(_WINDOW_BYTES * len(group_bytes) / max(1, sum(group_bytes)))))


def choose_column(schema: pyarrow.Schema, key: str | None, usual: Sequence[str], option: str, file: Path | str) -> str:
    """The column of that name, or the one that has a usual name.

    Raises:
        DataError: there is none, or more than one; lists the columns.
    """
    columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
    if key is not None:
        if key not in schema.names:
            raise DataError(f"{file} has no column {key!r}; it has {columns}")
        return key
    found = [name for name in schema.names if name.lower() in usual]
    if len(found) != 1:
        raise DataError(
            f"{file}: {', '.join(found) or 'no column'} could be meant; name one by {option}. It has {columns}"
        )
    return found[0]


def names_in_metadata(schema: pyarrow.Schema, column: str) -> list[str] | None:
    """The classes' names as Hugging Face's ``datasets`` writes them into a schema."""
    try:
        facts = json.loads((schema.metadata or {})[b"huggingface"])
        return list(facts["info"]["features"][column]["names"])
    except (KeyError, TypeError, ValueError):
        return None


def to_numbers(
    labels: Any, known: Sequence[str] | None, class_names: Sequence[str] | None
) -> tuple[np.ndarray, list[str] | None]:
    """Labels as (N,) int64, and the classes' names if they have any.

    Args:
        labels: a pyarrow array of integers or strings.
        known: names from the metadata, for integers.
        class_names: their order, for strings; None sorts them.

    Raises:
        DataError: labels of another type, or a name that isn't among ``class_names``.
    """
    from pyarrow import types

    if types.is_integer(labels.type):
        return labels.to_numpy().astype(np.int64), list(known) if known else None
    if not (types.is_string(labels.type) or types.is_large_string(labels.type)):
        raise DataError(f"labels are {labels.type}; they must be integers or the classes' names. Choose by label_key")
    names = labels.to_pylist()
    order = sorted(set(names)) if class_names is None else list(class_names)
    unknown = set(names) - set(order)
    if unknown:
        raise DataError(
            f"labels hold {sorted(unknown)[0]!r}, which is not one of the classes {', '.join(order[:5])}, ..."
        )
    numbers = {name: number for number, name in enumerate(order)}
    return np.array([numbers[name] for name in names], np.int64), order


def import_pyarrow() -> None:
    """Raise a ModuleNotFoundError that says how to install pyarrow, if it isn't."""
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}; pip install '.[rowdit,data]' in the clone brings it", name="pyarrow"
        ) from error


def open_parquet(
    pattern: str | os.PathLike[str], split: Literal["train", "reference"], image_size: int, **options: Any
) -> ParquetImages:
    """The training or the reference samples of the files that a pattern names (:mod:`rowdit.data.shard_files`).

    Raises:
        DataError: as from :class:`ParquetImages`, or no such files.
    """
    root, files = find_files(pattern, (".parquet",))
    files, part = files_of_split(root, files, split)
    return ParquetImages(files, image_size, **{"part": part, "root": root, **options})
