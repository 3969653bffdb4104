"""What the operating system says when a checkpoint can't be written, in words for the user."""

from __future__ import annotations

import errno
from pathlib import Path

__all__ = ["os_error", "why_not_written"]


def os_error(error: BaseException) -> OSError | None:
    """The error of the operating system behind what DCP raises."""
    if isinstance(error, OSError):
        return error
    inner = [failure[0] for failure in getattr(error, "failures", {}).values()]
    for cause in [*inner, error.__cause__, error.__context__]:
        found = os_error(cause) if cause is not None else None
        if found:
            return found
    return None


def why_not_written(error: OSError | None, no_room: bool, path: Path, last: Path | None) -> str:
    """The message for a checkpoint at `path` that failed with `error`.

    Args:
        error: as `os_error` finds it.
        no_room: whether the disk has none.
        path: of the checkpoint.
        last: of the last good one.
    """
    kept = f"the last good checkpoint, {last}, is kept" if last else "there is no earlier checkpoint"
    again = "run the same command again"
    if no_room or (error is not None and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return f"can't write {path}: the disk is full; {kept}. Make room and {again}."
    if error is not None and error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"can't write {path}: {error.filename} is in the way; {kept}. Remove it and {again}."
    return f"can't write {path}: {error}; {kept}. Make room and {again}."
