"""P3: saved at step 7 with K = 4, loaded, run to 12, at the same and at other numbers of ranks and mesh shapes.

Through torch.distributed.checkpoint and through a plain state dict. The phase of the period is kept. At the same
layout the run continues bit by bit; at another the momentum is the same, but sums over split rows round otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
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

import rowmuon
from ranks.checks import assert_same_bits_on_replicas, relative
from ranks.models import EVERY_SHAPE, Spec, build, give_gradients, optimizer_on, start
from ranks.placing import full_of, place
from ranks.pool import RankPool, available

SAVED_AT, END, PERIOD = 7, 12, 4
KINDS = ["refresh" if step % PERIOD == 0 else "row" for step in range(END)]
SOURCES = {1: "1:S0", 2: "2:S0", 3: "3:S0", 4: "2x2:X0,S0", 8: "2x4:R,S0"}
TARGETS = {
    1: ("1:S0", "1:alone"),
    2: ("2:S0", "2:S1", "2:plain"),
    3: ("3:S1",),
    4: ("4:S0", "2x2:R,S0", "2x2:S0,S1", "2x2:X0,S0"),
    8: ("8:S0", "2x2x2:R,X0,S0"),
}
PAIRS = [
    (b, a, layout, "nested")
    for a, b in itertools.product(SOURCES, TARGETS)
    for layout in TARGETS[b]
    if SOURCES[a] != layout
]
PAIRS += [
    (b, a, layout, way)
    for b, a, layout in ((2, 4, "2:S1"), (4, 2, "2x2:X0,S0"), (1, 4, "1:alone"), (3, 8, "3:S1"), (8, 1, "8:S0"))
    for way in ("flat", "plain")
]
TOLERANCE = 1e-5  # of the whole way since the start, in float32; see test_grid.py


def model_of(layout: str) -> nn.Module:
    model = nn.Module()
    for name, parameter in build(EVERY_SHAPE, layout).items():
        model.register_parameter(name, parameter)
    return model


def run_steps(model: nn.Module, optimizer: rowmuon.PeriodicRowMuon, first: int, last: int) -> None:
    params = dict(model.named_parameters())
    for step in range(first, last):
        give_gradients(params, EVERY_SHAPE, step)
        assert optimizer.next_step_kind == KINDS[step], f"step {step}"
        optimizer.step()
    assert_same_bits_on_replicas(params)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return full_of(dict(model.named_parameters()))


def assert_went_on(found: dict[str, Tensor], right: dict[str, Tensor], exactly: bool) -> None:
    for spec in EVERY_SHAPE:
        if exactly:
            assert torch.equal(found[spec.name], right[spec.name]), f"{spec.name}: other bits"
        origin = start(spec).double()
        error = relative(found[spec.name].double() - origin, right[spec.name].double() - origin)
        assert error <= TOLERANCE, f"{spec.name}: off by {error:.2g}"


# -------------------------------------------------------------------------------------------------------------- DCP


def save(layout: str, folder: str, flat: bool, asynchronous: bool) -> None:
    """Seven steps, saved; then the rest, whose result is kept beside it."""
    model = model_of(layout)
    optimizer = optimizer_on(dict(model.named_parameters()), EVERY_SHAPE, layout, period=PERIOD)
    run_steps(model, optimizer, 0, SAVED_AT)
    state = whole_state(model, optimizer, flat)
    if asynchronous:
        future = dcp.async_save(state, checkpoint_id=f"{folder}/dcp", process_group=group_of_savers())
        run_steps(model, optimizer, SAVED_AT, END)  # what is saved must not change under it
        future.result()
    else:
        dcp.save(state, checkpoint_id=f"{folder}/dcp")
        run_steps(model, optimizer, SAVED_AT, END)
    result = weights(model)
    if dist.get_rank() == 0:
        torch.save(result, f"{folder}/end.pt")


@lru_cache(maxsize=1)
def group_of_savers() -> Any:
    """Saving in a thread has collectives of its own, which must not come between those of the training."""
    return dist.new_group(backend="gloo")


def whole_state(model: nn.Module, optimizer: rowmuon.PeriodicRowMuon, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def load_and_finish(layout: str, folder: str, flat: bool, exactly: bool, settings: dict[str, Any]) -> None:
    model = model_of(layout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    params = dict(model.named_parameters())
    optimizer = optimizer_on(params, EVERY_SHAPE, layout, **{"period": PERIOD, **settings})
    state = whole_state(model, optimizer, flat)
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    set_model_state_dict(model, state["model"])
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    assert {optimizer.state[p]["step"] for p in params.values() if "phase" in optimizer.state[p]} == {SAVED_AT}
    run_steps(model, optimizer, SAVED_AT, END)
    assert_went_on(weights(model), torch.load(f"{folder}/end.pt"), exactly)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("world_size", [1, 4])
def test_P3_resumes_bit_by_bit(ranks, world_size, flat, asynchronous, tmp_path):
    pool, layout = ranks(world_size), SOURCES[world_size]
    pool.run(save, layout, str(tmp_path), flat, asynchronous)
    pool.run(load_and_finish, layout, str(tmp_path), flat, True, {})


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[int, str], Path]:
    """``saved(W, way)`` is a folder that W ranks have written, each once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(world_size: int, way: str) -> Path:
        if not (root / f"{way}-{world_size}").exists():
            pool = RankPool(world_size)
            try:
                for name, function, arguments in SAVERS:
                    path = root / f"{name}-{world_size}"
                    path.mkdir()
                    pool.run(function, SOURCES[world_size], str(path), *arguments)
            finally:
                pool.close()
        return root / f"{way}-{world_size}"

    return get


