"""`rowdit data get`: public data sets, checked by their hashes. `rowdit data check`: what a source holds."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from rowdit.commands.limits import check_count, check_images, check_processes
from rowdit.commands.outputs import check_folder
from rowdit.commands.parsing import fail, parse

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from rowdit.data import Dataset


@dataclass(frozen=True)
class DataGetOptions:
    """Fetches a data set from its public address and checks its hashes.

    Args:
        folder: where to put it.
        url: of a mirror, the folder that holds the four files.
    """

    folder: Path | None = None
    url: str | None = None


@dataclass(frozen=True)
class DataCheckOptions:
    """Opens both splits of a source, decodes every image, and says how many each class has and which are bad.

    Args:
        source: as `--data.source` of `rowdit train`: folder:PATH, tar:PATTERN, parquet:PATTERN, hf:NAME, ...
        image_size: pixels a side.
        channels: 3 for RGB, 1 for grey; by default what the source has.
        num_classes: that labels are checked against; by default the source's own.
        image_key: the member of a sample, or the column, that is the image; by default the usual one.
        label_key: likewise the label.
        num_workers: processes that decode.
        show: bad files to be listed.
    """

    source: tyro.conf.Positional[str]
    image_size: int = 64
    channels: int | None = None
    num_classes: int | None = None
    image_key: str | None = None
    label_key: str | None = None
    num_workers: int = 0
    show: int = 20


CHECKED_AT_ONCE = 64  # images of a piece

USAGE = """\
usage: rowdit data get fashion-mnist [--folder FOLDER] [--url URL]
       rowdit data check SOURCE [OPTIONS]        rowdit data check --help says more"""


def run(arguments: list[str]) -> int:
    if arguments[:2] == ["get", "fashion-mnist"]:
        return _get(arguments[2:])
    if arguments[:1] == ["check"]:
        return _check(parse("data check", DataCheckOptions, arguments[1:]))
    if {"-h", "--help"}.intersection(arguments):
        print(USAGE)
        return 0
    return fail(USAGE)


def _get(arguments: list[str]) -> int:
    options = parse("data get fashion-mnist", DataGetOptions, arguments)
    check_folder(options.folder, "--folder")
    from rowdit.data.download import FASHION_MNIST_URL, get_fashion_mnist

    with ShownDownloads() as shown:
        folder = get_fashion_mnist(options.folder, options.url or FASHION_MNIST_URL, on_progress=shown)
    print(folder)
    return 0


def _check(options: DataCheckOptions) -> int:
    """0 if every image can be used, 1 if some can't, 2 if a split can't be opened."""
    from rowdit.data import DataError, check_num_classes, open_dataset

    check_processes("num_workers", options.num_workers, least=0)
    check_count("show", options.show, least=0)
    check_images(CHECKED_AT_ONCE, options.image_size, options.channels, name="images at once:")
    names = ("channels", "num_classes", "image_key", "label_key")
    chosen: dict[str, Any] = {name: getattr(options, name) for name in names}
    size = None if options.source.startswith("latents:") else options.image_size
    num_bad = 0
    splits: tuple[Literal["train", "reference"], ...] = ("train", "reference")
    for split in splits:
        try:
            dataset = open_dataset(options.source, split, size, **chosen)
            check_num_classes(dataset, options.source, options.num_classes)
        except DataError as error:
            return fail(f"{split}: {error}")
        counts, bad_files = _decode_all(dataset, options.num_workers, split)
        print(f"{split}: {sum(counts)} usable images in {dataset.num_classes} classes\n  {dataset.fingerprint}")
        for name, count in zip(dataset.class_names, counts, strict=True):
            print(f"  {count:8d}  {name}")
        for file, reason in sorted(bad_files.items())[: options.show]:
            print(f"  bad: {file}: {reason}")
        if len(bad_files) > options.show:
            print(f"  ... {len(bad_files)} bad in all; --show lists more")
        num_bad += len(bad_files)
    return 1 if num_bad else 0


def _decode_all(dataset: Dataset, num_workers: int, split: str) -> tuple[list[int], dict[str, str]]:
    """How many usable images each class has, and the bad files."""
    from functools import partial

    from rowdit.commands.encode import Bar
    from rowdit.data.loader import read_ahead
    from rowdit.encode.job import cut, read_piece

    counts = [0] * dataset.num_classes
    pieces = read_ahead(
        dataset, cut(range(len(dataset)), CHECKED_AT_ONCE), partial(read_piece, skip_bad=True), num_workers=num_workers
    )
    with Bar(f"decode {split}", len(dataset)) as bar:
        for number, (_, labels, _) in enumerate(pieces, start=1):
            for label in labels.tolist():
                counts[label] += 1
            bar(min(CHECKED_AT_ONCE * number, len(dataset)), len(dataset))
    return counts, dict(getattr(dataset, "bad_files", {}))


class ShownDownloads:
    """What has come of each file, on the error stream: bars on a terminal, otherwise a line for every tenth."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}

    def __call__(self, name: str, num_done: int, num_bytes: int) -> None:
        """As :data:`rowdit.data.download.OnProgress`."""
        if self._progress is not None:
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=num_bytes)
            self._progress.update(self._tasks[name], completed=num_done)
            return
        tenths = 10 * num_done // num_bytes
        if tenths > self._tenths.get(name, -1):
            self._tenths[name] = tenths
            print(f"{name}: {num_done / 1e6:.1f} of {num_bytes / 1e6:.1f} MB", file=sys.stderr, flush=True)

    def __enter__(self) -> ShownDownloads:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        console = Console(stderr=True)
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._progress = self._stack.enter_context(Progress(*columns, console=console))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
