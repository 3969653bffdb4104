"""`rowdit encode`: images to latent shards."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from rowdit.commands import ranks
from rowdit.commands.limits import check_images, check_processes
from rowdit.commands.outputs import check_folder, no_empty_folder
from rowdit.commands.parsing import fail, parse

if TYPE_CHECKING:
    from rowdit.data import Dataset

SPLITS = ("train", "reference")


@dataclass(frozen=True)
class EncodeCommand:
    """Turns images into latent shards, which `latents:OUT` then reads. A job that was killed goes on with what is
    missing when the same command is run again. Under torchrun, or on several machines with RANK and WORLD_SIZE set,
    each rank makes its share of the shards.

    Args:
        source: the images: bundled, fashion-mnist, folder:PATH, tar:PATTERN, parquet:PATTERN, hf:NAME.
        out: the folder; it gets a sub-folder for each split.
        encoder: identity, vae:FOLDER (of `rowdit train-vae`), or diffusers:FOLDER-OR-HUB-NAME.
        image_size: pixels a side; needed where the source has no size of its own.
        split: which images.
        channels: 3 for RGB, 1 for grey; by default what the source has.
        bad_images: what becomes of images that can't be used; skip and replace list them in the manifest.
        num_classes: where the source has numbers for labels; by default the largest decides.
        image_key: the member of a sample, or the column, that is the image; by default the usual one.
        label_key: likewise the label.
        flips: encode mirror images too.
        dtype: of the latents.
        shard_images: images in a file.
        batch_size: images encoded at once.
        num_workers: processes of each rank that decode ahead of the encoder.
        processes: on this machine, each with its share of the shards and of the cores.
        device: cuda or cpu; by default cuda where there is one, the one of LOCAL_RANK.
        verify: encode nothing; read all shards in OUT and compare their hashes.
    """

    source: tyro.conf.Positional[str]
    out: Path
    encoder: str = "identity"
    image_size: int | None = None
    split: Literal["train", "reference", "both"] = "both"
    channels: int | None = None
    bad_images: Literal["error", "skip", "replace"] = "error"
    num_classes: int | None = None
    image_key: str | None = None
    label_key: str | None = None
    flips: bool = True
    dtype: Literal["float16", "float32"] = "float16"
    shard_images: int = 4096
    batch_size: int = 64
    num_workers: int = 0
    processes: int = 1
    device: str | None = None
    verify: bool = False

    @property
    def splits(self) -> tuple[str, ...]:
        return SPLITS if self.split == "both" else (self.split,)


def run(arguments: list[str]) -> int:
    command = parse("encode", EncodeCommand, arguments)
    if command.verify:
        return _verify(command)
    for name in ("shard_images", "batch_size"):
        if getattr(command, name) < 1:
            return fail(f"{name} {getattr(command, name)} must be >= 1")
        check_images(getattr(command, name), command.image_size, command.channels, name=name)
    check_processes("processes", command.processes)
    check_processes("num_workers", command.num_workers, least=0)
    check_folder(command.out)
    for split in command.splits:
        check_folder(command.out / split)
    rank, world_size = ranks.rank(), ranks.num_ranks()
    if command.processes > 1 and world_size > 1:
        return fail(f"processes {command.processes} under torchrun: let torchrun start them (--nproc-per-node)")
    _open_device(command)
    with no_empty_folder(command.out):
        if command.processes == 1:
            _encode_all(command, rank, world_size, show=rank == 0)
        else:
            _in_processes(command)
    return _report(command)


def _options(command: EncodeCommand) -> dict[str, Any]:
    names = ("flips", "dtype", "shard_images", "batch_size", "num_workers")
    return {name: getattr(command, name) for name in names} | {"skip_bad": command.bad_images == "skip"}


def _in_processes(command: EncodeCommand) -> None:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from rowdit.train.stop import end_with_parent

    threads = max(1, (os.cpu_count() or 1) // command.processes)
    with ProcessPoolExecutor(command.processes, get_context("spawn"), initializer=end_with_parent) as pool:
        jobs = [
            pool.submit(_encode_all, command, rank, command.processes, show=rank == 0, threads=threads)
            for rank in range(command.processes)
        ]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _encode_all(command: EncodeCommand, rank: int, world_size: int, *, show: bool, threads: int | None = None) -> None:
    """This rank's share of every split."""
    import torch

    from rowdit.data.batch import DataError
    from rowdit.encode import EncodeOptions, encode_split, open_encoder

    if threads is not None:
        torch.set_num_threads(threads)
    options = EncodeOptions(**_options(command))
    encoder = None
    for split in command.splits:
        try:
            dataset = _open(command, split)
        except DataError as error:
            if command.split == "both" and split == "reference":
                raise DataError(f"{error}. To encode the training images alone: --split train") from None
            raise
        encoder = encoder or open_encoder(command.encoder, _open_device(command), in_channels=dataset.image_shape[0])
        with Bar(f"encode {split}", len(dataset), show) as bar:
            encode_split(
                dataset, encoder, command.out / split, options, rank=rank, world_size=world_size, on_progress=bar
            )


