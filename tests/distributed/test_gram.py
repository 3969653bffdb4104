"""Gram row steps on shards: the float64 reference, traffic as planned and counted, checkpoints at other rank counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from ranks.checks import assert_same_bits_on_replicas, counted_step, local_part, relative
from ranks.expected import expected_weights
from ranks.models import EVERY_SHAPE, Spec, build, give_gradients, optimizer_on, start
from ranks.placing import full_of, parse
from rowmuon import gram, renewal, stacks
from rowmuon.packing import unpack_

GRAM = {"cheap_step": "gram_row"}
NUM_STEPS = 5  # refresh, cheap, cheap, refresh, cheap
LAYOUTS = {
    1: ("1:plain", "1:S0"),
    2: ("2:R", "2:S0", "2:S1"),
    3: ("3:S0",),
    4: ("4:plain", "4:S0", "2x2:R,S0", "2x2:S0,R", "2x2:S0,S0", "2x2:X0,S0", "2x2:S0,S1"),
    8: ("8:S0", "2x4:R,S0", "2x2x2:R,X0,S0"),
}
QUICK = ("1:S0", "2:S0", "2:S1", "3:S0", "4:S0", "2x2:R,S0")
GRID = [
    pytest.param(world_size, layout, marks=() if layout in QUICK else pytest.mark.slow)
    for world_size, layouts in LAYOUTS.items()
    for layout in layouts
]
# Of the update of a step, as in test_grid.py; float32 factors err by up to 1e-4, see `rowmuon.gram`.
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.05}


def rows_are_split(layout: str, ndim: int) -> bool:
    shape, names = parse(layout)
    column = "2" if ndim == 3 else "1"
    return any(size > 1 and name[1:] == column for size, name in zip(shape, names, strict=True))


def takes_gram(spec: Any, layout: str) -> bool:
    return spec.algorithm == "muon" and len(spec.shape) != 3 and not rows_are_split(layout, len(spec.shape))


@contextmanager
def exact_eigenvalues() -> Iterator[None]:
    """As many power iterations as it takes, for the reference has the exact eigenvalue."""
    before, gram._NUM_POWERS = gram._NUM_POWERS, 300
    try:
        yield
    finally:
        gram._NUM_POWERS = before


def run_grid(layout: str, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    specs = [dataclasses.replace(spec, settings=GRAM) if takes_gram(spec, layout) else spec for spec in EVERY_SHAPE]
    params = build(EVERY_SHAPE, layout)
    how = {"ns_dtype": dtype, "comm_dtype": dtype, **GRAM, **settings}
    optimizer = optimizer_on(params, EVERY_SHAPE, layout, **how)
    before = full_of(params, on_rank=0)
    for step in range(NUM_STEPS):
        give_gradients(params, EVERY_SHAPE, step)
        with exact_eigenvalues():
            kind, num_collectives = counted_step(optimizer, watched=step in (1, 3))
        if kind == "row" and not rows_are_split(layout, 2) and not rows_are_split(layout, 3):
            assert num_collectives == 0
        assert_same_bits_on_replicas(params)
        after = full_of(params, on_rank=0)
        if dist.get_rank() == 0:
            for spec in specs:
                right = expected_weights(specs, step + 1)[spec.name] - expected_weights(specs, step)[spec.name]
                error = relative(after[spec.name].double() - before[spec.name].double(), right)
                assert error <= TOLERANCE[dtype], f"step {step} ({kind}), {spec.name} {spec.shape}: off by {error:.2g}"
        before = after
    assert_factors_are_alike(optimizer)


def assert_factors_are_alike(optimizer: Any) -> None:
    """The same bits on all ranks that hold a part, or a run would drift apart; and means in as many parts as ranks."""
    kept = [s for s in optimizer.state.values() if "gram_factor" in s]
    if dist.get_world_size() == 1 or not kept:
        return
    for state in kept:
        mean, momentum = state["gram_ema"], state["momentum_buffer"]
        axes = [axis for axis, split in enumerate(getattr(momentum, "placements", ())) if not split.is_replicate()]
        assert [a for a, split in enumerate(getattr(mean, "placements", ())) if split == Shard(0)] == axes
        if isinstance(mean, DTensor):
            parts = math.prod(mean.device_mesh.shape[axis] for axis in axes)
            assert mean.to_local().shape[0] <= -(-mean.shape[0] // parts)
    assert_same_bits_on_replicas({str(i): s["gram_ema"] for i, s in enumerate(kept)})
    mine = torch.cat([s["gram_factor"].double().flatten() for s in kept])
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    assert all(torch.equal(mine, other) for other in others)


@pytest.mark.parametrize(("world_size", "layout"), GRID)
def test_equals_the_reference(ranks, world_size, layout):
    ranks(world_size).run(run_grid, layout, torch.float32, {})


@pytest.mark.parametrize(("world_size", "layout"), [(2, "2:S0")])
def test_gather_equals_the_reference(ranks, world_size, layout):
    ranks(world_size).run(run_grid, layout, torch.float32, {"refresh": "gather"})


@pytest.mark.parametrize(
    "settings",
    [{"bucket_bytes": 1, "nesterov": False, "maximize": True}, {"overlap": "backward", "compile": True}],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2])
def test_other_settings_are_the_same(ranks, world_size, settings):
    ranks(world_size).run(check_settings, "2:S0", settings)


def check_settings(layout: str, settings: dict[str, Any], planted: Any = nullcontext) -> None:
    """Sharded is what one process makes of it; ``planted`` is a context of the sharded steps."""
    found, right = build(EVERY_SHAPE, layout), build(EVERY_SHAPE, "1:alone")
    here = optimizer_on(found, EVERY_SHAPE, layout, **GRAM, **settings)
    there = optimizer_on(right, EVERY_SHAPE, **GRAM, **{**settings, "overlap": None, "compile": False})
    for step in range(NUM_STEPS):
        give_gradients(found, EVERY_SHAPE, step)
        give_gradients(right, EVERY_SHAPE, step)
        with planted():
            counted_step(here, watched=False)
        there.step()
    for name, value in full_of(found).items():
        origin = next(start(spec) for spec in EVERY_SHAPE if spec.name == name).double()
        assert relative(value.double() - origin, right[name].detach().double() - origin) < 1e-4, name


@pytest.mark.parametrize("world_size", [2])
def test_bf16_and_a_rank_without_gradients(ranks, world_size):
    ranks(world_size).run(run_grid, "2:S0", torch.bfloat16, {})
    ranks(world_size).run(run_without_gradients, "2:S0")


@contextmanager
def rounding_at_any_width() -> Iterator[None]:
    before, stacks.LEAST_ROUNDED_COLUMNS = stacks.LEAST_ROUNDED_COLUMNS, 1
    try:
        yield
    finally:
        stacks.LEAST_ROUNDED_COLUMNS = before


WIDE = (Spec("wide", (512, 512)), Spec("narrow", (24, 16)), Spec("three", (3 * 8, 520), chunks=3))


@pytest.mark.parametrize("world_size", [2])
def test_gram_matrices_are_sent_in_bf16_where_that_does_no_harm(ranks, world_size):
    ranks(world_size).run(run_rounded, "2:S0")


def run_rounded(layout: str) -> None:
    """Of wide ones. What is sent of narrow ones isn't rounded; where it is, it is sent as planned too."""
    for context, allowed in ((nullcontext(), TOLERANCE[torch.bfloat16]), (rounding_at_any_width(), None)):
        with context:
            found, right = build(WIDE, layout), build(WIDE, "1:alone")
            how = {"ns_dtype": torch.float32, "comm_dtype": torch.bfloat16, "state_dtype": torch.float32, **GRAM}
            here, there = optimizer_on(found, WIDE, layout, **how), optimizer_on(right, WIDE, **how)
            sent = {stack.block: stack.comm_dtype for r in here.plan("refresh").renewals for stack in r.stacks}
            assert sent[512] == torch.bfloat16 and (sent[16] == torch.float32) == (allowed is not None)
            for step in range(2):
                before, right_before = full_of(found), full_of(right)
                give_gradients(found, WIDE, step)
                give_gradients(right, WIDE, step)
                counted_step(here)
                there.step()
            for name, value in full_of(found).items():
                error = relative(value.double() - before[name], right[name].detach().double() - right_before[name])
                assert allowed is None or error < allowed, f"{name}: off by {error:.2g}"


