"""Where a verb is to write: checked before any work is done, in the same words for all verbs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rowdit.commands.ranks import rank
from rowdit.train.plain import ConfigError

LOCK = ".lock"


def check_folder(path: Path | None, option: str = "--out") -> None:
    """Refuses what can't become a folder to write into. Rank 0 checks, for it writes.

    Args:
        path: of the folder, which needn't exist; None is in order.
        option: that the path was given by.

    Raises:
        ConfigError: naming the option, the path, what is in the way, and the way out.
    """
    if path is not None and rank() == 0:
        _check(path, option, wanted="folder")


def check_file(path: Path | None, option: str = "--out", *, suffix: str = "", example: str = "name") -> None:
    """The same for a file, which may exist and is then replaced.

    Args:
        path: of the file.
        option: that it was given by.
        suffix: that its name must have; empty is any.
        example: of a name, to be shown.
    """
    if path is None or rank() > 0:
        return
    if suffix and path.suffix != suffix and not path.is_dir():
        raise ConfigError(f"{option} {path}: the name must end in {suffix}, such as {path.with_suffix(suffix)}")
    _check(path, option, wanted="file", example=f"{example}{suffix}")


def _check(path: Path, option: str, wanted: str, example: str = "name") -> None:
    try:
        folder = path if wanted == "folder" else path.parent
        if wanted == "file" and path.is_dir():
            raise ConfigError(f"{option} {path} is a folder; name a file, such as {path / example}")
        if wanted == "folder" and path.is_file():
            raise ConfigError(f"{option} {path} is a file; name a folder")
        if path.is_symlink() and not path.exists():
            raise ConfigError(f"{option} {path} is a link to what isn't there; remove it, or name another {wanted}")
        if path.exists() and not (path.is_dir() or path.is_file()):
            raise ConfigError(f"{option} {path} is neither a file nor a folder; name another {wanted}")
        there = next(place for place in (folder, *folder.parents) if place.exists())
        if not there.is_dir():
            raise ConfigError(f"{option} {path}: {there} is a file, so nothing can lie in it; name another {wanted}")
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{option} {str(path)[:99]!r} can't be a path here: {reason}; name another {wanted}"
        ) from None
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: can't write into {there} ({error.strerror}); name another {wanted}, or make room or "
            "give permission there"
        ) from None


@contextmanager
def no_empty_folder(folder: Path) -> Iterator[None]:
    """Where the block raises, takes the folders away again that were made in it and hold nothing but a lock."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        yield
    except BaseException:
        if folder in made and folder.is_dir() and [entry.name for entry in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink(missing_ok=True)
        for place in made:
            try:
                place.rmdir()
            except OSError:
                break
        raise
