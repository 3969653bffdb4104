"""Faults that users of other sharded optimizers hit: rows P1, P2 and P5 to P7 of the project's list (P3 is in
test_checkpoints.py, P4, recompilation, in test_compiled.py)."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._python_dispatch import TorchDispatchMode

import rowmuon
from ranks.checks import assert_same_bits_on_replicas, counted_step, local_part, relative
from ranks.models import EVERY_SHAPE, Spec, build, give_gradients, optimizer_on
from ranks.placing import full
from ranks.pool import device_type
from rowmuon.exchange import Exchange
from rowmuon.runtime import Runtime


def bits(params: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: local_part(p).clone() for name, p in params.items()}


def assert_equal_bits(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for name in right:
        assert torch.equal(found[name], right[name]), f"{name!r} has other bits"


# --------------------------------------------------------------------------------------------------------------- P1


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize(("world_size", "layout"), [(2, "2:S0"), (2, "2:S1"), (4, "2x2:S0,S1")])
def test_P1_a_gradient_missing_on_one_rank(ranks, world_size, layout, refresh):
    """No deadlock, the same keys of the state everywhere: that rank leaves its shard, and enters all collectives."""
    keys = ranks(world_size).run(run_p1, layout, refresh)
    assert len(set(map(tuple, keys))) == 1


def run_p1(layout: str, refresh: str) -> list[str]:
    specs = (Spec("w", (6, 8)), Spec("v", (5, 8)), Spec("q", (6, 8), chunks=2), Spec("b", (4,), algorithm="adamw"))
    params = build(specs, layout)
    optimizer = optimizer_on(params, specs, layout, refresh=refresh)
    start = bits(params)
    for step in range(4):
        give_gradients(params, specs, step)
        if dist.get_rank() == 1:
            params["w"].grad = params["q"].grad = None
        # "2:S0" leaves each rank one whole chunk of q
        counted_step(optimizer, num_left_out=1 if layout == "2:S0" and dist.get_rank() == 1 else 0)
    for name in ("w", "q"):
        moved = not torch.equal(local_part(params[name]), start[name])
        assert moved == (dist.get_rank() != 1), f"{name!r} on rank {dist.get_rank()}"
        momentum = local_part(optimizer.state[params[name]]["momentum_buffer"])
        assert bool(momentum.any()) == (dist.get_rank() != 1)
    assert not torch.equal(local_part(params["v"]), start["v"])
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    return [f"{index}.{key}" for index, state in optimizer.state_dict()["state"].items() for key in state]


@pytest.mark.parametrize("world_size", [2])
def test_P1_whoever_has_a_gradient_steps_as_the_whole_momentum_says(ranks, world_size):
    ranks(world_size).run(run_p1_value)


def run_p1_value() -> None:
    """With rank 1's gradient missing, rank 0 moves its rows as the unsharded optimizer does where those rows' gradient
    is zero: rank 1's momentum, which stands for its rows, is zero too."""
    spec = Spec("w", (6, 8))
    params, alone = build((spec,), "2:S0"), build((spec,), "1:alone")
    here, there = optimizer_on(params, (spec,)), optimizer_on(alone, (spec,))
    give_gradients(params, (spec,), 0)
    give_gradients(alone, (spec,), 0)
    alone["w"].grad[3:] = 0
    if dist.get_rank() == 1:
        params["w"].grad = None
    here.step()
    there.step()
    assert torch.equal(full(params["w"])[:3], alone["w"].detach()[:3])


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize("world_size", [2])
def test_P1_where_a_gradient_is_missing_the_momentum_stands_for_it(ranks, world_size, refresh):
    ranks(world_size).run(run_p1_momentum, refresh)


def run_p1_momentum(refresh: str) -> None:
    """Once there is one: the other rank moves its rows by the matrix of its direction and this rank's momentum."""
    spec = Spec("w", (6, 8))
    params = build((spec,), "2:S0")
    optimizer = optimizer_on(params, (spec,), refresh=refresh, period=1, weight_decay=0.0)
    give_gradients(params, (spec,), 0)
    optimizer.step()
    before, direction = full(params["w"]), full(optimizer.state[params["w"]]["momentum_buffer"])
    give_gradients(params, (spec,), 1)
    grad = full(params["w"].grad)[:3]
    if dist.get_rank() == 1:
        params["w"].grad = None
    optimizer.step()
    direction[:3] = direction[:3].lerp(grad, 0.05)
    direction[:3] = grad.lerp(direction[:3], 0.95)
    moved = rowmuon.newton_schulz(direction, "keller_jordan", dtype=torch.float32)
    assert relative(before[:3] - full(params["w"])[:3], 0.02 * moved[:3]) < 1e-5
    assert torch.equal(full(params["w"])[3:], before[3:])


