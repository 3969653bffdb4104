"""`rowdit compare`: the same model from the same start with each optimizer, one after another, and who wins.

    OUT/summary.json             see `rowdit.study.summary` and `build_summary`
    OUT/report.html              the page
    OUT/runs/LABEL-seedK/        see `rowdit.train.loop`; samples/step_XXXXXX.png beside
    OUT/evaluation/              reference features, floor and classifier, prepared once

One after another, because side by side they would share the processor and their times would mean nothing. Interrupted,
the same command goes on where it was; a run that is finished isn't run again.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from rowdit.data import Dataset, ImageFolder, open_dataset
from rowdit.evaluate.score import caution
from rowdit.models.dit import DiT
from rowdit.study.comparison import Comparison, run_name
from rowdit.study.evaluator import MEASURES, SCORE_NAME, Evaluator
from rowdit.study.lock import lock_folder
from rowdit.study.spectra import SpectraRecorder, write_spectra_figures
from rowdit.study.steps import build_optimizer
from rowdit.study.summary import RunRecord, summarize_optimizers
from rowdit.study.table import print_table
from rowdit.train.config import ConfigError, RunConfig, from_dict, to_dict
from rowdit.train.log import read_jsonl, write_json
from rowdit.train.loop import Evaluator as EvaluateFunction
from rowdit.train.loop import check_dataset, check_same_run, read_outcome, remove_run, train
from rowdit.train.progress import ConsoleProgress
from rowdit.train.stop import Interrupted, StopRequest

SUMMARY_FORMAT = 1
CACHED_BYTES = 256 << 20  # decoded images of a folder that are kept in memory


@dataclass(frozen=True)
class Plan:
    """What will be run: labels x seeds of a comparison, into a folder."""

    comparison: Comparison
    recipe: str
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    out: Path
    spectra: bool = False  # whether to record the momentum's spectra, see `rowdit.study.spectra`

    def runs(self) -> list[tuple[str, int]]:
        """Label and seed of each run. Seeds are the outer loop, so that what is done can be compared at any time."""
        return [(label, seed) for seed in self.seeds for label in self.labels]

    def folder(self, label: str, seed: int) -> Path:
        return self.out / "runs" / run_name(label, seed)


def compare(plan: Plan, *, fresh: bool = False, console: Console | None = None) -> dict[str, Any] | None:
    """Runs what isn't done yet and writes the summary.

    Args:
        plan: what to run.
        fresh: delete what earlier runs of these names left, instead of going on with them.
        console: where to report; by default the standard output.

    Returns:
        The summary, or None if it was interrupted; the state is saved then.

    Raises:
        ConfigError: a folder holds a run of another config, or the data doesn't fit the model.
    """
    console = console or Console()
    with lock_folder(plan.out), StopRequest() as stop:
        if fresh:
            for label, seed in plan.runs():
                remove_run(plan.folder(label, seed))
        for label, seed in plan.runs():  # before any work, so that a mistake costs no minutes
            _check_resumable(plan, label, seed)
        try:
            context = prepare(plan.comparison, plan.out / "evaluation", stop, _printer(console))
        except Interrupted:
            return None
        for label, seed in plan.runs():
            _check_resumable(plan, label, seed, context.training)
        if not _run_all(plan, context, stop, console):
            return None
    summary = build_summary(plan, context.evaluator)
    write_json(plan.out / "summary.json", summary)
    print_table(summary, console)
    return summary


def _printer(console: Console) -> Callable[[str], object]:
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Context:
    """The data and the evaluator that all runs share."""

    training: Dataset
    evaluator: Evaluator


def prepare(
    comparison: Comparison,
    cache: Path,
    stop: StopRequest,
    say: Callable[[str], object],
    device: torch.device | str = "cpu",
) -> Context:
    """Opens the data and prepares the evaluation, its feature network on `device`; what is slow is kept in `cache`.

    Raises:
        ConfigError: the data doesn't fit the model.
        Interrupted: a stop was requested meanwhile.
    """
    size = comparison.model.image_size
    training, held_out = (_open(comparison, split, size) for split in ("train", "reference"))
    any_run = comparison.run_config(next(iter(comparison.optimizers)), comparison.train.seed)
    check_dataset(any_run, training)
    _check_sample_counts(comparison, training, held_out)
    say(f"data: {training.fingerprint}")
    if not cache.exists():
        say("preparing the evaluation: features of real images, their floor, a classifier (once)")
    evaluator = Evaluator(
        training,
        held_out,
        comparison.evaluate,
        ema_decay=comparison.train.ema_decay,
        cache=cache,
        check_stop=stop.check,
        device=device,
    )
    evaluator.rehearse(DiT(comparison.model))
    return Context(training, evaluator)


def _open(comparison: Comparison, split: Literal["train", "reference"], size: int) -> Dataset:
    """The data set; a folder that fits is decoded once, for a study reads its images hundreds of times."""
    source = comparison.data.source
    options = {"num_classes": comparison.model.num_classes, **comparison.data.options()}
    dataset = open_dataset(source, split, size, **options)
    if isinstance(dataset, ImageFolder) and len(dataset) * math.prod(dataset.image_shape) <= CACHED_BYTES:
        return open_dataset(source, split, size, cache=True, **options)
    return dataset


def evaluate_into(evaluator: Evaluator, folder: Path) -> EvaluateFunction:
    """The evaluation that a run asks for; the sample grids go into the run's folder."""

    def evaluate(model: torch.nn.Module, step: int) -> dict[str, Any]:
        return evaluator.measure(model, folder / "samples" / f"step_{step:06d}.png")

    return evaluate


