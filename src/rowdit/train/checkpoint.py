"""Checkpoints: the whole state of a run, written whole or not at all, at any number of ranks, read at any other.

    RUN/checkpoints/step-0000400/
        *.distcp, .metadata     tensors by name, each rank's shards, as `torch.distributed.checkpoint` (DCP) writes them
        state.json              counters and other plain values, the config, the sizes of the files; written last

A checkpoint is written into a hidden folder beside, flushed to the disk, and renamed by the main rank: a folder that is
named `step-...` is complete, whatever killed the processes. The newest is the one with the largest step, never the
largest or the youngest file. All ranks must see the same folder (a shared file system, on more than one machine).

DCP pickles its `.metadata`, so load checkpoints that you trust; an export (`rowdit.train.export`) is for passing on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rowdit.models.dit import DiT
from rowdit.train.config import ConfigError, RunConfig, from_dict, to_dict
from rowdit.train.disk import os_error, why_not_written
from rowdit.train.log import write_json
from rowdit.train.state import TrainState, destinations, take_values, tensors_of, values_of
from rowdit.train.world import World

FORMAT = 2
_NAME = re.compile(r"step-(\d{7,})")


class CheckpointError(RuntimeError):
    """A checkpoint can't be written or read; the message names it and says what is left to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int


class Saver:
    """Writes the checkpoints of a run; all ranks call it alike.

    Args:
        folder: of the checkpoints, `RUN/checkpoints`.
        world: the ranks.
        keep: newest complete checkpoints that are kept; None keeps all.
        asynchronous: copy the state to the CPU, then write while training goes on. The checkpoint is complete when a
            later call of `poll`, `wait` or `save` finds it written.
        select: which tensors of the state are saved; by default all.
    """

    def __init__(
        self,
        folder: Path,
        world: World | None = None,
        *,
        keep: int | None = 2,
        asynchronous: bool = False,
        select: Callable[[TrainState], dict[str, Tensor]] = tensors_of,
    ) -> None:
        self.folder, self.world, self.keep, self.asynchronous = folder, world or World(), keep, asynchronous
        self.select = select
        self._pending: tuple[Future[Any], int, dict[str, Any]] | None = None

    def save(self, state: TrainState, config: RunConfig) -> None:
        """Saves the state as `folder/step-XXXXXXX`.

        Raises:
            CheckpointError: it couldn't be written (a full disk, say), on all ranks. Older ones are untouched then.
        """
        self.wait()
        header = values_of(state) | {"format": FORMAT, "config": to_dict(config), "num_ranks": self.world.size}
        tensors = self.select(state)
        with self._explained(state.step, tensors):
            if self.world.is_main:
                self.folder.mkdir(parents=True, exist_ok=True)
                remove_leftovers(self.folder)
            written = _write_tensors(tensors, self._beside(state.step), self.world, self.asynchronous)
        self._pending = (written, state.step, header)
        if not self.asynchronous:
            self.wait()

    def poll(self) -> None:
        """Completes a checkpoint that has been written meanwhile; never waits, and sends nothing."""
        if self._pending and self._pending[0].done() and self.world.is_main:
            self._complete()

    def wait(self) -> None:
        """Until the checkpoint under way, if there is one, is complete."""
        if self._pending is None and not self.asynchronous:
            return
        try:
            self._complete()
        except CheckpointError as error:
            problem: str | None = str(error)
        else:
            problem = None
        # What is renamed is the main rank's to say; and nobody goes on before it is there.
        problem = self.world.share(problem) or problem
        if problem:
            raise CheckpointError(problem)

    def _complete(self) -> None:
        if self._pending is None:
            return
        written, step, header = self._pending
        self._pending = None
        with self._explained(step, {}):
            written.result()
            if self.world.is_main:
                publish(self._beside(step), self.folder / _folder_name(step), header)
                for old in complete_ones(self.folder)[: -self.keep] if self.keep else ():
                    remove(old.path)

    def _beside(self, step: int) -> Path:
        return self.folder / f".writing-{_folder_name(step)}"

    @contextmanager
    def _explained(self, step: int, tensors: dict[str, Tensor]) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and not hasattr(error, "failures"):
                raise  # an interrupt; DCP's own error, which has `failures`, is no Exception either
            cause = os_error(error)
            no_room = shutil.disk_usage(self.folder).free < 1 << 16 if self.folder.exists() else False
            if cause is None and not no_room:
                raise
            if self.world.is_main:
                shutil.rmtree(self._beside(step), ignore_errors=True)
            path = self.folder / _folder_name(step)
            last = newest(self.folder)
            raise CheckpointError(why_not_written(cause, no_room, path, last.path if last else None)) from error


