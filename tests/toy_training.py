"""Runs so small that training takes milliseconds: 8 x 8 noise in three classes, a transformer of 16 tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rowdit.data import ArrayDataset
from rowdit.models.dit import DiTConfig
from rowdit.study.comparison import Comparison
from rowdit.train import checkpoint
from rowdit.train.config import DataConfig, EvaluateConfig, OptimizerConfig, RunConfig, TrainConfig

OPTIMIZERS = {
    "adamw": OptimizerConfig(name="adamw", lr=1e-3),
    "muon": OptimizerConfig(name="muon", lr=3e-3, adamw_lr=1e-3),
    "periodic": OptimizerConfig(name="periodic", lr=3e-3, adamw_lr=1e-3, period=3, row_scale=0.5),
}
MODEL = DiTConfig(image_size=8, in_channels=1, patch_size=2, hidden_size=16, depth=1, num_heads=2, num_classes=3)


def toy_config(optimizer: str = "periodic", **train: Any) -> RunConfig:
    """A run of 12 steps of 8 images; keyword arguments are fields of `TrainConfig`."""
    defaults: dict[str, Any] = {
        "batch_size": 8,
        "steps": 12,
        "ema_decay": 0.9,
        "checkpoint_every": 4,
        "warmup_steps": 2,
    }
    return RunConfig(
        model=MODEL,
        data=DataConfig(),
        optimizer=OPTIMIZERS[optimizer],
        train=TrainConfig(**(defaults | train)),
        evaluate=EvaluateConfig(num_evaluations=3, num_samples=12, num_val_images=16, num_steps=2, grid_images=6),
    )


def toy_comparison(**train: Any) -> Comparison:
    """The three optimizers over `toy_config`."""
    run = toy_config(**train)
    return Comparison(run.model, run.data, run.train, run.evaluate, dict(OPTIMIZERS))


def toy_dataset(num_images: int = 40, seed: int = 0) -> ArrayDataset:
    """Bytes of noise whose mean tells the class."""
    generator = np.random.default_rng(seed)
    labels = np.arange(num_images) % 3
    noise = generator.integers(0, 120, (num_images, 1, 8, 8))
    images = (noise + 60 * labels[:, None, None, None]).astype(np.uint8)
    return ArrayDataset(images, labels, ("a", "b", "c"), name=f"toy-{seed}")


def with_optimizer(config: RunConfig, **fields: Any) -> RunConfig:
    """The same run with fields of its optimizer replaced."""
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **fields))


def saved_state(run: Path, step: int | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What a run's checkpoint holds, the newest one's by default: whole tensors by name, and the plain values.

    Where it was computed (the number of ranks, the `parallel` section, the files) is left out.
    """
    found = checkpoint.find(run, step)
    tensors = {
        name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in checkpoint.saved_tensors(found).items()
    }
    checkpoint.read_tensors(found, tensors)
    header = checkpoint.read_header(found)
    header["config"].pop("parallel")
    return tensors, {key: value for key, value in header.items() if key not in ("files", "num_ranks")}


def same_state(a: Path, b: Path) -> bool:
    """Whether the newest checkpoints of two runs hold the same, to the bit."""
    (tensors, values), (other_tensors, other_values) = saved_state(a), saved_state(b)
    same = tensors.keys() == other_tensors.keys() and values == other_values
    return same and all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)
