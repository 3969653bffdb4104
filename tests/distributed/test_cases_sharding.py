"""Faults that users of other sharded optimizers hit: rows S1 to S16 of the project's list, one test each.

D = 64 as in the list. Unless said otherwise "right" is what the unsharded optimizer gives on the same numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import rowmuon
from ranks.checks import Messages, assert_same_bits_on_replicas, check_unsharded, counted_step, local_part, relative
from ranks.models import Spec, build, give_gradients, optimizer_on, start
from ranks.placing import full, mesh_of
from ranks.pool import device_type

D = 64


def assert_same(found: torch.Tensor, right: torch.Tensor) -> None:
    """The same bits, or what another device makes of them."""
    tolerance = {"rtol": 0.0, "atol": 0.0} if device_type() == "cpu" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, right, **tolerance)


# --------------------------------------------------------------------------------------------------------------- S1


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize(("world_size", "rows"), [(2, 1), (2, 3), (4, 5), (4, 2), (4, 15), (8, 18)])
def test_S1_uneven_and_empty_shards_do_not_hang(ranks, world_size, rows, refresh):
    """Eight equal bf16 matrices each. Weights of zero, so that their rounding is no larger than the updates' own."""
    ranks(world_size).run(run_s1, rows, refresh, timeout_s=60.0)


def run_s1(rows: int, refresh: str) -> None:
    specs = tuple(Spec(f"w{i}", (rows, D), dtype=torch.bfloat16) for i in range(8))
    layout = f"{dist.get_world_size()}:S0"
    # Momentum and direction are bf16 in both, and so is what is sent: the same numbers reach the same kernel.
    check_unsharded(specs, layout, 0, refresh=refresh, ns_dtype=torch.bfloat16, comm_dtype=torch.bfloat16)


# ---------------------------------------------------------------------------------------------------------- S2 to S4


@pytest.mark.parametrize("world_size", [4])
def test_S2_a_row_step_sends_nothing_and_reads_nothing_back(ranks, world_size):
    ranks(world_size).run(run_s2)


def run_s2() -> None:
    specs = (Spec("a", (5, D)), Spec("b", (2, D)), Spec("c", (3, 4, D)), Spec("bias", (7,), algorithm="adamw"))
    params = build(specs, "4:S0")
    optimizer = optimizer_on(params, specs, "4:S0")
    for step in range(6):
        give_gradients(params, specs, step)
        kind = optimizer.next_step_kind
        with CommDebugMode() as seen, Messages() as messages, NoHostRead() as reads:
            optimizer.step()
        if step:  # the first compares the ranks' plans, once
            assert reads.names == []
        if kind == "row":
            assert seen.get_total_counts() == 0 and messages.sent == []
    counts = optimizer.traffic["row"]
    assert (counts.num_steps, counts.num_collectives, counts.bytes_sent) == (4, 0, 0)