def _open(command: EncodeCommand, split: Any) -> Dataset:
    from rowdit.data import check_num_classes, open_dataset

    dataset = open_dataset(
        command.source,
        split,
        command.image_size,
        channels=command.channels,
        # Skipping is the job's: a source that skips decodes everything once at opening.
        bad_images="error" if command.bad_images == "skip" else command.bad_images,
        num_classes=command.num_classes,
        image_key=command.image_key,
        label_key=command.label_key,
    )
    check_num_classes(dataset, command.source, command.num_classes)
    return dataset


def _open_device(command: EncodeCommand) -> str:
    """Whatever the encoder makes of it: the identity needs none, and a wrong name is a mistake all the same."""
    from rowdit.commands.loading import open_device
    from rowdit.train.plain import ConfigError

    try:
        return str(open_device(command.device))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _report(command: EncodeCommand) -> int:
    """A line a split. Splits that other ranks are still at are named too."""
    from rowdit.data.latents import MANIFEST, read_manifest

    for split in command.splits:
        folder = command.out / split
        if not (folder / MANIFEST).exists():
            print(f"{folder}: this rank's share is done; the manifest comes with the last rank's")
            continue
        facts = read_manifest(folder)
        shape = "x".join(map(str, facts["latent_shape"]))
        bad = f", {len(facts['bad_files'])} bad files" if facts["bad_files"] else ""
        print(f"{folder}: {facts['num_images']} latents of {shape} in {len(facts['shards'])} shards{bad}")
    return 0


def _verify(command: EncodeCommand) -> int:
    from rowdit.data import DataError
    from rowdit.encode import verify

    for split in command.splits:
        folder = command.out / split
        if command.split == "both" and not folder.exists():
            continue
        facts = verify(folder)
        print(f"{folder}: {len(facts['shards'])} shards are as the manifest says")
    if not any((command.out / split).exists() for split in command.splits):
        raise DataError(f"{command.out} holds no latents")
    return 0


class Bar:
    """How far something is, on the error stream: a bar on a terminal, otherwise a line for every tenth.

    Args:
        title: what is done.
        total: images in all; of a rank's share, what it says with each call.
        show: False for ranks that keep quiet.
    """

    def __init__(self, title: str, total: int, show: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not (show and console.is_terminal))
        self._task = self._progress.add_task("", total=total)
        self._title, self._lines, self._tenths = title, show and not console.is_terminal, 0

    def __call__(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)
        tenths = 10 * done // max(1, total)
        if self._lines and tenths > self._tenths:
            self._tenths = tenths
            print(f"{self._title}: {done} of {total} images", file=sys.stderr, flush=True)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
