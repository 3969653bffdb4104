"""The study behind docs/evidence.md: small Transformers on three small data sets, on processor cores.

command   rowdit study small --data digits=folder:DIGITS emoji=folder:EMOJI
data      Fashion-MNIST from the package; DIGITS has a sub-folder for each digit of scikit-learn's handwritten ones
          (1,797 images of 8 x 8 in `sklearn.datasets.load_digits`); EMOJI one for each of the ten categories of
          Google's emoji, from npm's emoji-datasource-google 16.0.0 (package/img/google/64/*.png, categories in
          package/emoji.json). docs/evidence.md says how to write these folders. Cases whose data isn't named are left
          out.
protocol  docs/evidence/protocol.md
gave      docs/evidence.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rowdit.models.dit import DiTConfig
from rowdit.study.cases import Case, Entry, Study
from rowdit.study.comparison import Comparison
from rowdit.train.config import DataConfig, EvaluateConfig, OptimizerConfig, TrainConfig

DATA = ("digits", "emoji")
STEPS = 600
EMOJI_STEPS = 900
LONG_STEPS = 1800


def study(data: Mapping[str, str]) -> Study:
    """See the module; `data` may hold the sources of "digits" and "emoji"."""
    cases = [
        Case("S", "fashion-mnist", "S", _comparison("bundled", 1, 48)),
        Case("S-long", "fashion-mnist", "S, 1,800 steps", _comparison("bundled", 1, 48, LONG_STEPS), follow="S"),
        Case("M", "fashion-mnist", "M", _comparison("bundled", 1, 80), follow="S"),
        Case("L", "fashion-mnist", "L", _comparison("bundled", 1, 128), follow="S"),
    ]
    if "digits" in data:
        digits = _comparison(data["digits"], 1, 48, image_size=8, patch_size=2)
        cases.append(Case("digits", "digits", "S", digits, follow="S"))
    if "emoji" in data:
        emoji = _comparison(data["emoji"], 3, 80, EMOJI_STEPS)
        cases.append(Case("emoji", "emoji", "M, 900 steps", emoji, follow="S"))
    entries = _headline() | _better_cheap_step() | _paper() | _cheap_steps() | _schedules() | _scales() | _periods()
    entries |= _gram_variants() | _details()
    return Study(tuple(cases), entries, seeds=tuple(range(10)), tuning_seeds=(100, 101))


def _comparison(
    source: str, channels: int, width: int, steps: int = STEPS, *, image_size: int = 16, patch_size: int = 4
) -> Comparison:
    """16 tokens, three blocks, heads of 16 channels. The lrs are what tuning starts from."""
    return Comparison(
        model=DiTConfig(
            image_size=image_size,
            in_channels=channels,
            patch_size=patch_size,
            hidden_size=width,
            depth=3,
            num_heads=width // 16,
            num_classes=10,
        ),
        data=DataConfig(source=source, channels=None if source == "bundled" else channels),
        train=TrainConfig(
            batch_size=64, steps=steps, ema_decay=0.99, warmup_steps=20, grad_clip=1.0, checkpoint_every=steps // 2
        ),
        evaluate=EvaluateConfig(num_evaluations=4, num_samples=1000, num_steps=10),
        optimizers={
            "adamw": OptimizerConfig(name="adamw", lr=1.2e-2, betas=(0.9, 0.95)),
            "muon": OptimizerConfig(name="muon", lr=1.6e-2, adamw_lr=3e-3),
            "periodic": OptimizerConfig(name="periodic", lr=1.6e-2, adamw_lr=3e-3, period=3, row_scale=0.25),
            "paper": OptimizerConfig(name="periodic", lr=8e-3, adamw_lr=3e-3, period=3, row_scale=1.0),
        },
    )


ADAMW_LRS = (4.5e-3, 7.5e-3, 1.2e-2, 1.9e-2, 3e-2)
MUON_LRS = (6e-3, 1e-2, 1.6e-2, 2.5e-2, 4e-2)
PLAIN_LRS = (3e-3, 5e-3, 8e-3, 1.2e-2, 1.9e-2)


def _headline() -> dict[str, Entry]:
    betas = ([0.9, 0.9], [0.9, 0.99], [0.8, 0.95], [0.95, 0.95])
    return {
        "adamw": Entry(ADAMW_LRS, axes={"betas": betas}),
        "muon": Entry(MUON_LRS, axes={"adamw_lr": (1.5e-3, 6e-3), "momentum": (0.9, 0.97)}),
        "periodic": Entry(MUON_LRS, axes={"momentum": (0.9, 0.97), "row_scale": (0.125, 0.5)}),
    }


def _better_cheap_step() -> dict[str, Entry]:
    """Our own cheap step, with what was chosen for Muon but its lr, on all seeds of every case."""
    changes = {"name": "periodic", "period": 3, "cheap_step": "gram_row", "row_scale": 0.5}
    lrs, axes = (1e-2, 1.6e-2, 2.5e-2, 4e-2), {"row_scale": (0.25, 1.0)}
    return {"gram-row": Entry(lrs, axes=axes, changes=changes, follow="muon", question="better cheap step")}


def _paper() -> dict[str, Entry]:
    """The paper's plain setting, row_scale 1."""
    return {"paper": Entry(PLAIN_LRS, num_seeds=3, num_tuning_seeds=1, question="plain setting", cases=("S", "M"))}


