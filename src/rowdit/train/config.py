"""The one description of a run: six frozen sections, checked when they are made, read from and written to JSON.

A run is a value. `RunConfig` holds everything that changes what the weights will be, and nothing that doesn't (where
to write, how many threads), so that two runs with equal configs are the same run and may be resumed into each other.
`rowdit.recipes` are functions that return configs; the command line overrides single fields; the resolved config is
written beside the checkpoints. A key that doesn't exist, a value of the wrong type or out of range is an error that
names the key, the value and the nearest valid choice: a typing error never trains with a default.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import rowmuon
from rowdit.models.dit import DiTConfig
from rowdit.models.parallel import ParallelConfig
from rowdit.train.plain import ConfigError, differences, flatten, from_dict, nearest, to_dict
from rowdit.train.posthoc import LARGEST_STD

__all__ = [
    "OPTIMIZERS",
    "ConfigError",
    "DataConfig",
    "EvaluateConfig",
    "OptimizerConfig",
    "RunConfig",
    "TrainConfig",
    "differences",
    "flatten",
    "from_dict",
    "nearest",
    "to_dict",
]

OPTIMIZERS = ("adamw", "muon", "periodic")
SCHEDULES = ("constant", "cosine", "trapezoid", "inverse_sqrt")
EXPERIMENTS = ("sign", "blocks", "gram")
CHEAP_STEPS = ("row", "gram_row", *EXPERIMENTS)


def _check(section: object, name: str, ok: bool, wanted: str) -> None:
    if not ok:
        raise ConfigError(f"{name} = {getattr(section, name)!r}: must be {wanted}")


@dataclass(frozen=True)
class DataConfig:
    """Which images.

    Args:
        source: what `rowdit.data.open_dataset` takes: `"bundled"`, `"fashion-mnist[:FOLDER]"`, `"folder:PATH"`,
            `"tar:PATTERN"`, `"parquet:PATTERN"`, `"hf:NAME"` or `"latents:PATH"`.
        channels: 3 for RGB, 1 for grey; None is what the source has.
        bad_images: what becomes of images that can't be used: `"error"`, `"skip"` or `"replace"`.
        image_key, label_key: of tar shards, Parquet and Hugging Face datasets, which member or column is the image and
            which the label; None is the usual one.
        flip: mirror each image left to right with probability 1/2, anew each time it comes. Wrong for writing.
        num_workers: processes that read ahead on each rank; 0 reads between the steps.
    """

    source: str = "bundled"
    channels: int | None = None
    bad_images: Literal["error", "skip", "replace"] = "error"
    image_key: str | None = None
    label_key: str | None = None
    flip: bool = False
    num_workers: int = 0

    def __post_init__(self) -> None:
        _check(self, "channels", self.channels in (None, 1, 3), "1, 3 or null")
        _check(self, "bad_images", self.bad_images in ("error", "skip", "replace"), "error, skip or replace")
        _check(self, "num_workers", self.num_workers >= 0, "an integer >= 0")
        _check(self, "source", bool(self.source), "the name of a data source, such as 'bundled' or 'folder:PATH'")

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `rowdit.data.open_dataset` that say how the source is read."""
        return {name: getattr(self, name) for name in ("channels", "bad_images", "image_key", "label_key")}


