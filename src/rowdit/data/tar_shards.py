"""Tar shards in the WebDataset format, with random access.

    shard-000000.tar:   0001.jpg  0001.cls  0002.jpg  0002.cls  ...

A sample is a run of members with the same name up to the first dot of its last part; ``.jpg``, ``.png`` and so on hold
its image, ``.cls`` its label as a number, or ``.json`` a table with its label. (Conventions: the WebDataset format,
https://github.com/webdataset/webdataset; folders, hidden and special members are ignored.)

WebDataset itself streams shards through shuffle buffers, so what comes when depends on the number of workers and ranks.
Here each shard is walked over once, header by header, and an index of places, sizes and labels is kept in the cache
folder; then any image is one read at a known place, and the order is a function of (seed, images seen). Shards must lie
on a file system and be plain tar, for a compressed one can't be entered in the middle.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rowdit.data.batch import DataError
from rowdit.data.decode import MAX_PIXELS, WHITE, BadImageError
from rowdit.data.encoded import BadImages, Decoding, EncodedImages, Part, Scanned, classes_of, digest_files, some_rows
from rowdit.data.image_folder import EXTENSIONS
from rowdit.data.index_cache import cached_arrays
from rowdit.data.shard_files import files_of_split, find_files

_MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")  # WebDataset's: the key ends at the first dot of the last part
_IMAGE_KEYS = frozenset(extension[1:] for extension in EXTENSIONS)
_LABEL_KEYS = ("cls", "json")
_MAX_OPEN_FILES = 64
_NO_LABEL = -1


class TarShards(EncodedImages):
    """Labelled images in tar shards; a :class:`rowdit.data.Dataset`.

    Args:
        files: the shards, in their order.
        image_size, channels, bad_images, background, max_pixels: as for :class:`rowdit.data.encoded.Decoding`.
        part: of a source without splits, which samples; see :func:`rowdit.data.encoded.part_rows`.
        class_names: one name a class.
        num_classes: where there are no names. None: the largest label decides, which is one too few if the last class
            has no sample.
        image_key: the extension, without the first dot, of the member that is the image. None: any usual one; a sample
            with two is refused.
        label_key: ``"cls"``; or in ``.json`` the key of the label. None: ``.cls``, or else ``label`` in ``.json``.
        hash_contents: as for :func:`rowdit.data.encoded.digest_files`.
        root: names in errors and fingerprints are taken below it.

    Raises:
        DataError: a shard that isn't plain tar or is cut off; a sample without an image or a label, or with a label out
            of range; names shard and sample.
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
        hash_contents: bool | None = None,
        root: Path | None = None,
    ) -> None:
        decoding = Decoding(image_size, channels, bad_images, background, max_pixels)
        self._files = list(files)
        root = Path(os.path.commonpath([path.parent for path in self._files])) if root is None else root
        keys = f"{image_key or ''}-{label_key or ''}"
        index = cached_arrays(f"tar1-{keys}", self._files, lambda: index_shards(self._files, image_key, label_key))
        rows = some_rows(index["labels"], part, str(root))
        self._shard, self._header, self._offset, self._size = (
            index[name][rows] for name in ("shard", "header", "offset", "size")
        )
        self._descriptors: OrderedDict[int, int] = OrderedDict()
        labels = index["labels"][rows]
        names = classes_of(labels, class_names, num_classes, self._full_name)
        super().__init__(str(root), labels, names, decoding, scanned=Scanned(f"tar-{keys}-{part}", self._files))
        digest, kind = digest_files(self._files, root, hash_contents)
        self.fingerprint = self._mark(f"tar-{kind}-{part}" if part != "all" else f"tar-{kind}", digest)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptors": OrderedDict()}  # files are opened anew in each process

    def __del__(self) -> None:
        for descriptor in getattr(self, "_descriptors", {}).values():
            os.close(descriptor)

    def _open(self, row: int) -> io.BytesIO:
        size = int(self._size[row])
        # pread has no position to share, so processes that were forked may use the same descriptor.
        data = os.pread(self._descriptor(int(self._shard[row])), size, int(self._offset[row]))
        if len(data) != size:
            raise BadImageError("", f"its shard ends after {len(data)} of its {size} bytes")
        return io.BytesIO(data)

    def _descriptor(self, shard: int) -> int:
        if shard in self._descriptors:
            self._descriptors.move_to_end(shard)
            return self._descriptors[shard]
        if len(self._descriptors) >= _MAX_OPEN_FILES:
            os.close(self._descriptors.popitem(last=False)[1])
        self._descriptors[shard] = os.open(self._files[shard], os.O_RDONLY)
        return self._descriptors[shard]

    def _name(self, row: int) -> str:
        file = self._files[int(self._shard[row])]
        return f"{file.name}: {_member_name(file, int(self._header[row]))}"

    def _full_name(self, row: int) -> str:
        return f"{self._files[int(self._shard[row])].parent}/{self._name(row)}"


