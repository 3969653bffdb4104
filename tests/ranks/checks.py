"""What must hold after every step on every layout."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import rowmuon
from ranks.models import Spec, build, give_gradients, optimizer_on
from ranks.placing import full, full_of
from ranks.pool import device_type
from rowmuon.buckets import needs_exchange
from rowmuon.plan import StepPlan

__all__ = ["Messages", "assert_same_bits_on_replicas", "check_unsharded", "counted_step", "local_part", "relative"]


def local_part(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def relative(found: Tensor, expected: Tensor) -> float:
    """|| found - expected || / || expected ||."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-300))


def counted_step(optimizer: rowmuon.PeriodicRowMuon, num_left_out: int = 0, *, watched: bool = True) -> tuple[str, int]:
    """One step; what it has counted must be what its plan says and what torch has seen of it.

    Args:
        num_left_out: matrices that are whole on this rank but have no gradient: nobody waits for them in a refresh.
        watched: whether torch counts too, which takes as long as the step itself.

    Returns:
        The kind of step, and the number of its collectives.
    """
    kind = optimizer.next_step_kind
    rank = dist.get_rank()
    plan = optimizer._plan(optimizer._muon_params())
    before = {name: astuple(counts) for name, counts in optimizer.traffic.items()}
    # Comparing the plans is counted by torch, and no part of a step's traffic.
    watching = watched and optimizer._compared
    with CommDebugMode() if watching else nullcontext() as seen, Messages() if watching else nullcontext() as messages:
        optimizer.step()
    found = {
        name: tuple(a - b for a, b in zip(astuple(counts), before[name], strict=True))
        for name, counts in optimizer.traffic.items()
    }
    num_orthogonalizations = plan.num_orthogonalizations(rank) - (num_left_out if kind == "refresh" else 0)
    planned = (1, plan.num_collectives(rank), plan.bytes_sent(rank), num_orthogonalizations)
    assert found[kind] == planned, f"{kind} step: counted {found[kind]}, planned {planned}"
    for name, counts in found.items():
        assert name == kind or counts == (0, 0, 0, 0), f"{kind} step counted as {name}: {counts}"
    if seen is not None and messages is not None:
        exchanges = messages_of_exchanges(plan, rank) if device_type() == "cpu" else []
        wanted = planned[1] - len(exchanges)
        assert seen.get_total_counts() == wanted, f"torch saw {dict(seen.get_comm_counts())}, planned {wanted}"
        assert sorted(messages.sent) == sorted(itertools.chain.from_iterable(exchanges))
    return kind, planned[1]


def messages_of_exchanges(plan: StepPlan, rank: int) -> list[list[int]]:
    """Bytes of each message that this rank sends in each exchange, where they go one by one (gloo)."""
    ways = []
    for bucket in filter(needs_exchange, plan.buckets):
        route = bucket.route(rank)
        ways += [(route, counts, bucket.comm_dtype) for counts in (route.send_counts, route.recv_counts)]
    for renewal in plan.renewals:
        if renewal.is_local:
            continue
        ways += [(stack.route(rank), stack.route(rank).send_counts, stack.comm_dtype) for stack in renewal.stacks]
        for part in renewal.rounds:
            route = part.there.route(rank)
            ways.append((route, route.send_counts, part.there.comm_dtype))
            ways.append((route, route.recv_counts, part.back.comm_dtype))
    found = []
    for route, counts, dtype in ways:
        others = (count for peer, count in zip(route.group, counts, strict=True) if peer != rank and count)
        found.append([count * dtype.itemsize for count in others])
    return found


class Messages(TorchDispatchMode):
    """Collects the bytes of each message from one rank to another that torch sees."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket == torch.ops.c10d.send:
            self.sent += [tensor.nbytes for tensor in args[0]]
        return func(*args, **(kwargs or {}))


def check_unsharded(specs: Sequence[Spec], layout: str, tolerance: float, num_steps: int = 5, **settings: Any) -> None:
    """The update of every step is what one process alone makes of it.

    In five steps of period 3 there are a refresh, two row steps, a refresh and a row step. Tolerance 0 asks for the
    same bits: with whole rows everything is elementwise but for Newton-Schulz, which gives a matrix of 64 columns the
    same bits in any stack. On a CPU, that is; elsewhere float32's 1e-5.
    """
    if device_type() != "cpu":
        tolerance = max(tolerance, 1e-5 if specs[0].dtype == torch.float32 else 0.05)
    sharded, alone = build(specs, layout), build(specs, "1:alone")
    here, there = optimizer_on(sharded, specs, layout, **settings), optimizer_on(alone, specs, **settings)
    for step in range(num_steps):
        before = full_of(sharded)
        right_before = full_of(alone)
        give_gradients(sharded, specs, step)
        give_gradients(alone, specs, step)
        counted_step(here)
        there.step()
        assert_same_bits_on_replicas(sharded)
        for spec in specs:
            found, right = full(sharded[spec.name]), full(alone[spec.name])
            if tolerance == 0:
                assert torch.equal(found, right), (
                    f"step {step}, {spec.name}: other bits, by {(found - right).abs().max()}"
                )
            else:
                update = right.double() - right_before[spec.name].double()
                error = relative(found.double() - before[spec.name].double(), update)
                assert error <= tolerance, f"step {step}, {spec.name}: off by {error:.2g}"


def assert_same_bits_on_replicas(tensors: Mapping[str, Tensor], group: Any = None) -> None:
    """Ranks that hold the same part of a tensor hold the same bits."""
    mine = {name: (_place(tensor), _digest(local_part(tensor))) for name, tensor in tensors.items()}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for name in tensors:
        bits: dict[Any, tuple[int, str]] = {}
        for rank, theirs in enumerate(everyone):
            place, digest = theirs[name]
            first = bits.setdefault(place, (rank, digest))
            assert digest == first[1], f"{name!r} differs between ranks {first[0]} and {rank}, which both hold {place}"


def _place(tensor: Tensor) -> Any:
    """What tells a part from others: its coordinate on the axes that split the tensor."""
    if not isinstance(tensor, DTensor):
        return "all"
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    pairs = zip(coordinate, tensor.placements, strict=True)
    return tuple(0 if placement.is_replicate() else here for here, placement in pairs)


def _digest(tensor: Tensor) -> str:
    data = tensor.cpu().contiguous().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
