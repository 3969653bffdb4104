"""Every layout x refresh mode x shape x W against the float64 reference, with counted and planned traffic."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks.checks import assert_same_bits_on_replicas, counted_step, relative
from ranks.expected import expected_weights
from ranks.models import EVERY_SHAPE, build, give_gradients, optimizer_on
from ranks.placing import full_of, parse

LAYOUTS = {
    1: ("1:plain", "1:alone", "1:S0", "1:S1", "1x1:R,S0", "1x1:X0,S0", "1x1x1:R,S0,S1"),
    2: ("2:plain", "2:alone", "2:R", "2:S0", "2:S1", "2:S2", "2x1:R,S0", "1x2:R,S0", "2x1:X0,S0", "1x2:S1,S0"),
    3: ("3:plain", "3:R", "3:S0", "3:S1", "3:S2", "3x1:R,S1", "1x3:R,S0", "1x3x1:S0,R,S1"),
    4: ("4:plain", "4:R", "4:S0", "4:S1", "4:S2", "2x2:R,S0", "2x2:S0,R", "2x2:R,S1", "2x2:S0,S0", "2x2:X0,S0")
    + ("2x2:S0,S1", "2x2:S1,S0", "2x2:S1,S1", "2x2:X1,S1", "2x2:S1,S2", "2x2:S0,S2", "4x1:R,S0", "1x4:R,S0")
    + ("2x1x2:X0,R,S0",),
    8: ("8:plain", "8:S0", "8:S1", "2x4:R,S0", "4x2:S0,R", "4x2:X0,S0", "2x4:S0,S1", "2x2x2:R,X0,S0")
    + ("2x2x2:R,S0,S1", "2x2x2:X0,S1,S0", "2x2x2:S1,R,S0"),
}
GRID = [(world_size, layout) for world_size, layouts in LAYOUTS.items() for layout in layouts]
NUM_STEPS = 5  # refresh, row, row, refresh, row

# Relative to the update of a step. Newton-Schulz in float32 errs by at most 1.5e-6 on these matrices; it multiplies
# what reaches it by up to 485, but only along directions that hardly count. In bfloat16 (8 bits: 0.2 % a rounding) it
# errs by 0.7 to 2.7 % on them; rounding the direction and the result for sending adds 0.2 % each.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}
# A row step never leaves float32. It decays weights, though, which differ by a refresh's error, by 0.002 of themselves.
ROW_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.002 * TOLERANCE[torch.bfloat16]}


def run_grid(layout: str, refresh: str, dtype: torch.dtype, settings: dict) -> None:
    params = build(EVERY_SHAPE, layout)
    optimizer = optimizer_on(params, EVERY_SHAPE, layout, refresh=refresh, ns_dtype=dtype, comm_dtype=dtype, **settings)
    before = full_of(params, on_rank=0)
    for step in range(NUM_STEPS):
        give_gradients(params, EVERY_SHAPE, step)
        kind, num_collectives = counted_step(optimizer, watched=step in (1, 3))  # a row step and a refresh
        assert kind == ("row" if step % 3 else "refresh")
        if kind == "row":
            assert num_collectives == num_row_collectives(layout)
        assert_same_bits_on_replicas(params)
        after = full_of(params, on_rank=0)  # what is full here is full everywhere: replicas have the same bits
        if dist.get_rank() == 0:
            compare_updates(before, after, step, kind, dtype)
        before = after


def compare_updates(
    before: dict[str, Tensor], after: dict[str, Tensor], step: int, kind: str, dtype: torch.dtype
) -> None:
    expected_before, expected_after = expected_weights(EVERY_SHAPE, step), expected_weights(EVERY_SHAPE, step + 1)
    for spec in EVERY_SHAPE:
        found = after[spec.name].double() - before[spec.name].double()
        error = relative(found, expected_after[spec.name] - expected_before[spec.name])
        of_kind = ROW_TOLERANCE if kind == "row" or spec.algorithm == "adamw" else TOLERANCE
        assert error <= of_kind[dtype], f"step {step} ({kind}), {spec.name} {spec.shape}: off by {error:.2g}"


def num_row_collectives(layout: str) -> int:
    """One fused all-reduce over every set of axes that splits some parameter's rows, and nothing else."""
    shape, names = parse(layout)
    split = set()
    for column in (1, 2):  # of a matrix or convolution, of a stack of matrices
        axes = tuple(
            axis
            for axis, (size, name) in enumerate(zip(shape, names, strict=True))
            if size > 1 and name[1:] == str(column)
        )
        split |= {axes} if axes else set()
    return len(split)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("refresh", ["exchange", "gather"])
@pytest.mark.parametrize(("world_size", "layout"), GRID)
def test_equals_the_reference(ranks, world_size, layout, refresh, dtype):
    ranks(world_size).run(run_grid, layout, refresh, dtype, {})