# --------------------------------------------------------------------------------------------------------------- P2


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize(("world_size", "layout"), [(4, "4:plain"), (4, "2x2:R,S0"), (3, "3:R")])
def test_P2_many_small_buckets_under_allocation_churn(ranks, world_size, layout, refresh):
    ranks(world_size).run(run_p2, layout, refresh)


def run_p2(layout: str, refresh: str) -> None:
    """Every matrix is a bucket of its own, and freed memory is taken and overwritten at once."""
    specs = tuple(Spec(f"w{i}", (4 + i % 3, 6)) for i in range(24))
    params = build(specs, layout)
    optimizer = optimizer_on(params, specs, layout, refresh=refresh, bucket_bytes=1, period=2)
    with Churn():
        for step in range(6):
            give_gradients(params, specs, step)
            counted_step(optimizer)
            assert_same_bits_on_replicas(params)
    quiet = build(specs, layout)
    optimizer = optimizer_on(quiet, specs, layout, refresh=refresh, bucket_bytes=1, period=2)
    for step in range(6):
        give_gradients(quiet, specs, step)
        optimizer.step()
    assert_equal_bits(bits(params), bits(quiet))


class Churn(torch.utils._python_dispatch.TorchDispatchMode):
    """After every operation a few tensors of small sizes are made, filled with NaN and dropped."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for numel in (6, 24, 36, 96):
            torch.full((numel,), float("nan"))
        return result


# ---------------------------------------------------------------------------------------------------------- P5 and P6


@pytest.mark.parametrize("world_size", [2])
def test_P5_dcp_loads_muon_and_adamw_groups_in_one(ranks, world_size):
    ranks(world_size).run(run_p5)


def run_p5() -> None:
    specs = EVERY_SHAPE
    model, other = module_of("2:S0"), module_of("2:S0")
    optimizer = optimizer_on(dict(model.named_parameters()), specs)
    for step in range(2):
        give_gradients(dict(model.named_parameters()), specs, step)
        optimizer.step()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    optimizer.load_state_dict(state_dict=optimizer.state_dict())  # torch passes it by this name
    with torch.no_grad():
        for parameter, source in zip(other.parameters(), model.parameters(), strict=True):
            parameter.copy_(source)
    loaded = optimizer_on(dict(other.named_parameters()), specs)
    set_optimizer_state_dict(other, loaded, saved)
    for step in range(2, 5):
        give_gradients(dict(model.named_parameters()), specs, step)
        give_gradients(dict(other.named_parameters()), specs, step)
        assert optimizer.next_step_kind == loaded.next_step_kind
        optimizer.step()
        loaded.step()
    assert_equal_bits(bits(dict(other.named_parameters())), bits(dict(model.named_parameters())))


@pytest.mark.parametrize("world_size", [2])
def test_P5_whole_state_dicts_that_rank_0_broadcasts(ranks, world_size):
    ranks(world_size).run(run_p5_whole)


def run_p5_whole() -> None:
    """As many trainers save: gathered on the CPU of rank 0 alone, and sent out from there when it is loaded."""
    model, other = module_of("2:S0"), module_of("2:S0")
    held, others = dict(model.named_parameters()), dict(other.named_parameters())
    optimizer, loaded = (optimizer_on(params, EVERY_SHAPE) for params in (held, others))
    for step in range(2):
        give_gradients(held, EVERY_SHAPE, step)
        optimizer.step()
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(whole) == (dist.get_rank() == 0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, loaded, whole, options=options)
    with torch.no_grad():
        for name, parameter in others.items():
            parameter.copy_(held[name])
    for step in range(2, 5):
        give_gradients(held, EVERY_SHAPE, step)
        give_gradients(others, EVERY_SHAPE, step)
        assert optimizer.next_step_kind == loaded.next_step_kind
        optimizer.step()
        loaded.step()
    assert_equal_bits(bits(others), bits(held))


@pytest.mark.parametrize("world_size", [2])
def test_P6_plain_saving_copies_and_pickles(ranks, world_size):
    ranks(world_size).run(run_p6)


def run_p6() -> None:
    specs = EVERY_SHAPE
    params = build(specs, "2:S0")
    optimizer = optimizer_on(params, specs)
    for step in range(2):
        give_gradients(params, specs, step)
        optimizer.step()
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    twin = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
    loaded = optimizer_on(twin, specs)
    loaded.load_state_dict(saved)
    copied = copy.deepcopy(optimizer)
    mirror = dict(zip(params, copied_params(optimizer, copied, params), strict=True))
    pickle.dumps(optimizer.state_dict())
    for step in range(2, 5):
        for held, one in ((params, optimizer), (twin, loaded), (mirror, copied)):
            give_gradients(held, specs, step)
            one.step()
    assert_equal_bits(bits(twin), bits(params))
    assert_equal_bits(bits(mirror), bits(params))


def copied_params(optimizer, copied, params) -> list[nn.Parameter]:
    """The copy's parameters, in the order of ``params``."""
    pairs = zip(optimizer.param_groups, copied.param_groups, strict=True)
    of = {id(a): b for old, new in pairs for a, b in zip(old["params"], new["params"], strict=True)}
    return [of[id(p)] for p in params.values()]