class NoHostRead(torch.utils._python_dispatch.TorchDispatchMode):
    """Collects the operations that read a tensor's value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("world_size", [2])
def test_S2_the_host_read_detector_detects(ranks, world_size):
    ranks(world_size).run(run_host_read)


def run_host_read() -> None:
    with NoHostRead() as reads:
        torch.ones(()).item()
    assert reads.names == ["_local_scalar_dense"]


@pytest.mark.parametrize("world_size", [4])
def test_S3_a_rank_without_rows_does_nothing(ranks, world_size):
    ranks(world_size).run(run_s3)


def run_s3() -> None:
    spec = Spec("w", (1, D))
    params = build((spec,), "4:S0")
    optimizer = optimizer_on(params, (spec,))
    for step in range(4):
        give_gradients(params, (spec,), step)
        optimizer.step()
    part = local_part(params["w"])
    assert tuple(part.shape) == ((1, D) if dist.get_rank() == 0 else (0, D))
    assert torch.isfinite(part).all()
    assert not torch.equal(full(params["w"]), start(spec))


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize(("world_size", "rows"), [(2, 9), (8, 36), (16, 72)])
def test_S4_rows_need_not_be_divisible(ranks, world_size, rows, refresh):
    """(72, D) on 16 ranks: shards of 5, one of 2, and one of none."""
    ranks(world_size).run(run_s4, rows, refresh)


def run_s4(rows: int, refresh: str) -> None:
    check_unsharded((Spec("w", (rows, D)),), f"{dist.get_world_size()}:S0", 0, refresh=refresh)


# ---------------------------------------------------------------------------------------------------------- S6 to S9


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize("world_size", [4])
def test_S6_two_dtypes_in_one_group(ranks, world_size, refresh):
    ranks(world_size).run(run_s6, refresh)


def run_s6(refresh: str) -> None:
    specs = (Spec("bf16", (5, D), dtype=torch.bfloat16), Spec("fp32", (5, D)))
    check_unsharded(specs, "4:S0", 0, refresh=refresh)


@pytest.mark.parametrize("world_size", [4])
def test_S7_replicas_are_bit_identical_and_nothing_is_gathered_in_full(ranks, world_size):
    ranks(world_size).run(run_s7)


def run_s7() -> None:
    specs = (Spec("a", (10, D)), Spec("b", (7, D)), Spec("c", (10, D)))
    params = build(specs, "2x2:R,S0")
    optimizer = optimizer_on(params, specs)
    for step in range(6):
        give_gradients(params, specs, step)
        kind, num_collectives = counted_step(optimizer)
        assert num_collectives == 0 or kind == "refresh"
        assert_same_bits_on_replicas(params)
    # Sent per refresh: at most each rank's part of the momentum out, its part of the updates back, and once more to
    # the other replica; a gather in full would be three times this rank's part and from every rank.
    held = sum(local_part(p).numel() for p in params.values()) * 4
    refresh = optimizer.traffic["refresh"]
    assert refresh.bytes_sent <= refresh.num_steps * 2 * held


@pytest.mark.parametrize("world_size", [4])
def test_S9_a_stack_split_twice_is_not_padded(ranks, world_size):
    """(8, 16, 16) with dimension 0 split over both axes: two whole matrices a rank. Nothing is sent, nothing padded."""
    ranks(world_size).run(run_s9)


def run_s9() -> None:
    specs = (Spec("experts", (8, 16, 16)),)
    for layout in ("2x2:S0,S0", "2x2:X0,S0"):
        params = build(specs, layout)
        optimizer = optimizer_on(params, specs)
        check_unsharded(specs, layout, 0)
        give_gradients(params, specs, 0)
        counted_step(optimizer)
        counts = optimizer.traffic["refresh"]
        assert (counts.num_collectives, counts.bytes_sent, counts.num_orthogonalizations) == (0, 0, 2)


# --------------------------------------------------------------------------------------------------------- S10 to S12


@pytest.mark.parametrize("world_size", [4])
def test_S10_fused_experts_are_separate_matrices(ranks, world_size):
    ranks(world_size).run(run_s10)


def run_s10() -> None:
    """(4 * 16, 32) in chunks of 4 moves as the stack (4, 16, 32) does."""
    fused, stack = (Spec("experts", (64, 32), chunks=4),), (Spec("experts", (4, 16, 32)),)
    a, b = build(fused, "4:S0"), build(stack, "1:alone")
    with torch.no_grad():
        b["experts"].copy_(full(a["experts"]).view(4, 16, 32))
    here, there = optimizer_on(a, fused), optimizer_on(b, stack)
    for step in range(4):
        give_gradients(a, fused, step)
        b["experts"].grad = full(a["experts"].grad).view(4, 16, 32)
        here.step()
        there.step()
    assert_same(full(a["experts"]).view(4, 16, 32), full(b["experts"]))


@pytest.mark.parametrize("world_size", [2])
def test_S11_a_linear_with_one_output_under_fsdp(ranks, world_size):
    ranks(world_size).run(run_s11)


def run_s11() -> None:
    torch.manual_seed(0)
    layer, twin = (nn.Linear(D, 1).to(device_type()) for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    fully_shard(layer, mesh=mesh_of((2,)))
    optimizers = []
    for module in (layer, twin):
        groups = rowmuon.param_groups(
            module, [rowmuon.Rule("bias", "adamw"), rowmuon.Rule("weight", "muon")], muon={"lr": 0.02}
        )
        optimizers.append(rowmuon.PeriodicRowMuon(groups, ns_dtype=torch.float32, comm_dtype=torch.float32))
    x = torch.linspace(-1, 1, 8 * D, device=device_type()).view(8, D)
    for _ in range(4):
        for module, optimizer in zip((layer, twin), optimizers, strict=True):
            module.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    assert relative(full(layer.weight), full(twin.weight)) < 1e-6
    assert "muon" in optimizers[0].describe()


@pytest.mark.parametrize("world_size", [2])
def test_S12_a_flattened_parameter_is_refused_and_a_zero_lr_stays_zero(ranks, world_size):
    ranks(world_size).run(run_s12)


def run_s12() -> None:
    with pytest.raises(ValueError, match=r"'flat' of shape \(4096,\).*FSDP2"):
        rowmuon.PeriodicRowMuon([("flat", nn.Parameter(torch.zeros(4096)))])
    spec = Spec("w", (6, D), settings={"lr": 0.0})
    params = build((spec,), "2:S0")
    optimizer = optimizer_on(params, (spec,))
    give_gradients(params, (spec,), 0)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert torch.equal(full(params["w"]), start(spec))


# --------------------------------------------------------------------------------------------------------- S13 to S16


@pytest.mark.parametrize("world_size", [2])
def test_S13_a_row_norm_is_of_the_whole_row(ranks, world_size):
    ranks(world_size).run(run_s13)


def run_s13() -> None:
    """One fused all-reduce of 16 sums; the same update as unsharded, but for the order in which squares are added."""
    specs = (Spec("w", (16, D)),)
    check_unsharded(specs, "2:S1", 2e-6)
    params = build(specs, "2:S1")
    optimizer = optimizer_on(params, specs)
    for step in range(3):
        give_gradients(params, specs, step)
        optimizer.step()
    counts = optimizer.traffic["row"]
    assert (counts.num_steps, counts.num_collectives, counts.bytes_sent) == (2, 2, 2 * 16 * 4)


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_S14_chunks_are_of_the_whole_parameter(ranks, world_size, refresh):
    ranks(world_size).run(run_s14, refresh)


def run_s14(refresh: str) -> None:
    check_unsharded((Spec("qkv", (3 * D, D), chunks=3),), f"{dist.get_world_size()}:S0", 0, refresh=refresh)


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize("world_size", [4, 8])
def test_S15_padding_changes_nothing(ranks, world_size, refresh):
    ranks(world_size).run(run_s15, refresh)


def run_s15(refresh: str) -> None:
    check_unsharded((Spec("w", (5, D)), Spec("v", (6, D))), f"{dist.get_world_size()}:S0", 0, refresh=refresh)


@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize("world_size", [4])
def test_S16_convolutions_are_matrices_of_their_own(ranks, world_size, refresh):
    ranks(world_size).run(run_s16, refresh)


def run_s16(refresh: str) -> None:
    """Two (8, 4, 3, 3) move as (8, 36) each."""
    convs = (Spec("a", (8, 4, 3, 3)), Spec("b", (8, 4, 3, 3)))
    flat = (Spec("a", (8, 36)), Spec("b", (8, 36)))
    here, there = build(convs, "4:S0"), build(flat, "1:alone")
    ours, theirs = optimizer_on(here, convs, refresh=refresh), optimizer_on(there, flat)
    with torch.no_grad():
        for name in "ab":
            there[name].copy_(full(here[name]).flatten(1))
    for step in range(4):
        give_gradients(here, convs, step)
        for name in "ab":
            there[name].grad = full(here[name].grad).flatten(1)
        ours.step()
        theirs.step()
    for name in "ab":
        assert_same(full(here[name]).flatten(1), full(there[name]))
