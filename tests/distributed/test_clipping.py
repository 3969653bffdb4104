"""Clipping by the global norm over several meshes and plain tensors, where torch's own raises."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rowmuon
from ranks.checks import assert_same_bits_on_replicas
from ranks.models import Spec, gradient, start
from ranks.placing import full_of, place, place_gradient

SHAPES = [(5, 7), (6, 4), (3, 2, 6), (9,), (1, 5), (4, 4)]
MIXES = {
    1: ("1:S0", "1:alone"),
    2: ("2:S0", "2:S1", "2:plain", "2:R"),
    3: ("3:S0", "3:plain"),
    4: ("4:S0", "2x2:R,S0", "2x2:X0,S0", "2x2:S0,S1", "2x2:S1,R", "4:plain"),
    8: ("8:S0", "2x2x2:R,X0,S0", "2x4:S1,S0", "8:plain"),
}


def with_gradients() -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Every shape in every layout, and what their gradients are in full."""
    params, grads = {}, {}
    for layout in MIXES[dist.get_world_size()]:
        for shape in SHAPES:
            spec = Spec(f"{layout} {shape}", shape)
            params[spec.name] = place(start(spec), layout)
            grads[spec.name] = gradient(spec, 0)
            place_gradient(params[spec.name], grads[spec.name])
    return params, grads


def run_clip(norm_type: float) -> None:
    params, grads = with_gradients()
    right = torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in grads.values()]), norm_type)
    for max_norm in (2 * right.item(), 0.3 * right.item()):
        norm = rowmuon.clip_grad_norm_(params.values(), max_norm, norm_type)
        assert math.isclose(norm.item(), right.item(), rel_tol=1e-6)
        factor = min(1.0, max_norm / (right.item() + 1e-6))
        found = full_of({name: p.grad for name, p in params.items()})
        for name, grad in grads.items():
            torch.testing.assert_close(found[name], grad * factor, rtol=2e-6, atol=0)
        assert_same_bits_on_replicas({name: p.grad for name, p in params.items()})


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("world_size", sorted(MIXES))
def test_equals_the_unsharded_norm(ranks, world_size, norm_type):
    ranks(world_size).run(run_clip, norm_type)


@pytest.mark.parametrize("world_size", [2])
def test_torch_raises_on_such_a_mix(ranks, world_size):
    """If this fails, torch has learned it, and ours may go."""
    ranks(world_size).run(run_torch)


def run_torch() -> None:
    params, _ = with_gradients()
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        nn.utils.clip_grad_norm_(params.values(), 1.0)


@pytest.mark.parametrize("world_size", [2])
def test_a_gradient_missing_on_one_rank(ranks, world_size):
    ranks(world_size).run(run_missing)


def run_missing() -> None:
    spec = Spec("w", (6, 4))
    params = {name: place(start(spec), "2:S0") for name in "ab"}
    grad = gradient(spec, 0)
    for parameter in params.values():
        place_gradient(parameter, grad)
    if dist.get_rank() == 1:
        params["a"].grad = None
    norm = rowmuon.clip_grad_norm_(params.values(), 1e9)
    right = (grad.square().sum() + grad[:3].square().sum()).sqrt()
    assert math.isclose(norm.item(), right.item(), rel_tol=1e-6)


@pytest.mark.parametrize("world_size", [2])
def test_an_infinite_gradient_on_one_rank_is_seen_on_all(ranks, world_size):
    ranks(world_size).run(run_infinite)


def run_infinite() -> None:
    spec = Spec("w", (6, 4))
    parameter = place(start(spec), "2:S0")
    grad = gradient(spec, 0)
    grad[5, 0] = math.inf
    place_gradient(parameter, grad)
    with pytest.raises(RuntimeError, match="gradient norm is inf"):
        rowmuon.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
    assert torch.equal(full_of({"w": parameter.grad})["w"], grad)
