"""A run on several ranks is the run on one: T3 to T7, T9 to T13 of what went wrong in other trainers.

Every rank takes its share of the same batch, so loss, gradient norm and weights are one process's but for rounding.
Newton-Schulz and what is sent are in fp32 here: in bf16 a sum that rounds otherwise by 1e-7 can flip a bf16 rounding,
which is 4e-3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

import rowmuon
from ranks.pool import RankPool, device_type
from rowdit.commands.monitor import GOLDEN, Monitor
from rowdit.data import batch_at, to_uint8
from rowdit.models.parallel import ParallelConfig, resharded
from rowdit.train import checkpoint
from rowdit.train.config import ConfigError, OptimizerConfig, RunConfig
from rowdit.train.log import read_jsonl
from rowdit.train.loop import Outcome, train
from rowdit.train.optimizers import build_optimizer
from rowdit.train.state import build_state, tensors_of
from rowdit.train.step import TrainingDivergedError, backward, clip_gradients_, draw, train_step
from rowdit.train.stop import StopRequest
from rowdit.train.world import World, world_of_group
from toy_training import same_state, saved_state, toy_config, toy_dataset

FSDP, HSDP = ParallelConfig(), ParallelConfig(replicas=2)
MEMORY_SAVING = ParallelConfig(activation_checkpointing=True, accumulate_unsharded=True)
# Of losses, norms and weights of order 1, after a dozen steps: a few roundings of fp32 sums in another order a step.
TOLERANCE = 2e-5


def exact(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The run's optimizer with fp32 wherever it would take bf16."""
    if config.name == "adamw":
        return build_optimizer(model, config)
    muon: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    adamw: dict[str, Any] = {"lr": config.adamw_lr, "weight_decay": config.weight_decay, "betas": config.betas}
    groups = rowmuon.param_groups(model, rules=rowmuon.rules.DIT, muon=muon, adamw=adamw)
    return rowmuon.PeriodicRowMuon(
        groups,
        adjust_lr_fn="match_rms_adamw",
        period=config.period,
        row_scale=config.row_scale,
        ns_dtype=torch.float32,
        comm_dtype=torch.float32,
    )


def world_here(config: RunConfig) -> World:
    if not dist.is_initialized():
        return World()
    device = torch.device("cuda", dist.get_rank()) if device_type() == "cuda" else torch.device("cpu")
    return world_of_group(config.parallel, device)


def look(model: nn.Module, step: int) -> dict[str, Any]:
    """What the averaged weights give for one batch; every rank must call it."""
    batch = batch_at(toy_dataset(), seed=9, images_seen=0, batch_size=8)
    device = next(model.parameters()).device
    inputs = (v.to(device) for v in (batch.images, torch.linspace(0, 1, 8), batch.labels))
    with torch.no_grad():
        return {"output": float(model(*inputs).double().square().sum())}


def train_here(
    folder: str, config: RunConfig, stop_at: int = -1, stopping_rank: int = 0, looks: bool = True
) -> Outcome:
    """Trains on these ranks until the end, or until one rank is asked to stop."""
    world = world_here(config)
    counted = {"steps": 0}

    def asked() -> bool:
        counted["steps"] += 1
        return world.rank == stopping_rank and counted["steps"] == stop_at + 1

    return train(
        config,
        toy_dataset(),
        Path(folder),
        evaluate=look if looks else None,
        build=exact,
        stop=StopRequest(also=asked),
        world=world,
    )


def on(config: RunConfig, parallel: ParallelConfig, **fields: Any) -> RunConfig:
    return dataclasses.replace(config, parallel=parallel, train=dataclasses.replace(config.train, **fields))


def rows_of(folder: Path, *keys: str) -> list[list[Any]]:
    return [[row[key] for key in keys] for row in read_jsonl(folder / "log.jsonl")]