def _run_all(plan: Plan, context: Context, stop: StopRequest, console: Console) -> bool:
    """Trains every run that isn't finished; False if it was interrupted."""
    train_config = plan.comparison.train
    grid = plan.comparison.evaluate.steps(train_config.steps)
    ahead = []
    for label, seed in plan.runs():
        folder = plan.folder(label, seed)
        if not read_outcome(folder):
            done = [row["step"] for row in read_jsonl(folder / "evaluations.jsonl")]
            step = max((row["step"] for row in read_jsonl(folder / "log.jsonl")), default=0)
            ahead.append((run_name(label, seed), train_config.steps - step, len(grid) - len(done)))
    with ConsoleProgress(ahead, train_config.steps, console) as progress:
        for label, seed in plan.runs():
            folder = plan.folder(label, seed)
            outcome = train(
                plan.comparison.run_config(label, seed),
                context.training,
                folder,
                evaluate=evaluate_into(context.evaluator, folder),
                build=SpectraRecorder(folder).build if plan.spectra else build_optimizer,
                stop=stop,
                progress=progress,
            )
            if plan.spectra:
                write_spectra_figures(folder)
            if outcome.status == "interrupted":
                return False
            if outcome.status == "diverged":
                progress.message(f"{run_name(label, seed)}: diverged: {outcome.reason}")
    return True


def build_summary(plan: Plan, evaluator: Evaluator) -> dict[str, Any]:
    """`summary.json`, from the records on disk.

    Top level: score_name, recipe, config, machine, floor (real against real at the same number of images), kid_floor,
    classifier_accuracy_on_real, seeds, wall_seconds (training and evaluation of all runs), definitions, and optimizers:
    label -> the numbers of `rowdit.study.summary`, lr, settings, fingerprint of the scores, caution (why they are to be
    distrusted, where they are), diverged (per seed).
    """
    records = [read_record(plan.folder(label, seed), label, seed) for label, seed in plan.runs()]
    entries = summarize_optimizers(records, plan.labels)
    for label, entry in entries.items():
        optimizer = plan.comparison.optimizers[label]
        own = [record for record in records if record.optimizer == label]
        prints = [row["fingerprint"] for record in own for row in record.evaluations if "fingerprint" in row]
        entry["lr"] = optimizer.lr
        entry["settings"] = optimizer.settings()
        entry["fingerprint"] = prints[-1] if prints else {}
        if warning := caution(entry["fingerprint"]):
            entry["caution"] = warning
        outcomes = {record.seed: read_outcome(plan.folder(label, record.seed)) for record in own}
        entry["diverged"] = {str(seed): o.reason for seed, o in outcomes.items() if o and o.reason}
        for curve in entry["curve"]:
            curve["rows"] = [{k: v for k, v in row.items() if k != "fingerprint"} for row in curve["rows"]]
    config = to_dict(plan.comparison)
    config.pop("optimizers")
    evaluation_seconds = sum(row.get("evaluation_seconds", 0.0) for record in records for row in record.evaluations)
    return {
        "format": SUMMARY_FORMAT,
        "score_name": SCORE_NAME,
        "recipe": plan.recipe,
        "config": config,
        "machine": describe_machine(),
        "seeds": list(plan.seeds),
        **evaluator.describe(),
        "wall_seconds": sum(row["seconds"] for record in records for row in record.log) + evaluation_seconds,
        "evaluation_seconds": evaluation_seconds,
        "definitions": DEFINITIONS,
        "optimizers": entries,
    }


DEFINITIONS = {
    "score": "lower is better; mean over the seeds",
    "best": "reporting samples at the step that the selecting samples choose",
    "final": "the last evaluation",
    "at_fixed_step": "the evaluation nearest to half of the run",
    "at_fixed_time": "when the fastest optimizer of the same seed was done; linear in the seconds between evaluations",
    "seconds": "training time, evaluation excluded",
    "time_to_adamw_best": "first time at or below AdamW's best score of the same seed, linear between evaluations",
    "optimizer_seconds_per_step": "medians of each kind of step; mean: weighted by how often each kind occurs",
    "gain_over_adamw": "1 - score / AdamW's score",
}


def read_record(folder: Path, label: str, seed: int) -> RunRecord:
    """A finished run's logs; evaluations that a diverged run didn't reach are there as NaN.

    Raises:
        FileNotFoundError: the run has no config, so it was never started.
    """
    data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config: RunConfig = from_dict(RunConfig, data)
    log = read_jsonl(folder / "log.jsonl")
    rows = read_jsonl(folder / "evaluations.jsonl")
    seconds = sum(row["seconds"] for row in log)
    missing = [step for step in config.evaluate.steps(config.train.steps) if step not in {row["step"] for row in rows}]
    rows += [{"step": step, "seconds": seconds} | dict.fromkeys(MEASURES, "nan") for step in missing]
    return RunRecord(label, seed, log, rows)


def describe_machine() -> dict[str, Any]:
    """What the times were measured on."""
    return {
        "processor": _processor_name(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _check_resumable(plan: Plan, label: str, seed: int, dataset: Dataset | None = None) -> None:
    try:
        check_same_run(plan.folder(label, seed), plan.comparison.run_config(label, seed), dataset)
    except ConfigError as error:
        raise ConfigError(f"{error}. Choose another --out, or --fresh to start these runs over.") from None


def _check_sample_counts(comparison: Comparison, training: Dataset, held_out: Sequence | Dataset) -> None:
    num = comparison.evaluate.num_samples
    if num > len(training):
        raise ConfigError(
            f"evaluate.num_samples = {num}: the floor needs as many real images, there are {len(training)}"
        )
    if len(held_out) < 2:
        raise ConfigError(f"data.source = {comparison.data.source!r}: its reference split has {len(held_out)} images")
