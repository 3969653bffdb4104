"""One writer per folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rowdit.train.config import ConfigError


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds `folder/.lock`, made if absent, so that a second process can't write into the same runs.

    The lock goes with the process, however it ends; the empty file stays.

    Raises:
        ConfigError: another process holds it, or the folder can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(f"can't write into {folder}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is writing into {folder}; wait for it, or choose another --out"
            ) from None
        yield
