"""`rowdit study --measure-times`: what a step of each headline setting takes, on a machine that does nothing else.

Runs of a study share the machine, so their own clocks mean nothing. Here the optimizers of a case take turns, some
steps each and several rounds, so that what disturbs the machine for a while disturbs all alike.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from rowdit.data import Dataset, open_dataset
from rowdit.study.cases import HEADLINE, Case, Study
from rowdit.study.compare import describe_machine
from rowdit.study.headline import OPTIMIZERS
from rowdit.study.headline_table import TIMES_NAME
from rowdit.study.run import by_name, read_rows
from rowdit.study.staging import Rows, tuning
from rowdit.study.steps import build_optimizer
from rowdit.study.summary import RunRecord, summarize_optimizers
from rowdit.train.config import RunConfig
from rowdit.train.log import read_jsonl, write_json
from rowdit.train.loop import train

NUM_STEPS, NUM_ROUNDS = 21, 3


def measure_times(study: Study, out: Path, console: Console, num_steps: int = NUM_STEPS) -> Path:
    """Writes `OUT/times.json`: seconds of a whole step and of the optimizer's part, medians over all rounds' steps.

    Raises:
        ConfigError: `out` holds no finished run.
    """
    rows = by_name(read_rows(out))
    times: list[dict[str, Any]] = []
    for case in study.cases:
        configs = _chosen(study, case, rows, num_steps)
        if not configs:
            continue
        source, size = case.comparison.data.source, case.comparison.model.image_size
        found = _times_of(configs, open_dataset(source, "train", size, **case.comparison.data.options()))
        for label, timing in found.items():
            times.append({"dataset": case.dataset, "size": case.size, "optimizer": label} | timing)
            console.print(f"{case.name}, {label}: {1000 * timing['step_seconds']:.1f} ms a step", highlight=False)
    path = out / TIMES_NAME
    write_json(path, {"machine": describe_machine(), "num_steps": num_steps, "rounds": NUM_ROUNDS, "times": times})
    return path


def _chosen(study: Study, case: Case, rows: Rows, num_steps: int) -> dict[str, RunConfig]:
    """The chosen setting of each headline optimizer, cut down to a few steps without evaluation."""
    configs = {}
    for label in study.labels_of(case):
        if label in OPTIMIZERS and study.entries[label].question == HEADLINE:
            choice = tuning(study, case, label, rows).choice
            if choice:
                config = choice.comparison.run_config(label, study.seeds[0])
                steps = dataclasses.replace(config.train, steps=num_steps, checkpoint_every=num_steps)
                configs[label] = dataclasses.replace(config, train=steps)
    return configs


def _times_of(configs: Mapping[str, RunConfig], dataset: Dataset) -> dict[str, dict[str, Any]]:
    logs: dict[str, list[dict[str, Any]]] = {label: [] for label in configs}
    for _ in range(NUM_ROUNDS):
        for label, config in configs.items():
            with tempfile.TemporaryDirectory() as folder:
                train(config, dataset, Path(folder), build=build_optimizer)
                logs[label] += read_jsonl(Path(folder) / "log.jsonl")
    nothing = [{"step": 1, "seconds": 0.0, "score_select": 0.0, "score_report": 0.0, "val_loss": 0.0}]
    records = [RunRecord(label, 0, log, nothing) for label, log in logs.items()]
    keys = ("step_seconds", "optimizer_seconds_per_step", "optimizer_share")
    return {
        label: {key: timing[key] for key in keys}
        for label, timing in summarize_optimizers(records, list(configs)).items()
    }