def index_shards(files: Sequence[Path], image_key: str | None, label_key: str | None) -> dict[str, np.ndarray]:
    """Where the image of each sample lies, and its label: arrays (N,) int64 shard, header, offset, size, labels."""
    rows = [(shard, *sample) for shard, file in enumerate(files) for sample in _samples_of(file, image_key, label_key)]
    columns = np.array(rows, np.int64).reshape(len(rows), 5)
    names = ("shard", "header", "offset", "size", "labels")
    return {name: np.ascontiguousarray(columns[:, place]) for place, name in enumerate(names)}


def _samples_of(file: Path, image_key: str | None, label_key: str | None) -> Iterator[tuple[int, int, int, int]]:
    """(header, offset, size, label) of each sample of a shard."""
    key = ""
    members: dict[str, tarfile.TarInfo] = {}
    with _open_tar(file) as tar:
        for member in _members_of(tar, file):
            found = _MEMBER.fullmatch(member.name)
            if not member.isfile() or not found:
                continue
            name, extension = found.groups()
            if name != key:
                if members:
                    yield _sample(tar, file, key, members, image_key, label_key)
                key, members = name, {}
            if extension.lower() in members:
                raise DataError(f"{file}: {member.name} comes twice; give samples names of their own")
            members[extension.lower()] = member
        if members:
            yield _sample(tar, file, key, members, image_key, label_key)


def _open_tar(file: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(file, "r:")
    except (tarfile.TarError, EOFError) as error:
        raise DataError(
            f"{file} isn't a plain tar file ({error}); a compressed one must be unpacked first: gunzip {file}"
        ) from error
    except OSError as error:
        raise DataError(f"{file} can't be read ({error.strerror})") from error


def _members_of(tar: tarfile.TarFile, file: Path) -> Iterator[tarfile.TarInfo]:
    size = file.stat().st_size
    try:
        while (member := tar.next()) is not None:
            if member.offset_data + member.size > size:
                raise DataError(f"{file} is cut off in {member.name}; copy it anew")
            yield member
            tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps all that it has seen
    except tarfile.TarError as error:
        raise DataError(f"{file} is damaged ({error}); copy it anew") from error
    # tarfile takes a header that it can't read, or the end of the file, for the end of the archive.
    with open(file, "rb") as raw:
        raw.seek(tar.offset)
        block = raw.read(tarfile.BLOCKSIZE)
    if block != tarfile.NUL * tarfile.BLOCKSIZE:
        what = f"is damaged at byte {tar.offset}" if block else "has no end mark, so it is cut off"
        raise DataError(f"{file} {what}; copy it anew")


def _sample(
    tar: tarfile.TarFile,
    file: Path,
    key: str,
    members: dict[str, tarfile.TarInfo],
    image_key: str | None,
    label_key: str | None,
) -> tuple[int, int, int, int]:
    wanted = [image_key] if image_key else sorted(_IMAGE_KEYS.intersection(members))
    images = [members[name] for name in wanted if name in members]
    has = f"it has {', '.join(sorted(members))}"
    if len(images) != 1:
        what = (
            f"{len(images)} images; say which by image_key"
            if images
            else f"no image (.{image_key or 'jpg, .png, ...'})"
        )
        raise DataError(f"{file}: sample {key} has {what}; {has}")
    image = images[0]
    return image.offset, image.offset_data, image.size, _label(tar, file, key, members, label_key)


def _label(
    tar: tarfile.TarFile, file: Path, key: str, members: dict[str, tarfile.TarInfo], label_key: str | None
) -> int:
    where, way_out = f"{file}: sample {key}", "name the label's key by label_key"
    if "cls" in members and label_key in (None, "cls"):
        text = _content(tar, members["cls"])
        try:
            return int(text)
        except ValueError:
            raise DataError(f"{where}: its .cls holds {text[:40]!r}, not a number") from None
    if "json" not in members or label_key == "cls":
        raise DataError(f"{where} has no label (.{' or .'.join(_LABEL_KEYS)}); it has {', '.join(sorted(members))}")
    try:
        table = json.loads(_content(tar, members["json"]))
    except ValueError as error:
        raise DataError(f"{where}: its .json can't be read ({error})") from error
    name = label_key or "label"
    label = table.get(name) if isinstance(table, dict) else None
    if not isinstance(label, int) or isinstance(label, bool):
        raise DataError(f"{where}: its .json has {label!r} as {name}, not a number; {way_out}")
    return label


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return b"" if file is None else file.read()


def _member_name(file: Path, header: int) -> str:
    """The name of the member whose header is there; only for messages, so it is read when it is needed."""
    try:
        with open(file, "rb") as raw:
            raw.seek(header)
            with tarfile.open(fileobj=raw, mode="r:") as tar:
                member = tar.next()
                return member.name if member else f"at byte {header}"
    except (OSError, tarfile.TarError):
        return f"at byte {header}"


def open_tar(
    pattern: str | os.PathLike[str], split: Literal["train", "reference"], image_size: int, **options: Any
) -> TarShards:
    """The training or the reference samples of the shards that a pattern names (:mod:`rowdit.data.shard_files`).

    Raises:
        DataError: as from :class:`TarShards`, or no such files.
    """
    root, files = find_files(pattern, (".tar",))
    files, part = files_of_split(root, files, split)
    return TarShards(files, image_size, **{"part": part, "root": root, **options})
