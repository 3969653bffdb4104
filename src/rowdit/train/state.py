"""The state of a run: model, optimizer, averages, counters; how it is built, and how it becomes named tensors.

Everything that a checkpoint holds has a name: `model.NAME`, `ema.NAME` (and one more such prefix an average),
`optimizer.NAME.KEY`, where NAME is the parameter's. So a checkpoint knows nothing of ranks, meshes or parameter order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rowdit.models.parallel import build_model
from rowdit.train.config import OptimizerConfig, RunConfig
from rowdit.train.ema import Ema, PowerEma
from rowdit.train.optimizers import build_optimizer
from rowdit.train.world import World

COUNTERS = ("step", "images_seen", "num_updates", "num_skipped", "num_skipped_in_row")


@dataclass
class TrainState:
    """All that a step changes. `step` counts batches taken from the stream, skipped ones too; `num_updates` doesn't.

    `ema` is the average that is evaluated; `more_averages` are others, by their label.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: Ema
    step: int = 0
    images_seen: int = 0
    num_updates: int = 0
    num_skipped: int = 0
    num_skipped_in_row: int = 0
    more_averages: dict[str, Ema] = field(default_factory=dict)

    @property
    def averages(self) -> dict[str, Ema]:
        """All averages by label; the evaluated one is `"ema"`."""
        return {"ema": self.ema, **self.more_averages}


def build_state(
    config: RunConfig,
    build: Callable[[nn.Module, OptimizerConfig], torch.optim.Optimizer] = build_optimizer,
    *,
    world: World | None = None,
    draw_weights: bool = True,
) -> TrainState:
    """Model, optimizer and averages at step 0; the initial weights depend on the config's model and seed alone.

    Args:
        config: the run.
        build: makes the optimizer, from the sharded model; names and shapes are as unsharded.
        world: the ranks; None is one process on the CPU.
        draw_weights: False leaves the weights unset, for a checkpoint that is loaded next.
    """
    world = world or World()
    seed = config.train.seed if draw_weights else None
    model = build_model(config.model, config.parallel, seed=seed, device=world.device, mesh=world.mesh)
    optimizer = build(model, config.optimizer)
    state = TrainState(model, optimizer, Ema(model, config.train.ema_decay))
    state.more_averages.update({f"ema_{decay:g}": Ema(model, decay) for decay in config.train.ema_decays})
    state.more_averages.update({f"power_{std:g}": PowerEma(model, std) for std in config.train.ema_stds})
    return state


# ---------------------------------------------------------------------------------------------------------------------
# to and from named tensors and plain values


def tensors_of(state: TrainState) -> dict[str, Tensor]:
    """Every tensor of the state by its name; the live ones."""
    tensors = {f"model.{name}": p.detach() for name, p in state.model.named_parameters()}
    for label, average in state.averages.items():
        tensors |= {f"{label}.{name}": weight for name, weight in average.weights.items()}
    for name, p in state.model.named_parameters():
        for key, value in state.optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def values_of(state: TrainState) -> dict[str, Any]:
    """All of the state that isn't a tensor, as JSON-able plain data."""
    optimizer: dict[str, dict[str, Any]] = {}
    for name, p in state.model.named_parameters():
        values = {k: v for k, v in state.optimizer.state.get(p, {}).items() if not isinstance(v, Tensor)}
        if values:
            optimizer[name] = values
    return {
        **{name: getattr(state, name) for name in COUNTERS},
        "averages": {label: {"num_updates": average.num_updates} for label, average in state.averages.items()},
        "optimizer": optimizer,
    }


def destinations(state: TrainState, saved: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
    """Where the saved tensors go: the live ones, and for an optimizer that hasn't stepped yet new ones.

    Args:
        state: of the same config.
        saved: global shape and dtype of each saved tensor, by name.

    Raises:
        ValueError: names or shapes that differ.
    """
    live = tensors_of(state)
    parameters = dict(state.model.named_parameters())
    for name, (shape, dtype) in saved.items():
        parameter = parameters.get(name.removeprefix("optimizer.").rpartition(".")[0])
        lazily_made = parameter is not None and not state.optimizer.state.get(parameter)
        if name not in live and name.startswith("optimizer.") and parameter is not None and lazily_made:
            like = parameter.detach()
            fits = shape == like.shape
            live[name] = torch.zeros_like(like, dtype=dtype) if fits else torch.zeros(shape, dtype=dtype)
    missing, extra = sorted(live.keys() - saved.keys()), sorted(saved.keys() - live.keys())
    if missing or extra:
        raise ValueError(f"missing {missing[:3]}, unexpected {extra[:3]}")
    for name, tensor in live.items():
        if tensor.shape != saved[name][0]:
            raise ValueError(f"{name} is {tuple(saved[name][0])}, this run's is {tuple(tensor.shape)}")
    return live


def take_values(state: TrainState, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Completes a load: `tensors`, the destinations, are filled; the rest of the state is taken from `values`.

    The settings of the optimizer's groups stay those of the config.
    """
    for label, average in state.averages.items():
        average.num_updates = values["averages"][label]["num_updates"]
    names = {p: name for name, p in state.model.named_parameters()}
    entries: dict[str, dict[str, Any]] = {name: dict(plain) for name, plain in values["optimizer"].items()}
    for full_name, tensor in tensors.items():
        if full_name.startswith("optimizer."):
            name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
            entries.setdefault(name, {})[key] = tensor
    order = [names[p] for group in state.optimizer.param_groups for p in group["params"]]
    saved = {index: entries[name] for index, name in enumerate(order) if name in entries}
    groups = state.optimizer.state_dict()["param_groups"]
    state.optimizer.load_state_dict({"state": saved, "param_groups": groups})
    for name in COUNTERS:
        setattr(state, name, values[name])
