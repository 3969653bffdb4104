"""Published weights: a file of the user's or a download, refused unless its hash is the published one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightsFile:
    """A file of weights that others published.

    Args:
        name: of the file.
        url: where it is published.
        num_bytes: its size.
        sha256: its hash, hexadecimal.
    """

    name: str
    url: str
    num_bytes: int
    sha256: str

    @property
    def cached(self) -> Path:
        """Where a download of it is kept."""
        from rowdit.data.fashion_mnist import cache_folder

        return cache_folder().parent / "weights" / self.name

    def find(self, path: Path | None = None) -> Path:
        """The user's file, or the download that is there.

        Raises:
            FileNotFoundError: neither; the message says what can be done.
        """
        if path is not None and not path.is_file():
            raise FileNotFoundError(f"there is no file {path}; it should be {self.name}, from {self.url}")
        found = self.cached if path is None else path
        if not found.is_file():
            raise FileNotFoundError(
                f"the weights {self.name} aren't here ({self.cached}). They are published at {self.url} "
                f"({self.num_bytes / 1e6:.0f} MB): name the file with --weights, or fetch it with --download"
            )
        return found

    def download(self, on_progress: Callable[[str, int, int], None] | None = None) -> Path:
        """Fetch it to where `find` looks, unless it is there; resumed where it broke off, and checked.

        Raises:
            DataError: it can't be fetched, or what came isn't the published file.
        """
        from rowdit.data.download import download

        if not self.cached.is_file():
            self.cached.parent.mkdir(parents=True, exist_ok=True)
            download(self.url, self.cached, self.num_bytes, self.sha256, on_progress)
        return self.cached

    def load(self, path: Path | None = None) -> dict[str, Tensor]:
        """The tensors, on the CPU. Nothing in the file is executed, and nothing is read before its hash is right.

        Raises:
            FileNotFoundError: it isn't there.
            ValueError: it is another file.
        """
        found = self.find(path)
        digest = file_hash(found)
        if digest != self.sha256:
            raise ValueError(
                f"{found} isn't the published {self.name}: its sha256 is {digest}, not {self.sha256}; "
                f"fetch it from {self.url}"
            )
        return torch.load(found, map_location="cpu", weights_only=True)


def file_hash(path: Path) -> str:
    """Sha256 of a file's bytes, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
