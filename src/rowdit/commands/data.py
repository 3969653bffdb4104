"""`rowdit data get`: public data sets, checked by their hashes."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rowdit.commands.parsing import fail, parse

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@dataclass(frozen=True)
class DataGetOptions:
    """Fetches a data set from its public address and checks its hashes.

    Args:
        folder: where to put it.
        url: of a mirror, the folder that holds the four files.
    """

    folder: Path | None = None
    url: str | None = None


def run(arguments: list[str]) -> int:
    if arguments[:2] != ["get", "fashion-mnist"]:
        if {"-h", "--help"}.intersection(arguments):
            print("usage: rowdit data get fashion-mnist [--folder FOLDER] [--url URL]")
            return 0
        return fail("usage: rowdit data get fashion-mnist [--folder FOLDER] [--url URL]")
    options = parse("data get fashion-mnist", DataGetOptions, arguments[2:])
    from rowdit.data.download import FASHION_MNIST_URL, get_fashion_mnist

    with ShownDownloads() as shown:
        folder = get_fashion_mnist(options.folder, options.url or FASHION_MNIST_URL, on_progress=shown)
    print(folder)
    return 0


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
