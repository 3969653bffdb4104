"""Batches of the training stream, read ahead by worker processes.

The stream is a function of (seed, images seen), so a loader has no state that a checkpoint would have to hold: one that
starts at ``images_seen`` gives what one that had run up to there would give next, whatever the number of workers and
ranks. All ranks get equal shares of every batch, so none runs out before the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from rowdit.data.batch import Batch, DataError, Dataset
from rowdit.data.index import batch_at, check_share


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
        check_share(batch_size, images_seen, rank, world_size)
        self.images_seen = images_seen  # of the next batch
        self._batch_size = batch_size
        spec: dict[str, Any] = {
            "seed": seed,
            "batch_size": batch_size,
            "rank": rank,
            "world_size": world_size,
            "flip": flip,
        }
        self._batches = read_ahead(
            dataset,
            _Starts(images_seen, batch_size),
            partial(_tensors_at, **spec),
            num_workers=num_workers,
            prefetch=prefetch,
            pin_memory=pin_memory,
        )

    def __next__(self) -> Batch:
        images, labels, positions = next(self._batches)
        self.images_seen += self._batch_size
        return Batch(images, labels, positions)

    def close(self) -> None:
        """End the workers. The loader can't be used afterwards."""
        self._batches.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_ahead(
    dataset: Dataset,
    items: Iterable[Any],
    read: Callable[[Dataset, Any], Any],
    *,
    num_workers: int,
    prefetch: int = 2,
    pin_memory: bool = False,
) -> Generator[Any, None, None]:
    """``read(dataset, item)`` for each item in order, by worker processes.

    Bad images that a worker meets are counted in this process's ``dataset``, and a DataError or OSError that a worker
    raises is raised here as it is. Closing the generator ends the workers.

    Args:
        dataset, read: are sent to the workers, so they must pickle.
        items: may be endless.
        num_workers: >= 0; 0 reads in this process, when a value is asked for.
        prefetch: >= 1, items that each worker is ahead.
        pin_memory: put tensors into page-locked memory.
    """
    loader: DataLoader[Any] = DataLoader(
        _Reading(dataset, read),
        sampler=items,
        batch_size=None,  # an item is an item
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        pin_memory=pin_memory,
        collate_fn=_unchanged,
        generator=torch.Generator(),  # torch draws a seed for its workers; not from the global generator
    )
    for result in loader:
        if isinstance(result, Exception):
            raise result
        value, bad_files, num_replaced = result
        if num_workers and bad_files:
            dataset.bad_files.update(bad_files)  # type: ignore[attr-defined]
        if num_workers and num_replaced:
            dataset.num_replaced += num_replaced  # type: ignore[attr-defined]
        yield value


class _Reading(TorchDataset[Any]):
    """Item -> what was read, which bad files were met for the first time, and how many images were replaced."""

    def __init__(self, dataset: Dataset, read: Callable[[Dataset, Any], Any]) -> None:
        self._dataset, self._read = dataset, read

    def __getitem__(self, item: Any) -> tuple[Any, dict[str, str], int] | Exception:
        known, replaced = set(_bad_files(self._dataset)), _num_replaced(self._dataset)
        try:
            value = self._read(self._dataset, item)
        except (DataError, OSError) as error:
            return error  # torch would wrap what a worker raises into an error of another type
        new = {name: reason for name, reason in _bad_files(self._dataset).items() if name not in known}
        return value, new, _num_replaced(self._dataset) - replaced


class _Starts(Sampler[int]):
    """The images seen before each batch, without end."""

    def __init__(self, images_seen: int, batch_size: int) -> None:
        self._images_seen, self._batch_size = images_seen, batch_size

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self._images_seen, self._batch_size)


def _tensors_at(dataset: Dataset, images_seen: int, **spec: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch = batch_at(dataset, images_seen=images_seen, **spec)
    return batch.images, batch.labels, batch.positions  # a tuple, for torch pins tensors in those


def _unchanged(item: Any) -> Any:
    return item


def _bad_files(dataset: Dataset) -> dict[str, str]:
    return getattr(dataset, "bad_files", {})  # sources without files have none


def _num_replaced(dataset: Dataset) -> int:
    return getattr(dataset, "num_replaced", 0)
