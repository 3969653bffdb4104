"""What a step takes: the formulas of the arithmetic, the account of a whole step, and its bound by bucket_bytes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from contextlib import nullcontext
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rowmuon
from plan_simulation import SMALL_MESHES, entries_on_one_grid
from rowdit.cost.live_bytes import LiveBytes
from rowmuon import gram, update
from rowmuon.coefficients import resolve_coefficients
from rowmuon.entries import KernelWorkspace
from rowmuon.factors import gram_shape
from rowmuon.orthogonalize import newton_schulz, newton_schulz_bytes
from rowmuon.plan import Entry, PlanOptions, build_plan
from rowmuon.stacks import mean_layout

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
# A few norms beside matrices of a few elements: the formulas may be this much too high, never too low.
SLACK_BYTES = 4096


# --------------------------------------------------------------------------------------------------- the live counter
def test_live_bytes_sees_what_comes_and_goes() -> None:
    with LiveBytes() as live:
        a = torch.zeros(1000)
        b = a * 2
        view = b[3:].view(-1)
        del b
        assert live.now == 8000  # the view keeps it
        a.add_(1)
        assert live.now == 8000
        del view
        assert live.now == 4000
        c = a.double() + 1
        assert live.now == 4000 + 8000 and live.peak == 4000 + 16_000
    del a, c
    assert live.now == 0


# ------------------------------------------------------------------------------------------------------ Newton-Schulz
STACKS = [(1, 8, 8), (40, 64, 64), (3, 300, 300), (2, 700, 300), (1, 800, 1600), (1, 128, 1024), (5, 300, 40)]
LARGE_STACKS = [*STACKS, (7, 1024, 1024), (30, 1024, 1024), (1, 9000, 1024), (2000, 64, 64)]


@pytest.mark.parametrize("device_type", ["cpu", "fake"])
@pytest.mark.parametrize("form", ["auto", "direct", "gram"])
def test_newton_schulz_takes_what_it_says(device_type: str, form: Any) -> None:
    fake = device_type == "fake"
    for shape, source, dtype in itertools.product(LARGE_STACKS if fake else STACKS, (FP32, BF16, FP64), (BF16, FP32)):
        for in_place in {False, source == dtype}:
            with FakeTensorMode() if fake else nullcontext():
                matrices = torch.ones(shape, dtype=source)
                with LiveBytes() as live:
                    newton_schulz(matrices, "keller_jordan", dtype=dtype, form=form, out=matrices if in_place else None)
            said = newton_schulz_bytes(
                *shape, 5, form, dtype=dtype, source_dtype=None if in_place else source, device_type=device_type
            )
            assert live.peak <= said <= 1.05 * live.peak + SLACK_BYTES, (shape, source, dtype, in_place)


def test_newton_schulz_on_a_device_takes_little_beside_a_large_batch() -> None:
    """At most the result, and four squares or fewer and a copy of what is worked on at a time: 32 MiB or one matrix."""
    for num, rows, cols in [(64, 1024, 1024), (2000, 128, 128), (1, 5120, 20480), (3, 5120, 5120)]:
        matrix = rows * cols * 2
        said = newton_schulz_bytes(num, rows, cols, 5, source_dtype=None, device_type="cuda")
        assert said <= 3 * max(matrix, 32 << 20)


def on_a_device(monkeypatch: pytest.MonkeyPatch, slab: int, batch: int) -> None:
    """CPU tensors take the path of other devices, in small parts."""
    monkeypatch.setattr("rowmuon.orthogonalize.compute_device", lambda tensor: "cuda")
    monkeypatch.setattr("rowmuon.normalize._DEVICE_SLAB_ELEMENTS", slab)
    monkeypatch.setattr("rowmuon.orthogonalize._DEVICE_BATCH_ELEMENTS", batch)


@pytest.mark.parametrize("slab", [1, 100, 1 << 22])
@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_parts_on_a_device_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch, slab: int, dtype: Any) -> None:
    matrices = torch.randn(5, 24, 40, generator=torch.Generator().manual_seed(0), dtype=FP64)
    matrices *= torch.tensor([1.0, 1e-30, 1e30, 0.0, 1.0]).view(5, 1, 1)  # its squares leave the range of fp32
    whole = newton_schulz(matrices, "polar_express", dtype=FP64)
    on_a_device(monkeypatch, slab, batch=2 * 24 * 40)
    found = newton_schulz(matrices.to(dtype), "polar_express", dtype=dtype)
    assert bool(found.isfinite().all()) and not found[3].any()
    torch.testing.assert_close(found.to(FP64), whole, rtol=0, atol=1e-4 if dtype == FP32 else 1e-12)


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64])
def test_in_place_is_the_same(monkeypatch: pytest.MonkeyPatch, dtype: Any, device_path: bool) -> None:
    matrices = torch.randn(7, 20, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    if device_path:
        on_a_device(monkeypatch, slab=7 * 30 * 3, batch=2 * 600)
    expected = newton_schulz(matrices.clone(), "keller_jordan", dtype=dtype)
    assert newton_schulz(matrices, "keller_jordan", dtype=dtype, out=matrices) is matrices
    assert torch.equal(matrices, expected)


# --------------------------------------------------------------------------------------------- the step's arithmetic
BLOCK = 600
MATRICES = [(1, 1), (7, 30), (20, 30), (41, 30), (3, 1000), (0, 30)]
DTYPES = [FP32, BF16, FP64]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("rows_cols", MATRICES)
def test_the_arithmetic_takes_what_it_says(monkeypatch: pytest.MonkeyPatch, rows_cols: Any, maximize: bool) -> None:
    monkeypatch.setattr(update, "_CPU_BLOCK", BLOCK)
    for weight, momentum, other in itertools.product(DTYPES, DTYPES, DTYPES):
        w, m, g = (torch.ones(rows_cols, dtype=dtype) for dtype in (weight, momentum, weight))
        o = torch.ones(rows_cols, dtype=other)
        settings = {"beta": 0.9, "nesterov": True, "maximize": maximize}
        lr = {"lr": torch.tensor(0.1), "weight_decay": 0.1}
        with LiveBytes() as live:
            update.update_momentum_(m, g, beta=0.9, maximize=maximize)
        said = update.momentum_bytes(*rows_cols, (momentum, weight), "cpu", maximize)
        assert live.peak <= said <= 1.3 * live.peak, "momentum"
        with LiveBytes() as writing:
            update.write_direction(m, g, o, **settings, taken=True)
        with LiveBytes() as applying:
            update.apply_direction_(w, o, scale=1.0, **lr)
        said = update.part_bytes(*rows_cols, (weight, momentum, other, other), "cpu", maximize)
        most = max(writing.peak, applying.peak)
        assert most <= said + 64 and said <= 1.3 * most + 64, "part"  # lr and what is made of it
        with LiveBytes() as ahead:
            update.write_direction(m, g, o, **settings, taken=False)
        workspace = KernelWorkspace((1, 1), (), FP32, weight, momentum, "cpu", maximize)
        said = workspace.part_ahead(*rows_cols, other)
        assert ahead.peak <= said <= 1.5 * max(ahead.peak, most) + 64, "part ahead"
        with LiveBytes() as live:
            update.row_step_([w], [m], [g], scales=[1.0], eps=1e-7, **lr, **settings)
        said = sum(update.row_step_bytes(*rows_cols, (weight, momentum), "cpu", maximize))
        assert live.peak <= said + 64 and said <= 1.5 * live.peak + 64, "row step"
        Q = torch.ones(1, rows_cols[1], rows_cols[1], dtype=other)
        with LiveBytes() as live:
            gram.gram_row_step_([w], [m], [g], [Q], scales=[1.0], eps=1e-7, **lr, **settings)
        said = workspace.gram_rows(*rows_cols, other)
        assert live.peak <= said + 64 and said <= 1.5 * live.peak + 64, "Gram row step"
        total, largest = torch.zeros(1, rows_cols[1], rows_cols[1]), torch.ones(())
        with LiveBytes() as live:
            gram.add_gram_(total, m, g, largest, **settings)
        said = workspace.gram(*rows_cols, FP32)
        assert live.peak <= said + 64 and said <= 1.5 * live.peak + 64, "Gram matrix"


# ------------------------------------------------------------------------------------------------------- whole steps
SHAPES = [(96, 96), (96, 96), (192, 64), (64, 256), (40, 40), (3, 64, 48)]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    out = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in out:
        parameter.grad = torch.ones_like(parameter)
    return out


@pytest.mark.parametrize("size,num", [(1, 1), (30, 7), (100, 3)])
@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_factors_take_what_they_say(monkeypatch: pytest.MonkeyPatch, dtype: Any, size: int, num: int) -> None:
    for at_once in (1, 2 * size**2, 1 << 22):
        monkeypatch.setattr(gram, "AT_ONCE", at_once)
        stack = torch.eye(size, dtype=dtype).repeat(num, 1, 1) / size
        with LiveBytes() as live:
            gram.factorize_(stack, 1e-3)
        said = gram.factorize_bytes(num, size, dtype)
        assert live.peak <= said <= 1.3 * live.peak + 1024


@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 100_000, 64 << 20])
@pytest.mark.parametrize("dtypes", [(FP32, None, BF16), (FP32, BF16, BF16), (BF16, None, FP32), (FP64, None, FP64)])
@pytest.mark.parametrize("cheap_step", ["row", "gram_row"])
def test_steps_of_one_process(cheap_step: Any, dtypes: tuple[Any, Any, Any], bucket_bytes: int, stagger: bool) -> None:
    weight, state, arithmetic = dtypes
    how = {"bucket_bytes": bucket_bytes, "stagger": stagger, "cheap_step": cheap_step}
    optimizer = rowmuon.PeriodicRowMuon(parameters(weight), period=3, state_dtype=state, ns_dtype=arithmetic, **how)
    for _ in range(4):
        plan = optimizer._plan(optimizer._muon_params())
        with LiveBytes() as live:
            optimizer.step()
        assert live.now == 0
        assert live.peak <= plan.peak_bytes(0) <= 1.3 * live.peak + SLACK_BYTES, optimizer.traffic


def test_a_missing_gradient_takes_no_more() -> None:
    params = parameters(FP32)
    params[0].grad = None
    optimizer = rowmuon.PeriodicRowMuon(params, period=1)
    with LiveBytes() as live:
        optimizer.step()
    assert 0 < live.peak <= optimizer.plan("refresh").peak_bytes(0)


def test_describe_shows_the_peak() -> None:
    optimizer = rowmuon.PeriodicRowMuon(parameters(FP32))
    for kind in ("refresh", "row"):
        assert f"{optimizer.plan(kind).peak_bytes(0):,} bytes" in optimizer.describe()


def test_nothing_is_known_without_a_workspace() -> None:
    optimizer = rowmuon.PeriodicRowMuon(parameters(FP32))
    bare = [dataclasses.replace(entry, workspace=None) for entry in optimizer.plan("refresh").entries]
    with pytest.raises(ValueError, match=r"params\[0\].*workspace"):
        build_plan(bare, range(len(bare)), PlanOptions()).peak_bytes(0)


# -------------------------------------------------------------------------------------------------- bucket_bytes bounds
def with_workspace(entry: Entry, options: PlanOptions) -> Entry:
    dtype = options.comm_dtype
    coefficients = resolve_coefficients("keller_jordan", 5)
    workspace = KernelWorkspace(entry.layout.matrix_shape, coefficients, dtype, FP32, FP32, "cuda", False)
    kept = gram_shape(entry.layout, options, dtype)
    return dataclasses.replace(entry, dtype=FP32, workspace=workspace, gram=kept)


def unit_bytes(entries: list[Entry], options: PlanOptions) -> int:
    """What docs/shard.md calls B: bucket_bytes, or what the largest matrix needs."""
    needed = [options.bucket_bytes]
    for entry in entries:
        layout, grid = entry.layout, entry.layout.grid
        rows, cols = layout.matrix_shape
        numel = max(rows * cols, layout.num_replicas * cols)  # a row of every replica
        if options.refresh == "gather" and grid is not None:
            # The parameter, every rank's part padded to the largest.
            numel = max(numel, layout.num_shards * max(layout.box(rank).numel for rank in grid.ranks))
        # A local bucket holds the momentum as it is.
        needed.append(numel * max(options.comm_dtype.itemsize, FP32.itemsize if layout.matrices_are_whole else 0))
        kept = gram_shape(layout, options, options.comm_dtype)
        if kept is not None:
            held = mean_layout(layout, kept)
            most = max(held.box(rank).shape[1] for rank in ([0] if grid is None else grid.ranks))
            needed.append(held.num_shards * most * kept.block * kept.dtype.itemsize)
    return max(needed)


SMALL = 64  # elements of a block, a slab and a batch here: small shapes then have several, as large ones really do
bounded_options = st.builds(
    PlanOptions,
    refresh=st.sampled_from(["exchange", "gather"]),
    comm_dtype=st.sampled_from([BF16, FP32]),
    bucket_bytes=st.sampled_from([1, 400, 3_000, 20_000]),
    flops_per_byte=st.sampled_from([0.0, math.inf]),
    cheap_step=st.sampled_from(["row", "gram_row"]),
)


@settings(max_examples=150, deadline=None)
@given(entries_on_one_grid(tuple(SMALL_MESHES), most=12), bounded_options)
def test_bucket_bytes_bounds_the_peak(entries: list[Entry], options: PlanOptions) -> None:
    """docs/shard.md: peak <= 13 B + 200 MiB, if Newton-Schulz has the dtype that is sent."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("normalize._DEVICE_SLAB_ELEMENTS", "orthogonalize._DEVICE_BATCH_ELEMENTS"):
            patch.setattr(f"rowmuon.{name}", SMALL)
        patch.setattr(update, "_DEVICE_BLOCK", SMALL)
        patch.setattr("rowmuon.normalize._PER_MATRIX_BYTES", 0)  # more than these tiny matrices themselves
        patch.setattr(gram, "AT_ONCE", SMALL)
        patch.setattr(gram, "_PER_MATRIX_BYTES", 0)
        patch.setattr(gram, "_NUM_STARTS", 0)
        plan = build_plan([with_workspace(entry, options) for entry in entries], range(len(entries)), options)
        grid = entries[0].layout.grid
        for rank in [0] if grid is None else grid.ranks:
            assert plan.peak_bytes(rank) <= 13 * unit_bytes(entries, options) + constant_bytes(options, SMALL, SMALL)


def constant_bytes(options: PlanOptions, block: int, batch: int) -> int:
    """A block of the elementwise arithmetic in float32, and four of what Newton-Schulz works on at a time."""
    return 4 * block + 4 * batch * options.comm_dtype.itemsize
