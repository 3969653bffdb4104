"""Random shapes, placements, meshes and settings on four ranks against the float64 reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ranks.checks import assert_same_bits_on_replicas, counted_step, relative
from ranks.expected import expected_weights
from ranks.models import Spec, give_gradients, optimizer_on, start
from ranks.placing import full_of, place

NUM_STEPS = 4
# Newton-Schulz multiplies the rounding of float32, 6e-8, by at most 485 where a matrix is nearly singular, as small
# random ones may be.
TOLERANCE = 485 * 6e-8 * 2
MESHES = [(4,), (2, 2), (1, 4), (4, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)]


@st.composite
def layouts(draw: st.DrawFn) -> str:
    mesh = draw(st.sampled_from(MESHES))
    names = [draw(st.sampled_from(["R", "S0", "S0", "S1", "S2"])) for _ in mesh]
    for axis, name in enumerate(names):  # behind it the same dimension is split once more: it may be strided
        if name != "R" and name in names[axis + 1 :] and draw(st.booleans()):
            names[axis] = "X" + name[1:]
    return "x".join(map(str, mesh)) + ":" + ",".join(names)


@st.composite
def params(draw: st.DrawFn) -> list[tuple[Spec, str]]:
    out = []
    for i in range(draw(st.integers(1, 4))):
        chunks = draw(st.sampled_from([1, 1, 2, 3]))
        rows, cols = chunks * draw(st.integers(1, 6)), draw(st.integers(1, 9))
        shape = draw(
            st.sampled_from([(rows, cols), (rows, cols), (draw(st.integers(1, 5)), rows, cols), (rows, cols, 2, 1)])
        )
        layout = draw(st.one_of(layouts(), layouts(), st.just("4:plain")))
        out.append((Spec(f"p{i}", shape, chunks=chunks), layout))
    return out


def run_random(chosen: list[tuple[Spec, str]], options: dict[str, Any]) -> None:
    specs = tuple(spec for spec, _ in chosen)
    held = {spec.name: place(start(spec), layout) for spec, layout in chosen}
    optimizer = optimizer_on(held, specs, "4:plain", **options)
    phases = {p: optimizer.state[held[p]]["phase"] for p in held}
    before = full_of(held)
    for step in range(NUM_STEPS):
        give_gradients(held, specs, step)
        counted_step(optimizer)
        assert_same_bits_on_replicas(held)
        after = full_of(held)
        if dist.get_rank() == 0:
            settings = {"period": options["period"]}
            right, right_before = (expected_weights(specs, n, phases, **settings) for n in (step + 1, step))
            for name in held:
                found = after[name].double() - before[name].double()
                error = relative(found, right[name] - right_before[name])
                assert error <= TOLERANCE, f"step {step}, {name}: off by {error:.2g}"
        before = after


@pytest.mark.parametrize("world_size", [4])
@settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # every failure ends four processes: no shrinking
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    chosen=params(),
    options=st.fixed_dictionaries(
        {
            "refresh": st.sampled_from(["exchange", "gather"]),
            "period": st.integers(1, 3),
            "stagger": st.booleans(),
            "bucket_bytes": st.sampled_from([1, 200, 64 << 20]),
        }
    ),
)
def test_equals_the_reference(ranks, world_size, chosen, options):
    assert math.prod(chosen[0][0].shape) > 0
    ranks(world_size).run(run_random, chosen, options)
