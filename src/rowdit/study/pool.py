"""Runs side by side, a process each, one thread a process. What is to run next is asked when a process is free.

So a plan that depends on results (first tune, then train with what won) needs no stages in which processes wait for
each other, and a killed study goes on by asking again. An exception in one run stops the others at their next step,
where they save, and is raised at once with the run's name, not when all the others are done.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from rowdit.study.compare import Context, evaluate_into, prepare, read_record
from rowdit.study.steps import build_optimizer
from rowdit.study.summary import summarize_optimizers
from rowdit.study.task import Task
from rowdit.train.config import ConfigError, to_dict
from rowdit.train.loop import train
from rowdit.train.stop import Interrupted, StopRequest, end_with_parent
from rowdit.train.world import World

Row = dict[str, Any]
Upcoming = Callable[[], Sequence[Task]]
"""All tasks that may run now and haven't run, most urgent first. Asked again whenever a run ends."""


def run_tasks(
    upcoming: Upcoming, out: Path, *, num_processes: int, stop: StopRequest, done: Callable[[Task, Row], None]
) -> bool:
    """Runs tasks until none is upcoming, `num_processes` at a time; False if a stop was requested before.

    Args:
        upcoming: see `Upcoming`; those under way are left out here.
        out: folder of the study; runs go into `out/runs`, what evaluations share into `out/evaluation`.
        num_processes: >= 1.
        stop: asked twice a second.
        done: called in this process with each finished run's row.

    Raises:
        ConfigError: a process died, killed or out of memory.
        Exception: what a run raised, with the run's name as a note; the others saved before.
    """
    context = multiprocessing.get_context("spawn")
    stop_event = context.Event()
    running: dict[Future[Row | None], Task] = {}
    changed = True
    with ProcessPoolExecutor(num_processes, context, initializer=_start_worker, initargs=(stop_event,)) as pool:
        try:
            while changed or running:
                if stop.requested:
                    stop_event.set()
                elif changed:
                    under_way = {task.name for task in running.values()}
                    free = [task for task in upcoming() if task.name not in under_way]
                    for task in free[: num_processes - len(running)]:
                        running[pool.submit(_run_in_pool, run_task, task, out)] = task
                if not running:
                    break
                finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                changed = bool(finished)
                for future in finished:
                    task = running.pop(future)
                    row = _result(future, task, stop)
                    if row is not None:
                        done(task, row)
        except BaseException:
            stop_event.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return not stop.requested


def run_tasks_together(
    upcoming: Upcoming, out: Path, *, world: World, stop: StopRequest, done: Callable[[Task, Row], None]
) -> bool:
    """The same with all ranks of a process group on one run after another, as torchrun starts them.

    Args:
        upcoming, done: called on the main rank alone.
        out: seen by all ranks.
        world: the ranks.
        stop: on any rank.
    """
    while not world.any(stop.requested):
        ahead = upcoming() if world.is_main else ()
        task = world.share(ahead[0] if ahead else None)
        if task is None:
            return True
        row = run_task(task, out, world, stop)
        if row is None:
            return False
        if world.is_main:
            done(task, row)
    return False


def _result(future: Future[Row | None], task: Task, stop: StopRequest) -> Row | None:
    try:
        return future.result()
    except BrokenProcessPool:
        if stop.requested:  # whoever told this process to end has told those of the pool too
            return None
        raise ConfigError(
            f"a process died during {task.name} or a run beside it (killed, or out of memory?); "
            "the same command goes on, with fewer --processes if memory is short"
        ) from None
    except Exception as error:
        error.add_note(f"in the run {task.name}")
        raise


# ---------------------------------------------------------------------------------------------------------------------
# in a process of the pool

SECONDS_TO_LEAVE = 5.0
_stop_event: Event | None = None
_is_busy = _is_told_to_end = False
_contexts: dict[str, Context] = {}  # the last one: runs of one case come in a row and share data and evaluator


def _start_worker(stop_event: Event) -> None:
    """One thread a process; Ctrl-C is the parent's to handle, which asks by the event. SIGTERM may come to each, from a
    scheduler or from the pool when another process has died: the run under way is saved first."""
    global _stop_event
    _stop_event = stop_event
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _on_sigterm)
    torch.set_num_threads(1)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    global _is_told_to_end
    _is_told_to_end = True
    if not _is_busy:
        os._exit(0)


def _should_stop() -> bool:
    return _is_told_to_end or (_stop_event is not None and _stop_event.is_set())


def _run_in_pool(run: Callable[[Task, Path], Row | None], task: Task, out: Path) -> Row | None:
    global _is_busy
    _is_busy = True
    try:
        return run(task, out)
    finally:
        _is_busy = False
        if _is_told_to_end:  # once the result is with the parent, which may have no further word for this process
            timer = threading.Timer(SECONDS_TO_LEAVE, os._exit, (0,))
            timer.daemon = True
            timer.start()


def run_task(task: Task, out: Path, world: World | None = None, stop: StopRequest | None = None) -> Row | None:
    """Trains one run to its end and gives its row (see `rowdit.study.sweep`); None if it was asked to stop.

    In a process of the pool the world is this process alone, and the parent's event stops it.
    """
    world = world or World()
    folder = out / "runs" / task.name
    stop = stop or StopRequest(also=_should_stop)
    try:
        context = _context(task, out, stop, world)
    except Interrupted:
        return None
    outcome = train(
        task.config,
        context.training,
        folder,
        evaluate=evaluate_into(context.evaluator, folder),
        build=build_optimizer,
        stop=stop,
        world=world,
    )
    if outcome.status == "interrupted":
        return None
    if world.is_main:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    record = read_record(folder, task.label, task.seed)
    timing = summarize_optimizers([record], [task.label])[task.label]
    return {
        "run": task.name,
        "label": task.label,
        "seed": task.seed,
        "grid": task.point,
        "settings": task.config.optimizer.settings(),
        "train": to_dict(task.config.train),
        "evaluations": [{k: v for k, v in row.items() if k != "fingerprint"} for row in record.evaluations],
        "seconds": sum(row["seconds"] for row in record.log),
        "step_seconds": timing["step_seconds"],
        "optimizer_seconds_per_step": timing["optimizer_seconds_per_step"],
        "diverged": outcome.reason,
    }


def _context(task: Task, out: Path, stop: StopRequest, world: World) -> Context:
    """Data and evaluator of the task's comparison; kept, for opening them can take as long as a short run."""
    comparison, device = task.comparison, world.device
    key = repr((comparison.model, comparison.data, comparison.evaluate, comparison.train.ema_decay))
    if key not in _contexts:
        for turn in (True, False):  # the main rank first: what it prepares, the others read
            if world.is_main == turn:
                context = prepare(comparison, out / "evaluation", stop, lambda text: None, device)
            world.barrier()
        _contexts.clear()
        _contexts[key] = context
    _contexts[key].evaluator.check_stop = stop.check
    return _contexts[key]
