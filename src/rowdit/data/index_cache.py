"""What was found out about files by reading all of them, kept until one of them changes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np


def cache_root() -> Path:
    """Where indexes are kept: ``$XDG_CACHE_HOME/rowdit``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rowdit"


def cached_arrays(kind: str, files: Sequence[Path], make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What ``make`` gives, kept on disk until one of the files changes its name, size or time.

    One process makes it while others on the machine wait. Where the cache can't be written, it is made anew each time.

    Args:
        kind: names the sort of index and its version.
        files: that it is made from.
        make: makes it.
    """
    from safetensors.numpy import load_file, save_file

    digest = hashlib.sha256(kind.encode())
    for file in files:
        status = file.stat()
        digest.update(f"\n{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    name = kind.partition("-")[0]  # what follows may hold any characters
    path = cache_root() / "index" / f"{name}-{digest.hexdigest()[:32]}.safetensors"
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(path.with_suffix(".lock"), "w"))
        except OSError:
            return make()
        with contextlib.suppress(OSError):  # without locks two processes may make it, and the last one's stays
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return load_file(path)
        except Exception:  # missing, or cut off: safetensors has its own errors
            arrays = make()
        part = path.with_suffix(f".part-{os.getpid()}")
        try:
            save_file(arrays, part)
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
    return arrays