def run_without_gradients(layout: str) -> None:
    """The other rank's factors are renewed by its momentum, and nobody waits for anyone."""
    params = build(EVERY_SHAPE, layout)
    optimizer = optimizer_on(params, EVERY_SHAPE, layout, **GRAM)
    for step in range(NUM_STEPS):
        give_gradients(params, EVERY_SHAPE, step)
        if dist.get_rank() == 1 and step >= 2:
            for parameter in params.values():
                parameter.grad = None
        optimizer.step()
    assert_factors_are_alike(optimizer)
    assert all(bool(value.isfinite().all()) for value in full_of(params).values())


@pytest.mark.parametrize("world_size", [2])
def test_gradients_that_are_not_finite(ranks, world_size):
    ranks(world_size).run(run_nonfinite, "2:S0")


def run_nonfinite(layout: str) -> None:
    """On one rank, at a refresh. With ``skip_nonfinite`` no rank does anything; without, no mean or factor changes."""
    for skip in (True, False):
        params = build(EVERY_SHAPE, layout)
        optimizer = optimizer_on(params, EVERY_SHAPE, layout, skip_nonfinite=skip, **GRAM)
        for step in range(3):
            give_gradients(params, EVERY_SHAPE, step)
            optimizer.step()
        before, weights = kept_of(optimizer, params), full_of(params)
        give_gradients(params, EVERY_SHAPE, 3)
        if dist.get_rank() == 1:
            for parameter in params.values():
                local_part(parameter.grad).fill_(torch.nan)
        optimizer.step()
        for name, value in kept_of(optimizer, params).items():
            # with "three_rows" and the like the other rank may have none: then what is finite there is taken
            whole = name.partition(".")[0] in ("even", "uneven_tall", "chunked", "like_a_chunk")
            assert torch.equal(value, before[name]) or not (skip or whole), name
            assert bool(value.isfinite().all()), name
        assert (optimizer.num_skipped_steps, optimizer.next_step_kind) == ((1, "refresh") if skip else (0, "row"))
        if skip:
            for name, value in full_of(params).items():
                assert torch.equal(value, weights[name]), name


