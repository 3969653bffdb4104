from __future__ import annotations

import math

import pytest
import torch

from rowdit.flow import drop_labels, euler, guided_velocity, time_grid
from rowdit.streams import uniform

NUM_CLASSES = 10
Y = torch.tensor([3, 0, 9])


class Model:
    """Its velocity shows the label, the time and the channel; it remembers its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, x, t, y):
        assert t.shape == y.shape == (len(x),)
        self.calls.append(y.tolist())
        channel = torch.arange(1, x.shape[1] + 1).view(1, -1, 1, 1)
        return x + (t * y.float() ** 2).view(-1, 1, 1, 1) * channel


@pytest.fixture
def x():
    return torch.randn(3, 4, 2, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scale", [0.5, 1.5, 4.0])
def test_guidance_extrapolates_all_channels_by_one_forward(x, scale):
    """T21: of four channels all four, not the first three."""
    model, t = Model(), torch.tensor(0.5)
    got = guided_velocity(model, Y, scale, NUM_CLASSES)(x, t)
    assert model.calls == [[3, 0, 9, 10, 10, 10]]
    v_class, v_null = Model()(x, t.expand(3), Y), Model()(x, t.expand(3), torch.full((3,), 10))
    torch.testing.assert_close(got, v_null + scale * (v_class - v_null))
    assert ((got - v_class).abs().amax((0, 2, 3)) > 1).all()


@pytest.mark.parametrize(("scale", "labels"), [(1.0, [3, 0, 9]), (1, [3, 0, 9]), (0.0, [10, 10, 10])])
def test_scales_0_and_1_cost_one_plain_forward(x, scale, labels):
    model = Model()
    got = guided_velocity(model, Y, scale, NUM_CLASSES)(x, torch.tensor(0.5))
    assert model.calls == [labels]
    assert torch.equal(got, Model()(x, torch.full((3,), 0.5), torch.tensor(labels)))


def test_it_is_what_a_sampler_asks_for(x):
    model = Model()
    assert euler(guided_velocity(model, Y, 2.0, NUM_CLASSES), x, time_grid(3)).shape == x.shape
    assert len(model.calls) == 3


@pytest.mark.parametrize("scale", [-0.1, math.nan, math.inf, -math.inf])
def test_scales_that_mean_nothing_are_refused(scale):
    with pytest.raises(ValueError, match=f"guidance scale is {scale}"):
        guided_velocity(Model(), Y, scale, NUM_CLASSES)


def test_velocities_in_bfloat16_are_combined_in_the_states_precision(x):
    """1 + 2.3 / 128 lies between two numbers of bfloat16, whose spacing there is 1 / 128."""

    def model(x, t, y):
        v = torch.where(y == NUM_CLASSES, 1.0, 1 + 2.0**-7).to(torch.bfloat16)
        return v.view(-1, 1, 1, 1).expand_as(x)

    got = guided_velocity(model, Y, 2.3, NUM_CLASSES)(x, torch.tensor(0.5))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.full_like(x, 1 + 2.3 * 2.0**-7), rtol=1e-6, atol=0)
    assert guided_velocity(model, Y, 2.3, NUM_CLASSES)(x.bfloat16(), torch.tensor(0.5)).dtype == torch.bfloat16


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_guidance_in_an_interval_only(x, scale):
    model = Model()
    velocity = guided_velocity(model, Y, scale, NUM_CLASSES, (0.25, 0.5))
    everywhere = guided_velocity(Model(), Y, scale, NUM_CLASSES)
    for t in (0.25, 0.4, 0.5):
        torch.testing.assert_close(velocity(x, torch.tensor(t)), everywhere(x, torch.tensor(t)))
    for t in (0.0, 0.2499, 0.51, 1.0):
        model.calls.clear()
        got = velocity(x, torch.tensor(t))
        assert torch.equal(got, Model()(x, torch.full((3,), t), Y))
        assert model.calls == [Y.tolist()], "outside of the interval one plain forward is enough"


@pytest.mark.parametrize("interval", [(0.5, 0.5), (0.6, 0.5), (-0.1, 0.5), (0.5, 1.1), (math.nan, 1.0)])
def test_intervals_that_are_none_are_refused(interval):
    with pytest.raises(ValueError, match="guidance interval is"):
        guided_velocity(Model(), Y, 2.0, NUM_CLASSES, interval)


def test_class_dropout():
    y, u = torch.tensor([1, 2, 3, 4]), torch.tensor([0.0, 0.0999, 0.1, 0.9])
    kept = y.clone()
    assert drop_labels(y, u, 0.1, NUM_CLASSES).tolist() == [10, 10, 3, 4]
    assert drop_labels(y, u, 0.0, NUM_CLASSES).tolist() == [1, 2, 3, 4]
    assert drop_labels(y, u, 1.0, NUM_CLASSES).tolist() == [10] * 4
    assert torch.equal(y, kept) and drop_labels(y, u, 0.5, NUM_CLASSES).dtype == torch.int64


def test_a_dropped_caption_is_zeros():
    captions = torch.arange(6.0).view(3, 2) + 1
    dropped = drop_labels(captions, torch.tensor([0.05, 0.5, 0.01]), 0.1, num_classes=0)
    assert dropped.tolist() == [[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]


def test_class_dropout_drops_its_share():
    positions = range(20_000)
    dropped = drop_labels(torch.zeros(20_000, dtype=torch.int64), uniform(0, "class_dropout", positions), 0.1, 10)
    share = (dropped == 10).double().mean().item()
    assert share == pytest.approx(0.1, abs=4 * math.sqrt(0.1 * 0.9 / 20_000))


def test_class_dropout_refuses_bad_input():
    y = torch.tensor([1, 2])
    for probability in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=f"probability is {probability}"):
            drop_labels(y, torch.rand(2), probability, NUM_CLASSES)
    with pytest.raises(ValueError, match=r"\(1,\).*\(2,\)"):
        drop_labels(y, torch.rand(1), 0.1, NUM_CLASSES)