@dataclass(frozen=True)
class OptimizerConfig:
    """One of the three optimizers with all its settings; `settings()` gives those that it reads.

    Args:
        name: `"adamw"` (every parameter), `"muon"`, or `"periodic"` (Periodic Row-wise Muon). The latter two put the
            matrices of the transformer blocks under Muon and the rest under AdamW, by `rowmuon.rules.DIT`.
        lr: base learning rate; of AdamW, or of the Muon matrices in the convention of `adjust_lr_fn`. >= 0.
        adamw_lr: learning rate of the parameters that Muon leaves to AdamW; None takes `lr`. Unused by `"adamw"`.
        weight_decay: decoupled decay of all parameters, times the lr. >= 0.
        betas, eps: of AdamW, the main or the auxiliary one.
        momentum, nesterov: of the Muon matrices.
        adjust_lr_fn: scale convention, as in `torch.optim.Muon`: `"match_rms_adamw"` or `"original"`.
        ns_coefficients: name of a Newton-Schulz coefficient set of `rowmuon.COEFFICIENTS`.
        adaln: whether the adaLN matrices go to `"muon"` (six chunks each) or to `"adamw"`.
        chunked: whether matrices that the model keeps in one (q, k and v; the six of adaLN; the first two of a gated
            MLP) are orthogonalised each for itself, or fused as they lie.
        state_dtype: of the Muon matrices' momentum, `"float32"` or `"bfloat16"`; null is that of the weights.
        overlap: `"backward"` sends a refresh's first buckets while backward goes on. Changes time, not the result; not
            with `train.grad_clip`.
        period: of `"periodic"` only. A refresh every `period` steps; None never refreshes; a schedule is pairs
            (first step, period), e.g. ((0, 3), (800, 1)).
        row_scale: of `"periodic"` only. RMS of a row step over that of a refresh. >= 0; at 0 the weights move at
            refreshes alone.
        cheap_step: of `"periodic"` only. What is done between refreshes: `"row"`, the method's step; `"gram_row"`, our
            own, nearer to Muon's and dearer (docs/choose.md), not with a `period` that ends; or one of the experimental
            ones of `rowdit.study.steps`, which `compare`, `tune` and `study` know and `train` doesn't.
        cheap_step_parameter: of `"gram"` and `"gram_row"` the damping, of `"blocks"` their number; null takes the
            step's own default.
    """

    name: Literal["adamw", "muon", "periodic"] = "adamw"
    lr: float = 1e-3
    adamw_lr: float | None = None
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.95
    nesterov: bool = True
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    ns_coefficients: str = "keller_jordan"
    adaln: Literal["muon", "adamw"] = "muon"
    chunked: bool = True
    state_dtype: Literal["float32", "bfloat16"] | None = None
    overlap: Literal["backward"] | None = None
    period: int | tuple[tuple[int, int | None], ...] | None = 3
    row_scale: float = 1.0
    cheap_step: Literal["row", "sign", "blocks", "gram", "gram_row"] = "row"
    cheap_step_parameter: float | None = None

    def __post_init__(self) -> None:
        _check(self, "name", self.name in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}")
        _check(self, "lr", math.isfinite(self.lr) and self.lr >= 0, "a finite number >= 0")
        _check(
            self, "adamw_lr", self.adamw_lr is None or 0 <= self.adamw_lr < math.inf, "a finite number >= 0, or null"
        )
        _check(self, "weight_decay", 0 <= self.weight_decay < math.inf, "a finite number >= 0")
        _check(self, "betas", all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)")
        _check(self, "eps", 0 < self.eps < 1, "in (0, 1)")
        _check(self, "momentum", 0 <= self.momentum < 1, "in [0, 1)")
        _check(self, "row_scale", 0 <= self.row_scale < math.inf, "a finite number >= 0")
        _check(self, "cheap_step", self.cheap_step in CHEAP_STEPS, f"one of {', '.join(CHEAP_STEPS)}")
        _check(
            self,
            "cheap_step_parameter",
            self.cheap_step_parameter is None
            or (self.cheap_step in ("blocks", "gram", "gram_row") and self.cheap_step_parameter > 0),
            "null, or a number > 0 for blocks (how many), gram or gram_row (the damping)",
        )
        names = ", ".join(rowmuon.COEFFICIENTS)
        _check(self, "state_dtype", self.state_dtype in (None, "float32", "bfloat16"), "float32, bfloat16 or null")
        _check(self, "overlap", self.overlap in (None, "backward"), "backward or null")
        _check(self, "ns_coefficients", self.ns_coefficients in rowmuon.COEFFICIENTS, f"one of {names}")
        _check(self, "period", _is_period(self.period), _PERIOD)
        if self.cheap_step == "gram_row":
            _check(
                self, "period", not _ends(self.period), "without null under cheap_step gram_row, which needs refreshes"
            )
        for key in self._unread():
            if getattr(self, key) != _DEFAULTS[key]:
                readers = "periodic" if key in _PERIODIC_ONLY else "muon or periodic"
                raise ConfigError(
                    f"{key} = {getattr(self, key)!r}: the optimizer {self.name!r} doesn't read it, only {readers} does"
                )

    def _unread(self) -> tuple[str, ...]:
        return {"adamw": _MUON_ONLY + _PERIODIC_ONLY, "muon": _PERIODIC_ONLY, "periodic": ()}[self.name]

    def settings(self) -> dict[str, Any]:
        """Every setting that this optimizer reads, JSON-able, with the auxiliary learning rate filled in."""
        settings = {key: value for key, value in to_dict(self).items() if key not in self._unread()}
        if "adamw_lr" in settings and settings["adamw_lr"] is None:
            settings["adamw_lr"] = self.lr
        return settings