def assert_close_runs(folder: Path, reference: Path) -> None:
    """The same batches and kinds of step; losses, gradient norms, evaluations and state but for rounding."""
    exact_keys = ("step", "images_seen", "kind", "lr")
    assert rows_of(folder, *exact_keys) == rows_of(reference, *exact_keys)
    numbers = [np.array(rows_of(f, "loss", "grad_norm")) for f in (folder, reference)]
    np.testing.assert_allclose(*numbers, rtol=TOLERANCE)
    outputs = [[row["output"] for row in read_jsonl(f / "evaluations.jsonl")] for f in (folder, reference)]
    np.testing.assert_allclose(*outputs, rtol=10 * TOLERANCE)
    (tensors, values), (expected, expected_values) = saved_state(folder), saved_state(reference)
    for both in (values, expected_values):
        both["config"]["train"].pop("micro_batch_size")
        both["config"]["train"].pop("async_checkpoints")
    assert values == expected_values
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        error = float(
            (tensor.double() - expected[name].double()).norm() / expected[name].double().norm().clamp(min=1e-3)
        )
        assert error < 10 * TOLERANCE, f"{name}: {error:.2g}"


Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(
    ("world_size", "parallel", "micro", "optimizer"),
    [
        (2, FSDP, None, "periodic"),
        (2, FSDP, 1, "adamw"),
        (2, MEMORY_SAVING, 1, "periodic"),
        (2, HSDP, 2, "periodic"),  # whole copies, as DDP has them
        (4, HSDP, 1, "periodic"),
        pytest.param(8, ParallelConfig(replicas=4), 1, "periodic", marks=pytest.mark.slow),
    ],
)
def test_ranks_and_micro_batches_change_nothing(
    world_size: int, parallel: ParallelConfig, micro: int | None, optimizer: str, ranks: Ranks, tmp_path: Path
) -> None:
    """T7, T10, T11: the losses that are logged, the gradient norms, weights, momentum and averages."""
    config = toy_config(optimizer, ema_decays=(0.5,), ema_stds=(0.1,))
    train_here(str(tmp_path / "one"), config)
    outcomes = ranks(world_size).run(train_here, str(tmp_path / "many"), on(config, parallel, micro_batch_size=micro))
    assert outcomes == [Outcome("finished", 12)] * world_size
    assert_close_runs(tmp_path / "many", tmp_path / "one")


@pytest.mark.parametrize("world_size", [4])
def test_a_run_moves_from_one_rank_to_four_and_back(world_size: int, ranks: Ranks, tmp_path: Path) -> None:
    """T4: stopped and gone on with at other numbers of ranks, FSDP to HSDP, back to one process; one rank is told to
    stop and all do. Beside it the run on one process that was never stopped."""
    config = toy_config("periodic")
    train_here(str(tmp_path / "whole"), config)
    folder = str(tmp_path / "moved")
    assert train_here(folder, config, stop_at=2) == Outcome("interrupted", 2)
    pool = ranks(world_size)
    assert pool.run(train_here, folder, on(config, FSDP), 3, 2) == [Outcome("interrupted", 5)] * world_size
    assert (
        pool.run(train_here, folder, on(config, HSDP, async_checkpoints=True), 4, 3)
        == [Outcome("interrupted", 9)] * world_size
    )
    assert train_here(folder, config) == Outcome("finished", 12)
    assert_close_runs(tmp_path / "moved", tmp_path / "whole")


def algorithms(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[str, int]]:
    """Name -> (algorithm, chunks)."""
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: (g["algorithm"], g.get("chunks", 1)) for g in optimizer.param_groups for p in g["params"]}


