"""`rowdit data get`: public data sets, checked by their hashes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rowdit.commands.parsing import fail, parse


@dataclass(frozen=True)
class DataGetOptions:
    """Fetches a data set from its public address and checks its hashes.

    Args:
        folder: where to put it.
    """

    folder: Path | None = None


def run(arguments: list[str]) -> int:
    if arguments[:2] != ["get", "fashion-mnist"]:
        if {"-h", "--help"}.intersection(arguments):
            print("usage: rowdit data get fashion-mnist [--folder FOLDER]")
            return 0
        return fail("usage: rowdit data get fashion-mnist [--folder FOLDER]")
    options = parse("data get fashion-mnist", DataGetOptions, arguments[2:])
    from rowdit.data.download import get_fashion_mnist

    print(get_fashion_mnist(options.folder))
    return 0