def _folder_name(step: int) -> str:
    return f"step-{step:07d}"


def _write_tensors(tensors: dict[str, Tensor], folder: Path, world: World, asynchronous: bool) -> Future[Any]:
    """Each rank writes its shards into the folder; the future ends when all have."""
    import torch.distributed.checkpoint as dcp

    group = world.checkpoint_group
    options: dict[str, Any] = {
        "storage_writer": dcp.FileSystemWriter(folder),
        "process_group": group,
        "no_dist": group is None,
    }
    _quieten()
    if asynchronous:
        written = dcp.async_save(tensors, **options)
        assert isinstance(written, Future)
        return written
    done: Future[Any] = Future()
    done.set_result(dcp.save(tensors, **options))
    return done


def _quieten() -> None:
    """Leaves out DCP's note that one process saves or loads alone; also in its threads, so for good."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def publish(beside: Path, final: Path, header: dict[str, Any]) -> None:
    """Makes a written folder a complete checkpoint: its header, then its name."""
    files = {path.name: path.stat().st_size for path in sorted(beside.iterdir())}
    write_json(beside / "state.json", header | {"files": files})
    _sync(beside)
    if final.exists():
        remove(final)
    os.replace(beside, final)
    _sync(final.parent)


def newest(folder: Path) -> Checkpoint | None:
    """The complete checkpoint with the largest step, or None."""
    complete = complete_ones(folder)
    return complete[-1] if complete else None


def complete_ones(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints by step."""
    if not folder.is_dir():
        return []
    found = [(path, _NAME.fullmatch(path.name)) for path in folder.iterdir()]
    checkpoints = [Checkpoint(path, int(m[1])) for path, m in found if m and (path / "state.json").is_file()]
    return sorted(checkpoints, key=lambda c: c.step)


def remove(path: Path) -> None:
    """Deletes a checkpoint, under another name first: killed half-way, what is left is known for what it is."""
    gone = path.with_name(f".removing-{path.name}")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Half-written and half-deleted checkpoints of killed processes."""
    for pattern in (".writing-step-*", ".removing-step-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# reading


def load(checkpoint: Checkpoint, state: TrainState, world: World | None = None) -> None:
    """Puts the saved state into `state`, which was built from the same config, on any number of ranks.

    Raises:
        CheckpointError: a file is missing, cut short or of another model; the file is named.
    """
    header = read_header(checkpoint)
    saved = saved_tensors(checkpoint)
    try:
        tensors = destinations(state, saved)
        read_tensors(checkpoint, tensors, world)
        with torch.no_grad():
            take_values(state, tensors, header)
    except (RuntimeError, ValueError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{checkpoint.path} doesn't fit this run: {' '.join(str(error).split())}") from error


def read_header(checkpoint: Checkpoint) -> dict[str, Any]:
    """The plain values and the config of a checkpoint, after checking that its files have the sizes that were written.

    Raises:
        CheckpointError: a file can't be read, is cut short, or is of another version.
    """
    path = checkpoint.path / "state.json"
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        sizes = {name: (checkpoint.path / name).stat().st_size for name in header["files"]}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"can't read {path}: {error}; {_without(checkpoint)}") from error
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} isn't what a checkpoint has; {_without(checkpoint)}") from None
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {header.get('format')}, this version reads {FORMAT}")
    for name, size in header["files"].items():
        if sizes[name] != size:
            raise CheckpointError(
                f"{checkpoint.path / name}: {sizes[name]} bytes, {size} were written; {_without(checkpoint)}"
            )
    return header


def saved_tensors(checkpoint: Checkpoint) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Global shape and dtype of each tensor in a checkpoint, by name."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with _readable(checkpoint):
        entries = dcp.FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor], world: World | None = None) -> None:
    """Fills tensors, plain or sharded, with those of the same names; every rank reads what it needs."""
    import torch.distributed.checkpoint as dcp

    group = world.checkpoint_group if world else None
    _quieten()
    reader = dcp.FileSystemReader(checkpoint.path)
    with _readable(checkpoint):
        dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)


@contextmanager
def _readable(checkpoint: Checkpoint) -> Iterator[None]:
    """Whatever the reading of files that have the right sizes and the wrong contents raises, in one."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # DCP's own error is no Exception
        inner = [failure[0] for failure in getattr(error, "failures", {}).values()]
        reason = str(inner[0] if inner else error).partition("\n")[0]
        raise CheckpointError(
            f"can't read the tensors in {checkpoint.path} ({reason}); {_without(checkpoint)}"
        ) from error


