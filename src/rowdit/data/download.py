"""Fetch the full Fashion-MNIST: resumable, checked, and there either whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import http.client
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rowdit.data import fashion_mnist
from rowdit.data.batch import DataError

FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"  # plain http: the hashes below guard

# The published files: bytes and sha256. (Their MD5 are those in the README of github.com/zalandoresearch/fashion-mnist;
# Debian's copies differ by the name and the time in the gzip header alone.)
FASHION_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    "train-labels-idx1-ubyte.gz": (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    "t10k-images-idx3-ubyte.gz": (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    "t10k-labels-idx1-ubyte.gz": (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
}

_CHUNK_BYTES = 1 << 16
_NUM_ATTEMPTS = 3  # how often a broken connection is taken up again
_TIMEOUT_SECONDS = 30.0

OnProgress = Callable[[str, int, int], None]


class _BrokenConnectionError(Exception):
    """The server or the network stopped in the middle."""


def get_fashion_mnist(
    destination: str | os.PathLike[str] | None = None,
    url: str = FASHION_MNIST_URL,
    on_progress: OnProgress | None = None,
) -> Path:
    """Fetch the four files of the full set; those that are there and right are left alone.

    Args:
        destination: a folder, made where it is missing; None is the cache, where :func:`fashion_mnist.full` looks.
        url: the folder that they are fetched from; a mirror, for one. http or https.
        on_progress: called with (file name, bytes there, bytes in all), after each 64 KiB.

    Returns:
        The folder.

    Raises:
        DataError: no network, a refusal by the server, no disk or permission, or bytes that aren't the published ones.
            What has come is kept as ``NAME.part``, and the next call goes on from there (wrong bytes are deleted).
    """
    folder = fashion_mnist.cache_folder() if destination is None else Path(destination).expanduser()
    if not url.startswith(("http://", "https://")):
        raise DataError(f"{url!r} is no http or https address; for files that are on disk, name their folder")
    missing = [name for name in FASHION_MNIST_FILES if not _is_right(folder, name)]
    with _disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        needed = sum(FASHION_MNIST_FILES[name][0] for name in missing)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise DataError(f"{folder}: {needed} bytes are to be fetched and {free} are free; name another folder")
    for name in missing:
        num_bytes, sha256 = FASHION_MNIST_FILES[name]
        download(f"{url.rstrip('/')}/{name}", folder / name, num_bytes, sha256, on_progress)
    return folder


def _is_right(folder: Path, name: str) -> bool:
    try:
        fashion_mnist.read_idx(folder, name, num_dims=3 if "images" in name else 1)
    except DataError:
        return False
    return True


def download(url: str, path: Path, num_bytes: int, sha256: str, on_progress: OnProgress | None = None) -> None:
    """Fetch one file; ``path`` appears when all of it has come and its hash is right.

    Args:
        url: http or https.
        path: where it goes, in a folder that exists. ``path`` + ``.part`` holds what has come so far.
        num_bytes: its known size.
        sha256: its known hash, hexadecimal.
        on_progress: called with (file name, bytes there, num_bytes).

    Raises:
        DataError: as for :func:`get_fashion_mnist`.
    """
    part = path.with_name(path.name + ".part")
    with _disk_errors(path.parent), open(part, "ab") as file:
        _lock(file, part)
        try:
            _receive(
                url, file, num_bytes, lambda done: on_progress(path.name, done, num_bytes) if on_progress else None
            )
            _check(url, part, num_bytes, sha256)
        except BaseException:
            if part.stat().st_size == 0:
                part.unlink()
            raise
        os.fsync(file.fileno())
        os.replace(part, path)


def _receive(url: str, file: BinaryIO, num_bytes: int, on_bytes: Callable[[int], None]) -> None:
    """Append to ``file`` until it has ``num_bytes`` (or more, if the server sends more)."""
    reason = ""
    for _ in range(_NUM_ATTEMPTS):
        try:
            for offset, chunk in _chunks(url, file.tell()) if file.tell() < num_bytes else ():
                if offset != file.tell():  # the server began anew
                    file.truncate(offset)
                    file.seek(offset)
                file.write(chunk)
                file.flush()
                on_bytes(file.tell())
                if file.tell() > num_bytes:
                    break
        except _BrokenConnectionError as error:
            reason = f" ({error})"
        if file.tell() >= num_bytes:
            return
    raise DataError(
        f"{url}: the connection broke{reason} after {file.tell()} of {num_bytes} bytes; they are kept, and the same "
        f"command goes on from there"
    )


def _chunks(url: str, start: int) -> Iterator[tuple[int, bytes]]:
    """What the server sends of ``url`` from byte ``start`` on, or from byte 0 if it can't: (offset, bytes)."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            offset = start if response.status == 206 else 0
            while chunk := response.read(_CHUNK_BYTES):
                yield offset, chunk
                offset += len(chunk)
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:  # nothing there from ``start`` on: what is here isn't this file's beginning
            yield from _chunks(url, 0)
            return
        raise DataError(f"{url}: the server answered {error.code} {error.reason}; try another address") from error
    except urllib.error.URLError as error:
        raise DataError(f"{url} can't be reached ({error.reason}); is there a network?") from error
    except (http.client.HTTPException, OSError) as error:
        raise _BrokenConnectionError(str(error) or type(error).__name__) from error


def _check(url: str, part: Path, num_bytes: int, sha256: str) -> None:
    content = part.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        os.truncate(part, 0)
        raise DataError(
            f"{url} sent {len(content)} bytes with sha256 {digest}, not {num_bytes} with {sha256}; they were deleted. "
            f"Is a proxy or a login page in between? Otherwise try another address"
        )


def _lock(file: BinaryIO, part: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DataError(f"{part} is being written by another process; wait for it") from error
    except OSError:
        pass  # a file system without locks; the hash would still find two writers out


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"{folder}: the disk is full; make room, or name another folder") from error
        raise DataError(f"{folder} can't be used ({error}); name another folder") from error
