"""A small, made-up but plausible folder as `rowdit train` leaves it, for tests of what reads one.

The curves follow simple formulas of the step, so equal arguments give equal bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from synthetic_study import png

PERIOD = 3
# seconds of the phases of a step; each kind adds its optimizer's
SHARED = {"data": 0.004, "forward": 0.030, "backward": 0.060, "ema": 0.002}
OPTIMIZER = {
    "refresh": {"gather": 0.008, "newton_schulz": 0.040, "row_step": 0.0, "other": 0.001},
    "row": {"gather": 0.0, "newton_schulz": 0.0, "row_step": 0.004, "other": 0.001},
    "adamw": {"gather": 0.0, "newton_schulz": 0.0, "row_step": 0.0, "other": 0.003},
    "skipped": {"gather": 0.0, "newton_schulz": 0.0, "row_step": 0.0, "other": 0.0},
}
REST = 0.005
BINS = ("0.00-0.25", "0.25-0.50", "0.50-0.75", "0.75-1.00")


def _step(step: int, kind: str, lost: bool) -> dict[str, Any]:
    optimizer = OPTIMIZER[kind]
    shared = SHARED | ({"ema": 0.0} if kind == "skipped" else {})
    wobble = math.sin(12.9898 * step)
    loss = 0.2 + 1.4 * math.exp(-0.05 * step) + 0.05 * wobble
    bad = lost or kind == "skipped"
    return {
        "step": step,
        "images_seen": 16 * step,
        "loss": "nan" if lost else loss,
        "grad_norm": "inf" if bad else 0.4 + loss + 0.1 * wobble,
        "lr": 0.01 * min(1.0, step / 20),
        "kind": kind,
        "seconds": sum(shared.values()) + sum(optimizer.values()) + REST,
        "optimizer_seconds": sum(optimizer.values()),
        **{f"{name}_seconds": seconds for name, seconds in shared.items()},
        **{f"{name}_seconds": optimizer[name] for name in ("gather", "newton_schulz", "row_step")},
    }


def _evaluation(step: int, seconds: float, scored: bool) -> dict[str, Any]:
    loss = 0.25 + 1.3 * math.exp(-0.05 * step)
    row: dict[str, Any] = {
        "step": step,
        "seconds": seconds,
        "val_loss": loss,
        "val_loss_by_t": {name: loss * (1.6 - 0.4 * i) for i, name in enumerate(BINS)},
    }
    if scored:
        row |= {
            "score_report": 40 + 400 * math.exp(-0.04 * step),
            "kid": 0.01 + 0.2 * math.exp(-0.04 * step),
            "fingerprint": {"network": {"name": "effnet_lite0"}, "num_images": 100},
        }
    return row | {"grid": f"samples/step_{step:07d}.png", "evaluation_seconds": 1.25}


def make_run(
    folder: Path,
    *,
    optimizer: str = "periodic",
    num_steps: int = 120,
    last_step: int | None = None,
    evaluate_every: int | None = 30,
    scored: bool = True,
    skipped: tuple[int, ...] = (),
    lost_from: int | None = None,
    ending: str | None = "",
) -> Path:
    """Writes the folder and returns it.

    Args:
        folder: made.
        optimizer: its name in the config; its steps are "refresh" and "row" for "periodic".
        num_steps: of the config. last_step: where the log ends; at `num_steps` by default.
        evaluate_every: steps between evaluations, from step 0 on; None evaluates nothing.
        scored: evaluations have a score, not the validation loss alone.
        skipped: steps whose gradient wasn't finite.
        lost_from: first step without a finite loss.
        ending: why it diverged, empty for a run that finished; None writes no `finished.json`.
    """
    (folder / "samples").mkdir(parents=True)
    config = {
        "model": {"hidden_size": 96, "depth": 3},
        "data": {"source": "bundled"},
        "optimizer": {"name": optimizer, "lr": 0.01, "betas": [0.9, 0.95], "period": PERIOD},
        "train": {"batch_size": 16, "steps": num_steps, "seed": 0, "grad_clip": 1.0, "skip_grad_norm": None},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "dataset.json").write_text(json.dumps({"fingerprint": "bundled/train:100x1x28x28:sha256-0123abcd"}))
    (folder / "optimizer.txt").write_text("blocks.0.attention.qkv.weight   muon   (288, 96)\nbias   adamw   (96,)\n")
    log, evaluations, seconds = [], [], 0.0
    for step in range((num_steps if last_step is None else last_step) + 1):
        if step:
            kind = "adamw" if optimizer == "adamw" else "refresh" if step % PERIOD == 1 else "row"
            lost = lost_from is not None and step >= lost_from
            log.append(_step(step, "skipped" if lost or step in skipped else kind, lost))
            seconds += log[-1]["seconds"]
        if evaluate_every and step % evaluate_every == 0:
            evaluations.append(_evaluation(step, seconds, scored))
            shade = 255 * math.exp(-0.05 * step)
            grid = png(40, 30, lambda x, y, shade=shade: shade * (x % 7) / 7 + 10 * (y % 10))
            (folder / "samples" / f"step_{step:07d}.png").write_bytes(grid)
    for name, rows in (("log", log), ("evaluations", evaluations)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if ending is not None:
        end = {"step": len(log), "images_seen": 16 * len(log), "num_skipped": 0, "seconds": seconds, "diverged": ending}
        (folder / "finished.json").write_text(json.dumps(end))
    return folder
