"""A small, made-up but plausible folder as a comparison leaves it, for tests of what reads one.

The curves follow simple formulas of (optimizer, seed, step), so equal arguments give equal bytes.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rowdit.study.summary import RunRecord, summarize_optimizers

# final score, decay of the curve per step, optimizer seconds of a (full step, row step)
_CHARACTER = {
    "adamw": (48.0, 0.0040, (0.0021, 0.0021)),
    "muon": (41.5, 0.0058, (0.0480, 0.0480)),
    "periodic": (40.2, 0.0056, (0.0478, 0.0026)),
}
_REST_OF_STEP = 0.120
FLOOR = 12.3


def png(width: int, height: int, shade: Any) -> bytes:
    """A greyscale PNG whose pixel (x, y) has the value shade(x, y) in 0..255."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(int(shade(x, y)) & 255 for x in range(width)) for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _wobble(optimizer: str, seed: int, step: int) -> float:
    """A deterministic stand-in for noise, in [-1, 1]."""
    return math.sin(12.9898 * step + 78.233 * seed + 3.7 * len(optimizer) + 0.61 * ord(optimizer[0]))


def _kind(optimizer: str, step: int) -> str:
    if optimizer == "adamw":
        return "adamw"
    return "row" if optimizer == "periodic" and step % 3 else "refresh"


def _run(optimizer: str, seed: int, num_steps: int, num_evaluations: int, diverges_at: int | None) -> tuple[list, list]:
    end, rate, (full, row) = _CHARACTER.get(optimizer, (45.0, 0.0050, (0.0100, 0.0100)))
    log: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []
    seconds = 0.0
    every = num_steps // num_evaluations
    for step in range(num_steps + 1):
        lost = diverges_at is not None and step >= diverges_at
        progress = 800 * step / num_steps  # a short run has the shape of a long one
        if step and step % every == 0:
            score = end + 420.0 * math.exp(-rate * 1.6 * progress) + 0.8 * _wobble(optimizer, seed, step)
            val_loss = 0.16 + 0.8 * math.exp(-rate * 2.2 * progress) + end / 4000
            evaluations.append(
                {
                    "step": step,
                    "seconds": seconds,
                    "score_select": math.nan if lost else score - 0.3,
                    "score_report": math.nan if lost else score,
                    "kid": math.nan if lost else score / 5000,
                    "val_loss": math.nan if lost else val_loss,
                    "accuracy": 0.1 if lost else 0.9 - 0.8 * math.exp(-rate * progress),
                }
            )
        if step == num_steps:
            break
        kind = _kind(optimizer, step)
        optimizer_seconds = (row if kind == "row" else full) * (1 + 0.08 * _wobble(optimizer, seed, step))
        seconds += _REST_OF_STEP + optimizer_seconds
        loss = 0.18 + 1.2 * math.exp(-rate * 5 * progress) + 0.012 * _wobble(optimizer, seed, step)
        log.append(
            {
                "step": step + 1,
                "images_seen": 64 * (step + 1),
                "loss": math.nan if lost else loss,
                "grad_norm": math.nan if lost else 1.5 * loss,
                "lr": 1e-3,
                "seconds": _REST_OF_STEP + optimizer_seconds,
                "optimizer_seconds": optimizer_seconds,
                "kind": kind,
            }
        )
    return log, evaluations


def _described(optimizer: str) -> dict[str, Any]:
    """What the summary says of an optimizer beside the numbers computed from its runs."""
    settings: dict[str, Any] = {"name": optimizer, "lr": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.95]}
    if optimizer != "adamw":
        settings |= {"lr": 0.004, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}
    if optimizer == "periodic":
        settings |= {"period": 3, "row_scale": 0.25}
    fingerprint = {
        "network": "effnet_lite0",
        "network_sha256": "57934424" * 8,
        "num_images": 1000,
        "sampling": {"sampler": "euler", "num_steps": 10, "guidance": 1.0, "first_index": 1000},
        "reference": {"name": "bundled", "sha256": "0123abcd" * 8},
    }
    return {"lr": settings["lr"], "settings": settings, "fingerprint": fingerprint}


def make_study(
    folder: Path,
    *,
    optimizers: Sequence[str] = ("adamw", "muon", "periodic"),
    seeds: Sequence[int] = (0,),
    num_steps: int = 60,
    num_evaluations: int = 4,
    diverges: dict[str, int] | None = None,
    recipe: str = "quickstart",
    grid: tuple[int, int] = (40, 30),
) -> Path:
    """Writes the folder and returns it. `diverges` names optimizers and the step from which nothing is finite."""
    records = []
    summary: dict[str, Any] = {
        "score_name": "fd_effnet_lite0",
        "recipe": recipe,
        "machine": {"cpu": "two cores", "torch": "2.13.0", "threads": 2},
        "floor": FLOOR,
        "kid_floor": 0.0004,
        "definitions": {"at_fixed_step": "half of the run", "at_fixed_time": "when the fastest was done"},
        "optimizers": {},
    }
    for optimizer in optimizers:
        for seed in seeds:
            log, evaluations = _run(optimizer, seed, num_steps, num_evaluations, (diverges or {}).get(optimizer))
            run = folder / "runs" / f"{optimizer}-seed{seed}"
            (run / "samples").mkdir(parents=True)
            config = {"seed": seed, "model": {"hidden_size": 96, "depth": 3}, "optimizer": {"name": optimizer}}
            (run / "config.json").write_text(json.dumps(config))
            (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
            (run / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
            for row in evaluations:
                clarity = 1 - math.exp(-row["step"] / num_steps * 3)
                shade = _shade(clarity, len(optimizer))
                (run / "samples" / f"step_{row['step']:06d}.png").write_bytes(png(*grid, shade))
            records.append(RunRecord(optimizer, seed, log, evaluations))
    for optimizer, entry in summarize_optimizers(records, optimizers).items():
        summary["optimizers"][optimizer] = entry | _described(optimizer)
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _shade(clarity: float, salt: int) -> Any:
    def shade(x: int, y: int) -> float:
        noise = math.sin(x * 12.9898 + y * 78.233 + salt) * 43758.5453 % 1.0
        disc = 1.0 if (x % 10 - 5) ** 2 + (y % 10 - 5) ** 2 < 14 else 0.0
        return 255 * (clarity * disc + (1 - clarity) * noise)

    return shade