def compare_states(folder: str, config: RunConfig) -> tuple[bool, bool, bool]:
    """Initial weights are one process's to the bit; parameters go where they go on one; a checkpoint's values come back
    to the bit."""
    world = world_here(config)
    state = build_state(config, exact, world=world)
    alone_state = build_state(config, exact)
    alone = dict(alone_state.model.named_parameters())
    same_routes = algorithms(state.model, state.optimizer) == algorithms(alone_state.model, alone_state.optimizer)
    whole = {name: p.full_tensor().cpu() for name, p in state.model.named_parameters()}  # type: ignore[attr-defined]
    same_start = all(torch.equal(whole[name], alone[name]) for name in alone)
    for step in range(3):
        batch = batch_at(
            toy_dataset(), seed=0, images_seen=8 * step, batch_size=8, rank=world.rank, world_size=world.size
        )
        train_step(state, batch, config, world)
    saver = checkpoint.Saver(Path(folder), world, asynchronous=config.train.async_checkpoints)
    saver.save(state, config)
    saver.wait()
    other = build_state(config, exact, world=world, draw_weights=False)
    checkpoint.load(checkpoint.Checkpoint(Path(folder) / "step-0000003", 3), other, world)
    here, there = tensors_of(state), tensors_of(other)
    local: Callable[[Tensor], Tensor] = lambda t: t.to_local() if hasattr(t, "to_local") else t  # noqa: E731
    return same_start, same_routes, all(torch.equal(local(here[name]), local(there[name])) for name in here)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("world_size", [4])
def test_same_start_and_a_table_with_fewer_rows_than_ranks(
    world_size: int, asynchronous: bool, ranks: Ranks, tmp_path: Path
) -> None:
    """T5: two classes and none make three rows, so that one of four ranks has no row of the table. T23: sharding
    changes no route."""
    config = toy_config("periodic", async_checkpoints=asynchronous)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_classes=2, hidden_size=8))
    assert ranks(world_size).run(compare_states, str(tmp_path), config) == [(True, True, True)] * world_size


@pytest.mark.parametrize("world_size", [2])
def test_an_evaluation_leaves_no_trace(world_size: int, ranks: Ranks, tmp_path: Path) -> None:
    """T6: evaluated and saved at the same step, the shards are what is saved, to the bit. T12: the averages are what
    was evaluated, each time the present ones."""
    config = toy_config("periodic")  # evaluates at 4, 8 and 12, and saves there too
    pool = ranks(world_size)
    for name, looks in (("with", True), ("without", False)):
        pool.run(train_here, str(tmp_path / name), on(config, FSDP, keep_checkpoints=9), -1, 0, looks)
    assert same_state(tmp_path / "with", tmp_path / "without")
    outputs = {row["step"]: row["output"] for row in read_jsonl(tmp_path / "with" / "evaluations.jsonl")}
    assert len(set(outputs.values())) == 3
    for step in (4, 8, 12):
        plain = checkpoint.load_model(tmp_path / "with", step=step)
        assert look(plain, step)["output"] == pytest.approx(outputs[step], rel=TOLERANCE)


def skip_here(config: RunConfig) -> tuple[list[str], bool, str, int]:
    """Steps of which some have a NaN on the last rank alone: kinds, whether those changed nothing, reason, skipped."""
    world = world_here(config)
    state = build_state(config, exact, world=world)
    kinds, untouched, reason = [], True, ""
    for poisoned in (False, True, False, True, True):
        before = {name: tensor.clone() for name, tensor in tensors_of(state).items()}
        batch = batch_at(
            toy_dataset(), seed=0, images_seen=state.images_seen, batch_size=8, rank=world.rank, world_size=world.size
        )
        if poisoned and world.rank == world.size - 1:
            batch.images.fill_(math.nan)
        try:
            kinds.append(train_step(state, batch, config, world).kind)
        except TrainingDivergedError as error:
            reason = str(error)
        if poisoned:
            untouched &= all(torch.equal(_local(before[n]), _local(t)) for n, t in tensors_of(state).items())
    return kinds, untouched, reason, state.num_skipped


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("world_size", [2])
def test_all_ranks_skip_what_one_cannot_take(world_size: int, ranks: Ranks) -> None:
    """T13: skipped and counted on all ranks, nothing changed, a stop after two in a row."""
    config = toy_config("periodic", max_skipped_in_row=2)
    for kinds, untouched, reason, num_skipped in ranks(world_size).run(skip_here, config):
        assert kinds == ["refresh", "skipped", "row", "skipped"]
        assert untouched and num_skipped == 3 and "not finite in 2 steps in a row" in reason


