"""Batches of the training stream, read ahead by worker processes.

The stream is a function of (seed, images seen), so a loader has no state that a checkpoint would have to hold: one that
starts at ``images_seen`` gives what one that had run up to there would give next, whatever the number of workers and
ranks. All ranks get equal shares of every batch, so none runs out before the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from rowdit.data.batch import Batch, DataError, Dataset
from rowdit.data.index import batch_at, check_share

_Item = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, str], int]  # a batch, bad files, how many replaced


@dataclass(frozen=True)
class StreamSpec:
    """Which part of the stream a rank reads; the arguments of :func:`rowdit.data.batch_at`."""

    seed: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    flip: bool = False


class Loader(Iterator[Batch]):
    """An endless iterator over this rank's shares of the batches from ``images_seen`` on.

    Args:
        dataset: where the images come from. With workers it is sent to each, so it must pickle.
        seed, batch_size, rank, world_size, flip: as for :func:`rowdit.data.batch_at`.
        images_seen: >= 0, images that all ranks together saw before the first batch.
        num_workers: >= 0, processes that read ahead; 0 reads in this process, when a batch is asked for.
        prefetch: >= 1, batches that each worker is ahead.
        pin_memory: put batches into page-locked memory, for copies to a CUDA device that don't block.

    Raises:
        ValueError: an argument out of its range, or a batch that the ranks can't share evenly; here, not at the first
            batch.
        BadImageError, DataError: from ``next``; what reading raised, also in a worker.

    Example:
        >>> from rowdit.data import open_dataset
        >>> loader = Loader(open_dataset("bundled"), seed=0, images_seen=128, batch_size=64)
        >>> next(loader).positions[:3].tolist()
        [128, 129, 130]
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        images_seen: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        flip: bool = False,
        num_workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        if num_workers < 0 or prefetch < 1 or images_seen < 0:
            raise ValueError(
                f"num_workers {num_workers} and images_seen {images_seen} must be >= 0, and prefetch {prefetch} >= 1"
            )
        spec = StreamSpec(seed, batch_size, rank, world_size, flip)
        check_share(batch_size, images_seen, rank, world_size)
        self.images_seen = images_seen  # of the next batch
        self._dataset, self._batch_size = dataset, batch_size
        self._torch_loader: DataLoader[Any] = DataLoader(
            _Batches(dataset, spec),
            sampler=_Starts(images_seen, batch_size),
            batch_size=None,  # a batch is one item
            num_workers=num_workers,
            prefetch_factor=prefetch if num_workers else None,
            pin_memory=pin_memory,
            collate_fn=_unchanged,
            generator=torch.Generator(),  # the loader draws a seed for its workers; not from the global generator
        )
        self._items: Iterator[Any] | None = None

    def __next__(self) -> Batch:
        if self._items is None:
            self._items = iter(self._torch_loader)
        item: _Item | Exception = next(self._items)
        if isinstance(item, Exception):
            raise item
        images, labels, positions, bad_files, num_replaced = item
        if self._torch_loader.num_workers:
            _note_bad_images(self._dataset, bad_files, num_replaced)
        self.images_seen += self._batch_size
        return Batch(images, labels, positions)

    def close(self) -> None:
        """End the workers. The loader can't be used afterwards."""
        self._items = iter(())  # dropping torch's iterator ends its workers

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Starts(Sampler[int]):
    """The images seen before each batch, without end."""

    def __init__(self, images_seen: int, batch_size: int) -> None:
        self._images_seen, self._batch_size = images_seen, batch_size

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self._images_seen, self._batch_size)


class _Batches(TorchDataset[Any]):
    """Batch by images seen, with what was found of bad images on the way; runs in the workers."""

    def __init__(self, dataset: Dataset, spec: StreamSpec) -> None:
        self._dataset, self._spec = dataset, spec

    def __getitem__(self, images_seen: int) -> _Item | Exception:
        known, replaced = set(_bad_files(self._dataset)), _num_replaced(self._dataset)
        try:
            batch = batch_at(self._dataset, **vars(self._spec), images_seen=images_seen)
        except (DataError, OSError) as error:
            return error  # torch would wrap what a worker raises into an error of another type
        new = {name: reason for name, reason in _bad_files(self._dataset).items() if name not in known}
        return batch.images, batch.labels, batch.positions, new, _num_replaced(self._dataset) - replaced


def _unchanged(item: Any) -> Any:
    return item


def _bad_files(dataset: Dataset) -> dict[str, str]:
    return getattr(dataset, "bad_files", {})  # sources without files have none


def _num_replaced(dataset: Dataset) -> int:
    return getattr(dataset, "num_replaced", 0)


def _note_bad_images(dataset: Dataset, bad_files: dict[str, str], num_replaced: int) -> None:
    """Count in this process what a worker met."""
    if bad_files:
        dataset.bad_files.update(bad_files)  # type: ignore[attr-defined]
    if num_replaced:
        dataset.num_replaced += num_replaced  # type: ignore[attr-defined]