def _cheap_steps() -> dict[str, Entry]:
    """Cheap steps side by side at K = 3, the row step among them, all with what was chosen for Muon but its lr."""

    def entry(lrs: tuple[float, ...], question: str = "cheap step", **changes: object) -> Entry:
        periodic = {"name": "periodic", "period": 3}
        shared: dict[str, Any] = {"follow": "muon", "num_seeds": 3, "num_tuning_seeds": 1, "cases": ("S",)}
        return Entry(lrs, changes=periodic | changes, question=question, **shared)

    low, middle, high = (6e-3, 1e-2, 1.6e-2, 2.5e-2), (1e-2, 1.6e-2, 2.5e-2, 4e-2), (1.6e-2, 2.5e-2, 4e-2, 6.4e-2)
    return {
        "skip": entry(high, row_scale=0.0),
        "gram": entry(low, cheap_step="gram", row_scale=1.0),
        "row": entry(high, row_scale=0.25),
        "sign": entry(middle, "other cheap steps", cheap_step="sign", row_scale=0.25),
        "blocks": entry(low, "other cheap steps", cheap_step="blocks", row_scale=1.0),
    }


def _schedules() -> dict[str, Entry]:
    """What might mend an end worse than Muon's: plain Muon steps at the end, a learning rate that decays."""
    ends = ((0, 3), (STEPS - STEPS * 15 // 100, 1))
    decay = {"train.schedule": "trapezoid", "train.decay_fraction": 0.2}

    def entry(lrs: tuple[float, ...], follow: str, changes: dict[str, object]) -> Entry:
        shared: dict[str, Any] = {"num_seeds": 3, "num_tuning_seeds": 1, "cases": ("S",)}
        return Entry(lrs, changes=changes, follow=follow, question="schedule", **shared)

    return {
        "ends-k1": entry((1e-2, 1.6e-2, 2.5e-2), "periodic", {"period": ends}),
        "adamw-decay": entry((7.5e-3, 1.2e-2, 1.9e-2, 3e-2), "adamw", decay),
        "muon-decay": entry((1e-2, 1.6e-2, 2.5e-2, 4e-2), "muon", decay),
        "periodic-decay": entry((1e-2, 1.6e-2, 2.5e-2, 4e-2), "periodic", decay),
        "gram-row-decay": entry((1e-2, 1.6e-2, 2.5e-2, 4e-2), "gram-row", decay),
    }


def _scales() -> dict[str, Entry]:
    """row_scale x lr at K = 3; 1 is the plain setting, 0.25 the periodic method's start."""
    return {
        f"scale-{scale:g}": Entry(
            MUON_LRS,
            changes={"row_scale": scale},
            follow="periodic",
            num_seeds=2,
            num_tuning_seeds=1,
            question="row_scale",
            cases=("S",),
        )
        for scale in (0.5, 0.25, 0.1, 0.05)
    }


def _periods() -> dict[str, Entry]:
    """K at row_scale 1; K = 1 is Muon, K = 3 the plain setting."""
    periods = {"k2": 2, "k5": 5, "k10": 10, "never": None}
    return {
        f"plain-{name}": Entry(
            PLAIN_LRS,
            changes={"period": period},
            follow="paper",
            num_seeds=2,
            num_tuning_seeds=1,
            question="period",
            cases=("S",),
        )
        for name, period in periods.items()
    }


def _gram_variants() -> dict[str, Entry]:
    """The Gram factor kept for longer, and damped more and less; skipping at the same periods beside it."""

    def entry(follow: str, changes: dict[str, object], lrs: tuple[float, ...] = MUON_LRS) -> Entry:
        shared: dict[str, Any] = {"num_seeds": 2, "num_tuning_seeds": 1, "cases": ("S",)}
        return Entry(lrs, changes=changes, follow=follow, question="gram factor", **shared)

    skip_lrs = (1.6e-2, 2.5e-2, 4e-2, 6.4e-2)
    return {
        "gram-k5": entry("gram", {"period": 5}),
        "gram-k10": entry("gram", {"period": 10}),
        "gram-row-k5": entry("gram-row", {"period": 5}, MUON_LRS[1:]),
        "gram-row-k10": entry("gram-row", {"period": 10}, MUON_LRS[1:]),
        "skip-k5": entry("skip", {"period": 5}, skip_lrs),
        "skip-k10": entry("skip", {"period": 10}, skip_lrs),
        "gram-damping-1e-2": entry("gram", {"cheap_step_parameter": 1e-2}),
        "gram-damping-1e-4": entry("gram", {"cheap_step_parameter": 1e-4}),
    }


def _details() -> dict[str, Entry]:
    """Choices inside the periodic method, one changed at a time."""

    def entry(**changes: object) -> Entry:
        lrs = (1e-2, 1.6e-2, 2.5e-2)
        shared: dict[str, Any] = {"num_seeds": 2, "num_tuning_seeds": 1, "cases": ("S",)}
        return Entry(lrs, changes=changes, follow="periodic", question="details", **shared)

    return {
        "adaln-adamw": entry(adaln="adamw"),
        "no-nesterov": entry(nesterov=False),
        "polar-express": entry(ns_coefficients="polar_express"),
        "fused": entry(chunked=False),
        "bf16-momentum": entry(state_dtype="bfloat16"),
    }