def overlapped_here(config: RunConfig) -> tuple[list[str], list[bool]]:
    """Kinds of steps with overlap, and whether all tensors of both states are the same bits after each.

    The gradients of some steps come of a NaN on the last rank: what backward has sent is given up then.
    """
    world = world_here(config)
    usual = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, overlap=None))
    both = {c: build_state(c, world=world) for c in (config, usual)}
    kinds, same = [], []
    for step in range(7):
        for its, state in both.items():
            batch = batch_at(
                toy_dataset(), seed=0, images_seen=8 * step, batch_size=8, rank=world.rank, world_size=world.size
            )
            if step in (2, 4) and world.rank == world.size - 1:
                batch.images.fill_(math.nan)
            kind = train_step(state, batch, its, world).kind
        kinds.append(kind)
        found, right = (tensors_of(state) for state in both.values())
        same.append(all(torch.equal(_local(found[name]), _local(right[name])) for name in right))
    return kinds, same


@pytest.mark.parametrize("accumulate_unsharded", [False, True])
@pytest.mark.parametrize("world_size", [2])
def test_a_refresh_that_starts_in_the_backward_pass(world_size: int, accumulate_unsharded: bool, ranks: Ranks) -> None:
    config = toy_config("periodic", micro_batch_size=2, grad_clip=None)
    optimizer = dataclasses.replace(config.optimizer, overlap="backward")
    parallel = ParallelConfig(accumulate_unsharded=accumulate_unsharded)
    config = dataclasses.replace(config, optimizer=optimizer, parallel=parallel)
    for kinds, same in ranks(world_size).run(overlapped_here, config):
        assert kinds == ["refresh", "row", "skipped", "row", "skipped", "refresh", "row"]
        assert same == [True] * 7


def bounded_here(config: RunConfig) -> tuple[str, float, float]:
    """(kind of the first step, gradient norm of the batch, of this rank's shards alone)"""
    world = world_here(config)
    state = build_state(config, exact, world=world)
    batch = batch_at(toy_dataset(), seed=0, images_seen=0, batch_size=8, rank=world.rank, world_size=world.size)
    draws = draw(batch, config.train, config.model.num_classes).to(world.device)
    backward(state.model, draws, None, config.parallel)
    own = torch.stack([_local(p.grad).norm() for p in state.model.parameters() if p.grad is not None]).norm()
    result = train_step(state, batch, config, world)
    return result.kind, result.grad_norm, float(own)


@pytest.mark.parametrize("world_size", [2])
def test_the_norm_that_decides_is_the_whole_gradient_s(world_size: int, ranks: Ranks) -> None:
    """T13: each rank's shards alone are below the bound, the whole isn't: all skip."""
    pool = ranks(world_size)
    (_, norm, _), *_ = pool.run(bounded_here, toy_config("adamw"))
    for kind, _, own in pool.run(bounded_here, toy_config("adamw", skip_grad_norm=0.999 * norm)):
        assert own < 0.999 * norm and kind == "skipped"


def gradient_here(config: RunConfig, num_images: int) -> tuple[float, float, list[float]]:
    """(mean loss, gradient norm, times) of this rank's share of the first batch."""
    world = world_here(config)
    state = build_state(config, world=world)
    batch = batch_at(
        toy_dataset(), seed=3, images_seen=0, batch_size=num_images, rank=world.rank, world_size=world.size
    )
    draws = draw(batch, config.train, config.model.num_classes).to(world.device)
    loss = world.mean(backward(state.model, draws, config.train.micro_batch_size, config.parallel))
    return float(loss), clip_gradients_(state.model, None), draws.t.tolist()