def module_of(layout: str) -> nn.Module:
    """A module whose parameters have the specs' names."""
    module = nn.Module()
    for name, parameter in build(EVERY_SHAPE, layout).items():
        module.register_parameter(name, parameter)
    return module


# --------------------------------------------------------------------------------------------------------------- P7


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, "2:S0"), (2, "2:plain"), (4, "2x2:R,S0"), (4, "2x2:S0,S1"), (4, "2x2:X0,S0")]
)
def test_P7_overlap_and_bucket_size_change_nothing(ranks, world_size, layout, refresh):
    ranks(world_size).run(run_p7, layout, refresh)


def run_p7(layout: str, refresh: str) -> None:
    """Overlap changes no bit. Buckets do: a product of stacks may round otherwise than one of matrices; a race would
    show as garbage."""
    for bucket_bytes in (64 << 20, 1, 600):
        overlapping, waiting = (steps_of_p7(layout, refresh, bucket_bytes, blocking) for blocking in (False, True))
        assert_equal_bits(overlapping, waiting)
        if bucket_bytes == 64 << 20:
            one_bucket = overlapping
        for name, found in overlapping.items():
            if found.numel():
                assert relative(found, one_bucket[name]) < 1e-6, f"{name!r} with buckets of {bucket_bytes}"


def steps_of_p7(layout: str, refresh: str, bucket_bytes: int, blocking: bool) -> dict[str, torch.Tensor]:
    params = build(EVERY_SHAPE, layout)
    optimizer = optimizer_on(params, EVERY_SHAPE, layout, refresh=refresh, bucket_bytes=bucket_bytes)
    with waiting_at_once() if blocking else nullcontext():
        for step in range(4):
            give_gradients(params, EVERY_SHAPE, step)
            counted_step(optimizer)
    return bits(params)


@contextmanager
def waiting_at_once() -> Iterator[None]:
    """Takes all overlap away: whatever is sent has arrived before the next line runs."""

    def blocking(issue: Callable[..., Any]) -> Callable[..., Any]:
        def waited(*args: Any, **kwargs: Any) -> Any:
            work = issue(*args, **kwargs)
            work.wait()
            return work

        return waited

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Runtime, "_all_gather"), (Exchange, "send_out"), (Exchange, "send_back")):
            patch.setattr(owner, name, blocking(getattr(owner, name)))
        yield


@pytest.mark.parametrize(("bucket_bytes", "num_together"), [(1, 1), (64 << 20, 3)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_comes_is_asked_for_before_anything_is_sent(ranks, world_size, bucket_bytes, num_together):
    """On gloo a request that comes after a message waits for it, and the two directions of a link take turns."""
    if device_type() != "cpu":
        pytest.skip("messages go one by one on gloo alone")
    ranks(world_size).run(run_requests_first, bucket_bytes, num_together)


def run_requests_first(bucket_bytes: int, num_together: int) -> None:
    """Of the buckets that set out together: what arrives, what comes back, and only then what is sent."""
    layout = f"{dist.get_world_size()}:S0"
    specs = (Spec("a", (8, 16)), Spec("b", (16, 8)), Spec("c", (8, 8)))
    params = build(specs, layout)
    optimizer = optimizer_on(params, specs, layout, period=1, bucket_bytes=bucket_bytes)
    give_gradients(params, specs, 0)
    optimizer.step()  # in which the ranks compare their plans
    with OrderOfMessages() as messages:
        optimizer.step()
    plan = optimizer.plan("refresh")
    assert len(plan.buckets) == 3 and plan.schedule.sent[0] == num_together
    incoming = outgoing = 0
    for bucket in plan.buckets[:num_together]:
        route = bucket.route(dist.get_rank())
        here = route.group.index(dist.get_rank())
        incoming += sum(count > 0 for i, count in enumerate(route.recv_counts) if i != here)
        outgoing += sum(count > 0 for i, count in enumerate(route.send_counts) if i != here)
    begun = messages.sends[: incoming + 2 * outgoing]
    assert begun == [False] * (incoming + outgoing) + [True] * outgoing


class OrderOfMessages(TorchDispatchMode):
    """Of each message, in the order in which they are begun, whether this rank sends it."""

    def __init__(self) -> None:
        super().__init__()
        self.sends: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.c10d.send, torch.ops.c10d.recv_):
            self.sends.append(func.overloadpacket == torch.ops.c10d.send)
        return func(*args, **(kwargs or {}))