@pytest.mark.parametrize(("world_size", "saved_by", "layout", "way"), PAIRS)
def test_P3_resumes_on_other_ranks(ranks, saved, world_size, saved_by, layout, way):
    if not available(saved_by):
        pytest.skip(f"needs {saved_by} CUDA devices")
    folder = str(saved(saved_by, way))
    if way == "plain":
        ranks(world_size).run(load_plain_and_finish, layout, folder)
    else:
        ranks(world_size).run(load_and_finish, layout, folder, way == "flat", False, {})


# ------------------------------------------------------------------------------------------------- plain state dicts


def save_plain(layout: str, folder: str) -> None:
    """Whole tensors in one file, as `full_tensor()` gives them."""
    model = model_of(layout)
    optimizer = optimizer_on(dict(model.named_parameters()), EVERY_SHAPE, layout, period=PERIOD)
    run_steps(model, optimizer, 0, SAVED_AT)
    state = optimizer.state_dict()
    for index, entry in state["state"].items():  # its dicts are the optimizer's own
        whole = full_of({key: value for key, value in entry.items() if isinstance(value, Tensor)})
        state["state"][index] = {**entry, **whole}
    saved = {"model": weights(model), "optimizer": state}
    run_steps(model, optimizer, SAVED_AT, END)
    end = weights(model)
    if dist.get_rank() == 0:
        torch.save(saved, f"{folder}/plain.pt")
        torch.save(end, f"{folder}/end.pt")


def load_plain_and_finish(layout: str, folder: str) -> None:
    model = model_of(layout)
    saved = torch.load(f"{folder}/plain.pt", weights_only=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(place(saved["model"][name], layout))
    optimizer = optimizer_on(dict(model.named_parameters()), EVERY_SHAPE, layout, period=PERIOD)
    optimizer.load_state_dict(saved["optimizer"])
    run_steps(model, optimizer, SAVED_AT, END)
    assert_went_on(weights(model), torch.load(f"{folder}/end.pt"), exactly=False)


SAVERS = [("nested", save, (False, False)), ("flat", save, (True, False)), ("plain", save_plain, ())]


# ---------------------------------------------------------------------------------------- what may differ on loading


@pytest.mark.parametrize(
    "settings",
    [
        {"refresh": "gather"},
        {"bucket_bytes": 1},
        {"comm_dtype": torch.float64},
        {"period": 5, "momentum": 0.5, "lr": 1.0},
    ],
    ids=lambda settings: "+".join(settings),
)
@pytest.mark.parametrize("world_size", [4])
def test_P3_loads_into_other_settings(ranks, world_size, settings, tmp_path):
    """How it is computed is the constructor's choice, what is computed the checkpoint's."""
    pool = ranks(world_size)
    pool.run(save, SOURCES[4], str(tmp_path), False, False)
    pool.run(load_and_finish, SOURCES[4], str(tmp_path), False, False, settings)


@pytest.mark.parametrize("world_size", [2])
def test_P3_another_routing_is_refused_by_name(ranks, world_size, tmp_path):
    ranks(world_size).run(run_other_routing, str(tmp_path))


def run_other_routing(folder: str) -> None:
    specs = (Spec("a", (6, 8)), Spec("b", (6, 8), chunks=2), Spec("c", (6, 8), algorithm="adamw"))
    moved = (Spec("a", (6, 8)), Spec("b", (6, 8), chunks=3), Spec("c", (6, 8)))
    params = build(specs, "2:S0")
    optimizer = optimizer_on(params, specs)
    give_gradients(params, specs, 0)
    optimizer.step()
    other = optimizer_on(build(specs, "2:S0"), (specs[0], moved[1], specs[2]))
    before = [dict(state) for state in other.state.values()]
    with pytest.raises(ValueError, match=r"chunks=2 in the state dict, 3 here, for \['b'\]"):
        other.load_state_dict(optimizer.state_dict())
    assert [dict(state) for state in other.state.values()] == before
    groups = [
        {"params": [("a", params["a"])], "algorithm": "muon"},
        {"params": [("b", params["b"])], "algorithm": "muon", "chunks": 2},
        {"params": [("c", params["c"])], "algorithm": "muon"},
    ]
    with pytest.raises(ValueError, match=r"algorithm='adamw' in the state dict, 'muon' here, for \['c'\]"):
        rowmuon.PeriodicRowMuon(groups).load_state_dict(optimizer.state_dict())