@pytest.mark.parametrize("world_size", [2])
def test_eight_at_once_or_four_times_two(world_size: int, ranks: Ranks) -> None:
    """T7 and T10 within 1e-6, before any optimizer can amplify; T9: the ranks' times are the batch's, none twice."""
    config = toy_config("adamw")
    loss, norm, times = gradient_here(config, 8)
    for parallel in (FSDP, MEMORY_SAVING):
        shares = ranks(world_size).run(gradient_here, on(config, parallel, micro_batch_size=2), 8)
        for share_loss, share_norm, _ in shares:
            assert share_loss == pytest.approx(loss, abs=1e-6) and share_norm == pytest.approx(norm, abs=1e-6)
        assert [t for share in shares for t in share[2]] == times and len(set(times)) == 8


def bf16_here(config: RunConfig) -> tuple[float, set[str], bool]:
    world = world_here(config)
    state = build_state(config, world=world)
    batch = batch_at(toy_dataset(), seed=3, images_seen=0, batch_size=8, rank=world.rank, world_size=world.size)
    loss = train_step(state, batch, config, world).loss
    dtypes = {str(p.dtype) for p in state.model.parameters()} | {str(w.dtype) for w in state.ema.weights.values()}
    return loss, dtypes, all(bool(p.to_local().isfinite().all()) for p in state.model.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", [2])
def test_bf16_computes_over_fp32_weights(world_size: int, ranks: Ranks) -> None:
    config = toy_config("periodic")
    loss, _, _ = gradient_here(config, 8)
    config = on(config, ParallelConfig(param_dtype="bfloat16", activation_checkpointing=True))
    for bf16_loss, dtypes, finite in ranks(world_size).run(bf16_here, config):
        assert dtypes == {"torch.float32"} and finite
        assert bf16_loss == pytest.approx(loss, rel=0.02)  # bf16 keeps 8 bits


class Pixels:
    """Stands for an autoencoder of which the images are their own latents."""

    def decode(self, x: Tensor) -> Tensor:
        return to_uint8(x).cpu()

    def describe(self) -> dict[str, Any]:
        return {"name": "pixels"}


def monitor_here(folder: str, config: RunConfig) -> dict[str, Any]:
    world = world_here(config)
    state = build_state(config, exact, world=world)
    monitor = Monitor(config, toy_dataset(num_images=15, seed=1), Path(folder), world, decoder=Pixels())  # type: ignore[arg-type]
    with resharded(state.model):
        return monitor(state.model, 7)


@pytest.mark.parametrize("world_size", [4])
def test_what_is_measured_meanwhile_is_the_same_on_four_ranks(world_size: int, ranks: Ranks, tmp_path: Path) -> None:
    """Fifteen held-out images on four ranks: the last has one less, and all must call the model equally often."""
    config = toy_config("adamw")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, source="latents:absent"))
    alone = monitor_here(str(tmp_path / "one"), config)
    many, *others = ranks(world_size).run(monitor_here, str(tmp_path / "many"), config)
    assert [row["val_loss"] for row in others] == [many["val_loss"]] * 3
    assert many["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-6)
    assert many["val_loss_by_t"] == pytest.approx(alone["val_loss_by_t"], rel=1e-6)
    weights = np.bincount((np.arange(15) * GOLDEN % 1 * 4).astype(int))  # of the fifteen times, in each quarter
    mean = sum(w * v for w, v in zip(weights, alone["val_loss_by_t"].values(), strict=True)) / 15
    assert alone["val_loss"] == pytest.approx(mean, rel=1e-6)
    grids = [np.asarray(Image.open(tmp_path / name / many["grid"])) for name in ("one", "many")]
    assert many["grid"] == alone["grid"] == "samples/step_0000007.png"
    assert grids[0].shape == (16, 24) and np.abs(grids[0].astype(int) - grids[1]).max() <= 1


def refused_here(config: RunConfig, folder: str) -> str:
    try:
        train_here(folder, config)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world_size", [2])
def test_a_batch_that_cannot_be_shared_is_refused(world_size: int, ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(world_size).run(refused_here, toy_config("adamw", batch_size=7), str(tmp_path)):
        assert "train.batch_size = 7: can't be shared evenly by 2 ranks" in message