def _without(checkpoint: Checkpoint) -> str:
    return f"remove {checkpoint.path} to go on from the checkpoint before it, or from the start"


def find(run: Path | str, step: int | None = None) -> Checkpoint:
    """The checkpoint of a run at a step; the newest for None.

    Raises:
        CheckpointError: there is none; the steps that there are are named.
    """
    run = Path(run)
    there = complete_ones(run / "checkpoints")
    wanted = there[-1:] if step is None else [checkpoint for checkpoint in there if checkpoint.step == step]
    if wanted:
        return wanted[0]
    if not there:
        what = "has no complete checkpoint" if run.is_dir() else "is no folder" if run.exists() else "doesn't exist"
        raise CheckpointError(f"{run} {what}; name the folder that rowdit train wrote (its --out)")
    steps = ", ".join(str(checkpoint.step) for checkpoint in there)
    raise CheckpointError(f"{run} has no checkpoint of step {step}; complete are: {steps}")


def load_model(
    run: Path | str, which: str = "ema", *, step: int | None = None, device: torch.device | str = "cpu"
) -> DiT:
    """The model of a run, plain and whole, whatever number of ranks trained it.

    Args:
        run: the run's folder.
        which: `"ema"`, the evaluated average; `"model"`, the weights as trained; or another average's label, such as
            `"ema_0.999"`.
        step: of the checkpoint; None is the newest.
        device: where to put it.

    Returns:
        In eval mode; its shape is `model.config`.

    Raises:
        CheckpointError: there is no such checkpoint, or no such average in it.
    """
    checkpoint = find(run, step)
    config = run_config(checkpoint)
    with torch.device("meta"):
        model = DiT(config.model)
    model.to_empty(device=device)
    model.init_buffers()
    fill_model(checkpoint, model, which)
    return model.eval()


def fill_model(checkpoint: Checkpoint, model: DiT, which: str) -> None:
    """Reads the weights, or one of the averages, into a plain model of the checkpoint's config."""
    saved = saved_tensors(checkpoint)
    labels = sorted({"model", *read_header(checkpoint)["averages"]})
    if which not in labels:
        raise CheckpointError(f"{checkpoint.path} holds no {which!r}; it holds {', '.join(labels)}")
    # Frozen parameters have no average: they are as they are.
    names = {name: f"{which}.{name}" for name, _ in model.named_parameters()}
    names = {name: full if full in saved else f"model.{name}" for name, full in names.items()}
    read_tensors(checkpoint, {names[name]: p.detach() for name, p in model.named_parameters()})


def run_config(checkpoint: Checkpoint) -> RunConfig:
    """The config that a checkpoint was trained with."""
    try:
        return from_dict(RunConfig, read_header(checkpoint)["config"])
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint.path / 'state.json'}: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# the disk


def _sync(folder: Path) -> None:
    """Flushes a folder's own entries, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