_PERIOD = "an integer >= 1, null, or pairs (first step, period) whose steps start at 0 and rise"


def _is_period(period: Any) -> bool:
    if not isinstance(period, tuple):
        return period is None or period >= 1
    starts = [start for start, _ in period]
    rises = starts[:1] == [0] and all(a < b for a, b in zip(starts, starts[1:], strict=False))
    return rises and all(every is None or every >= 1 for _, every in period)


def _ends(period: Any) -> bool:
    return any(every is None for _, every in (period if isinstance(period, tuple) else ((0, period),)))


_MUON_ONLY = (
    "adamw_lr", "momentum", "nesterov", "adjust_lr_fn", "ns_coefficients", "adaln", "chunked", "state_dtype", "overlap",
)  # fmt: skip
_PERIODIC_ONLY = ("period", "row_scale", "cheap_step", "cheap_step_parameter")
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(OptimizerConfig)}


@dataclass(frozen=True)
class TrainConfig:
    """How long and how.

    Args:
        batch_size: images per optimizer step, over all ranks and micro-batches. > 0.
        micro_batch_size: images per forward pass on each rank; None takes the rank's whole share of the batch. Changes
            memory, not the result.
        steps: optimizer steps of the whole run. > 0.
        seed: of the initial weights, data order, noise, times and class dropout.
        ema_decay: of the averaged weights, in [0, 1); ramped up at the start, see `rowdit.train.ema`.
        ema_decays: of further averages, kept beside and saved.
        ema_stds: widths of power-function averages, in (0, 0.288); of two, any other can be put together afterwards.
        ema_snapshot_every: steps between the snapshots of those that this needs; 0 takes none.
        class_dropout: share of labels replaced by the null class, in [0, 1).
        time_sampling: density of t in [0, 1]: `"uniform"` or `"logit_normal"`.
        schedule: of the learning rates, after a linear warm-up of `warmup_steps`: `"constant"`, `"cosine"` down to
            `final_lr_factor` at the last step, `"trapezoid"`: constant, then linear over the last `decay_fraction`, or
            `"inverse_sqrt"`: constant up to `reference_steps`, then falling with the root of the steps.
        grad_clip: largest global norm of the raw gradient; null doesn't clip. > 0.
        skip_grad_norm: a step whose gradient has a larger norm is skipped, as one that isn't finite is; null skips
            none for its size. > 0.
        max_skipped_in_row: after this many skipped steps in a row the run stops. >= 1.
        checkpoint_every: steps between checkpoints. > 0.
        keep_checkpoints: newest complete checkpoints to keep. >= 1.
        async_checkpoints: write them beside the training, from a copy of the state on the CPU.
    """

    batch_size: int = 64
    micro_batch_size: int | None = None
    steps: int = 1000
    seed: int = 0
    ema_decay: float = 0.99
    ema_decays: tuple[float, ...] = ()
    ema_stds: tuple[float, ...] = ()
    ema_snapshot_every: int = 0
    class_dropout: float = 0.1
    time_sampling: Literal["uniform", "logit_normal"] = "uniform"
    schedule: Literal["constant", "cosine", "trapezoid", "inverse_sqrt"] = "constant"
    warmup_steps: int = 0
    reference_steps: int = 1000
    decay_fraction: float = 0.2
    final_lr_factor: float = 0.0
    grad_clip: float | None = 1.0
    skip_grad_norm: float | None = None
    max_skipped_in_row: int = 10
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    async_checkpoints: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "steps", "checkpoint_every", "keep_checkpoints", "max_skipped_in_row"):
            _check(self, name, getattr(self, name) >= 1, "an integer >= 1")
        _check(
            self,
            "steps",
            self.steps * self.batch_size < 2**63,
            f"fewer: an image's place in the stream of steps x batch_size ({self.batch_size}) has 63 bits",
        )
        micro = self.micro_batch_size
        _check(self, "micro_batch_size", micro is None or micro >= 1, "an integer >= 1, or null")
        _check(self, "seed", 0 <= self.seed < 2**63, "an integer in [0, 2^63)")
        _check(self, "ema_decay", 0 <= self.ema_decay < 1, "in [0, 1)")
        _check(self, "class_dropout", 0 <= self.class_dropout < 1, "in [0, 1)")
        _check(self, "time_sampling", self.time_sampling in ("uniform", "logit_normal"), "uniform or logit_normal")
        _check(self, "schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        _check(self, "reference_steps", self.reference_steps >= 1, "an integer >= 1")
        _check(self, "ema_decays", all(0 <= decay < 1 for decay in self.ema_decays), "numbers in [0, 1)")
        _check(self, "ema_stds", all(0 < std < LARGEST_STD for std in self.ema_stds), "numbers in (0, 0.288)")
        _check(self, "ema_snapshot_every", self.ema_snapshot_every >= 0, "an integer >= 0")
        _check(self, "warmup_steps", self.warmup_steps >= 0, "an integer >= 0")
        _check(self, "decay_fraction", 0 < self.decay_fraction <= 1, "in (0, 1]")
        _check(self, "final_lr_factor", 0 <= self.final_lr_factor <= 1, "in [0, 1]")
        if self.ema_snapshot_every and not self.ema_stds:
            raise ConfigError(f"ema_snapshot_every = {self.ema_snapshot_every}: there is nothing to keep; set ema_stds")
        for name in ("grad_clip", "skip_grad_norm"):
            value = getattr(self, name)
            _check(self, name, value is None or value > 0, "a number > 0, or null")


@dataclass(frozen=True)
class EvaluateConfig:
    """What is measured, and when. The same labels and noise at every evaluation of every run.

    Args:
        num_evaluations: evaluations on an even grid of steps, the last one at the end. >= 1.
        num_samples: images of the set that selects the best step, and again of the disjoint set that reports. >= 2.
        num_val_images: held-out images for the validation loss. >= 1.
        sampler: `"euler"`, `"heun"` or `"dpm"` (DPM-Solver++(2M)). num_steps: its steps. >= 1.
        guidance: scale of classifier-free guidance; 1 is none, one forward pass a step.
        guidance_interval: (low, high) in [0, 1], the times at which to guide; null guides at all of them.
        time_shift: of the sampler's grid, see `rowdit.flow.time_grid`; 1 is the even grid. > 0.
        seed: of the samples' noise and of the validation noise; not the training seed, so runs can be compared.
        grid_images: images in the sample grid of each evaluation.
        at_start: also evaluate at step 0, so that what doesn't fit into memory or can't work is seen at once.
    """

    num_evaluations: int = 4
    num_samples: int = 1000
    num_val_images: int = 1000
    sampler: Literal["euler", "heun", "dpm"] = "euler"
    num_steps: int = 10
    guidance: float = 1.0
    guidance_interval: tuple[float, float] | None = None
    time_shift: float = 1.0
    seed: int = 0
    grid_images: int = 40
    at_start: bool = False

    def __post_init__(self) -> None:
        _check(self, "num_evaluations", 1 <= self.num_evaluations <= 10**5, "an integer in [1, 100000]")
        _check(self, "num_samples", self.num_samples >= 2, "an integer >= 2")
        for name in ("num_val_images", "grid_images"):
            _check(self, name, getattr(self, name) >= 1, "an integer >= 1")
        _check(self, "num_steps", 1 <= self.num_steps <= 10**5, "an integer in [1, 100000]; 10 to 250 are usual")
        _check(self, "sampler", self.sampler in ("euler", "heun", "dpm"), "euler, heun or dpm")
        _check(self, "guidance", 0 <= self.guidance < math.inf, "a finite number >= 0")
        interval = self.guidance_interval
        ok = interval is None or 0 <= interval[0] < interval[1] <= 1
        _check(self, "guidance_interval", ok, "two times (low, high) with 0 <= low < high <= 1, or null")
        _check(self, "time_shift", 0 < self.time_shift < math.inf, "a finite number > 0")
        _check(self, "seed", 0 <= self.seed < 2**63, "an integer in [0, 2^63)")

    def steps(self, total_steps: int) -> tuple[int, ...]:
        """The grid: `num_evaluations` steps, evenly spaced, ending at `total_steps`; fewer if there are fewer steps.

        >>> EvaluateConfig(num_evaluations=4).steps(1000)
        (250, 500, 750, 1000)
        """
        grid = {round(total_steps * i / self.num_evaluations) for i in range(1, self.num_evaluations + 1)}
        return tuple(sorted(grid - {0}))


@dataclass(frozen=True)
class RunConfig:
    """One run, whole."""

    model: DiTConfig
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if self.optimizer.overlap and self.train.grad_clip is not None:
            raise ConfigError(
                f"optimizer.overlap = {self.optimizer.overlap!r} with train.grad_clip = {self.train.grad_clip}: "
                "gradients are sent before their norm is known. Set train.grad_clip to null, or optimizer.overlap."
            )
