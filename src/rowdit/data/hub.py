"""Image datasets through Hugging Face's ``datasets``: by their name on the hub, or from a folder on disk.

    hf:NAME             from the hub, fetched once into the library's own cache
    hf:NAME@CONFIG      one of its configurations
    hf:FOLDER           what ``save_to_disk`` wrote, or any folder that ``load_dataset`` can open

The library keeps a dataset as Arrow files that it maps into memory, so any row is read by itself and the order is a
uniform permutation. Images stay encoded until :mod:`rowdit.data.decode` has them.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rowdit.data.batch import DataError
from rowdit.data.decode import MAX_PIXELS, WHITE, BadImageError
from rowdit.data.encoded import FEW_BYTES, BadImages, Decoding, EncodedImages, Part, classes_of, some_rows
from rowdit.data.parquet import IMAGE_NAMES, LABEL_NAMES, choose_column, to_numbers
from rowdit.data.shard_files import REFERENCE_NAMES


class HubImages(EncodedImages):
    """A split of a Hugging Face dataset; a :class:`rowdit.data.Dataset`.

    Args:
        rows: the ``datasets.Dataset``.
        place: what errors and the fingerprint call it.
        image_size, channels, bad_images, background, max_pixels: as for :class:`rowdit.data.encoded.Decoding`.
        part: of a source without splits, which samples.
        class_names, num_classes, image_key, label_key: as for :class:`rowdit.data.parquet.ParquetImages`.

    Raises:
        DataError: no such column or one of another type, or a label out of range.
    """

    def __init__(
        self,
        rows: Any,
        place: str,
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
    ) -> None:
        from datasets import Image

        decoding = Decoding(image_size, channels, bad_images, background, max_pixels)
        schema = rows.features.arrow_schema
        self._image_key = choose_column(schema, image_key, IMAGE_NAMES, "image_key", place)
        label_column = choose_column(schema, label_key, LABEL_NAMES, "label_key", place)
        if isinstance(rows.features[self._image_key], Image):
            rows = rows.cast_column(self._image_key, Image(decode=False))
        self._hub_rows = rows.select_columns([self._image_key])
        column = rows.select_columns([label_column]).with_format("arrow")[:].column(label_column)
        known = getattr(rows.features[label_column], "names", None)
        if column.null_count:
            raise DataError(f"{place}: {column.null_count} rows have no {label_column}")
        labels, found_names = to_numbers(column, known, class_names)
        self._hub_name = place
        self._part_rows = some_rows(labels, part, place)
        names = classes_of(labels[self._part_rows], class_names or found_names, num_classes, self._name)
        super().__init__(place, labels[self._part_rows], names, decoding)
        digest, kind = self._digest(labels)
        self.fingerprint = self._mark(f"hf-{kind}" if part == "all" else f"hf-{kind}-{part}", digest)

    def _digest(self, labels: np.ndarray) -> tuple[str, str]:
        """A hash over labels and images: their bytes where these are few, otherwise their lengths."""
        lengths = [
            lengths_of(batch.column(self._image_key)) for batch in self._hub_rows.with_format("arrow").iter(10_000)
        ]
        digest = hashlib.sha256(labels.astype("<i8").tobytes())
        digest.update(np.concatenate(lengths).astype("<i8").tobytes())
        if sum(int(some.sum()) for some in lengths) > FEW_BYTES:
            return digest.hexdigest(), "lengths"
        for row in range(len(self._hub_rows)):
            value = self._value(row)
            # Of files the name alone: the folder may be elsewhere tomorrow.
            digest.update(value if isinstance(value, bytes) else os.path.basename(str(value)).encode())
        return digest.hexdigest(), "contents"

    def _value(self, row: int) -> Any:
        """A row's encoded image: bytes, or the path of a file."""
        value = self._hub_rows[row][self._image_key]
        if isinstance(value, dict):
            return value["path"] if value.get("bytes") is None else value["bytes"]
        return value

    def _open(self, row: int) -> Path | io.BytesIO:
        value = self._value(int(self._part_rows[row]))
        if not isinstance(value, bytes | str):
            raise BadImageError("", "the row has no encoded image")
        return io.BytesIO(value) if isinstance(value, bytes) else Path(value)

    def _name(self, row: int) -> str:
        return f"{self._hub_name}: row {int(self._part_rows[row])}"


def lengths_of(column: Any) -> np.ndarray:
    """(N,) int64, the bytes of each image of an Arrow column; 0 where only a path is known."""
    from pyarrow import compute, types

    if types.is_struct(column.type):
        column = compute.struct_field(column, "bytes")
    return compute.fill_null(compute.binary_length(column), 0).to_numpy().astype(np.int64)


def open_hub(place: str, split: Literal["train", "reference"], image_size: int, **options: Any) -> HubImages:
    """The training or the reference images of a dataset.

    The training split is ``train``, the reference split the first there is of ``reference``, ``val``, ``valid``,
    ``validation`` and ``test``. Where there is but one split, every tenth sample of each class is held out.

    Args:
        place: NAME, NAME@CONFIG or FOLDER; the module's docstring says more.
        split: which.
        image_size, options: as for :class:`HubImages`; also ``revision``, of the hub.

    Raises:
        DataError: the library can't open it, or as from :class:`HubImages`.
        ModuleNotFoundError: datasets isn't installed.
    """
    splits = _load(place, options.pop("revision", None))
    reference = [name for name in REFERENCE_NAMES if name in splits]
    if "train" in splits and reference:
        name, part = ("train" if split == "train" else reference[0]), "all"
    elif len(splits) == 1:
        name, part = next(iter(splits)), split
    else:
        raise DataError(
            f"hf:{place} has the splits {', '.join(splits)}; train and one of {', '.join(REFERENCE_NAMES)} "
            "are needed, or a single one"
        )
    return HubImages(splits[name], f"hf:{place}/{name}", image_size, **{"part": part, **options})


def _load(place: str, revision: str | None) -> dict[str, Any]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}; pip install '.[rowdit,data]' in the clone brings it", name=error.name
        ) from error
    folder = Path(os.path.expanduser(place))
    name, _, config = place.partition("@")
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            loaded = datasets.load_from_disk(str(folder))
        elif folder.is_dir():
            loaded = datasets.load_dataset(str(folder))
        else:
            loaded = datasets.load_dataset(name, config or None, revision=revision)
    except Exception as error:  # the library, its builders and the hub have many
        text = " ".join(str(error).split())[:300]
        raise DataError(f"hf:{place} can't be opened ({text}); name a folder, or a dataset on the hub") from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