def kept_of(optimizer: Any, params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Whole means and factors by names."""
    states = {name: optimizer.state[parameter] for name, parameter in params.items()}
    keys = ("gram_ema", "gram_factor")
    return full_of({f"{name}.{key}": s[key] for name, s in states.items() for key in keys if key in s})


def add_nothing(*_: Any, **__: Any) -> None:
    """In the place of `rowmuon.gram.add_gram_`."""


def move_rows(means: Tensor, out: Tensor, at_once: int) -> None:
    """In the place of `rowmuon.packing.unpack_`: a row of the packed matrix is another's."""
    unpack_(means.roll(1, dims=1), out, at_once)


@pytest.mark.parametrize(
    "fault", [(gram, "add_gram_", add_nothing), (renewal, "unpack_", move_rows)], ids=["sum", "row"]
)
@pytest.mark.parametrize("world_size", [2])
def test_a_planted_fault_is_seen(ranks, world_size, fault):
    module, name, wrong = fault
    ranks(world_size).run(run_with_fault, module.__name__, name, wrong.__name__)


def run_with_fault(module: str, name: str, wrong: str) -> None:
    """A rank that leaves its rows out of the sums, or owners that mix up rows, make another update."""
    owner = {gram.__name__: gram, renewal.__name__: renewal}[module]
    fault = {"add_nothing": add_nothing, "move_rows": move_rows}[wrong]

    @contextmanager
    def planted() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(owner, name, fault)
            yield

    with pytest.raises(AssertionError):
        check_settings("2:S0", {}, planted)


# ------------------------------------------------------------------------------------------------------- checkpoints
SAVED_AT, END = 4, 9


def model_of(layout: str) -> nn.Module:
    model = nn.Module()
    for name, parameter in build(EVERY_SHAPE, layout).items():
        model.register_parameter(name, parameter)
    return model


def run_steps(model: nn.Module, optimizer: Any, first: int, last: int) -> dict[str, Tensor]:
    params = dict(model.named_parameters())
    for step in range(first, last):
        give_gradients(params, EVERY_SHAPE, step)
        assert optimizer.next_step_kind == ("row" if step % 3 else "refresh")
        optimizer.step()
    return full_of(params)


def whole_state(model: nn.Module, optimizer: Any, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def save(layout: str, folder: str, flat: bool) -> None:
    """In the middle of a period."""
    model = model_of(layout)
    optimizer = optimizer_on(dict(model.named_parameters()), EVERY_SHAPE, layout, **GRAM)
    run_steps(model, optimizer, 0, SAVED_AT)
    dcp.save(whole_state(model, optimizer, flat), checkpoint_id=f"{folder}/dcp")
    kept = kept_of(optimizer, dict(model.named_parameters()))
    end = run_steps(model, optimizer, SAVED_AT, END)
    if dist.get_rank() == 0:
        torch.save(end, f"{folder}/end.pt")
        torch.save(kept, f"{folder}/kept.pt")


def load_and_finish(layout: str, folder: str, flat: bool, exactly: bool) -> None:
    model = model_of(layout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = optimizer_on(dict(model.named_parameters()), EVERY_SHAPE, layout, **GRAM)
    state = whole_state(model, optimizer, flat)
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    set_model_state_dict(model, state["model"])
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    kept = torch.load(f"{folder}/kept.pt")
    for name, value in kept_of(optimizer, dict(model.named_parameters())).items():
        assert torch.equal(value, kept[name]), f"{name}: not as it was saved"
    found, right = run_steps(model, optimizer, SAVED_AT, END), torch.load(f"{folder}/end.pt")
    for spec in EVERY_SHAPE:
        if exactly:
            assert torch.equal(found[spec.name], right[spec.name]), f"{spec.name}: other bits"
        origin = start(spec).double()
        error = relative(found[spec.name].double() - origin, right[spec.name].double() - origin)
        assert error <= 1e-4, f"{spec.name}: off by {error:.2g}"


@pytest.mark.parametrize("flat", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["nested", "flat"])
@pytest.mark.parametrize("world_size", [2])
def test_a_checkpoint_resumes_bit_by_bit_and_at_another_number_of_ranks(ranks, world_size, flat, tmp_path):
    ranks(2).run(save, "2:S0", str(tmp_path), flat)
    ranks(2).run(load_and_finish, "2:S0", str(tmp_path), flat, True)
    ranks(1).run(load_and_finish, "1:S0", str(tmp_path), flat, False)
    if flat:
        ranks(3).run(load_and_finish, "3:S0", str(tmp_path), flat, False)
    else:
        ranks(4).run(load_and_finish, "2x2:X0,S0", str(tmp_path), flat, False)
