from __future__ import annotations

import pytest
import torch

from rowdit.flow import flow_loss, interpolate, velocity_target


@pytest.fixture
def pair():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 2, 3, 3, generator=generator), torch.randn(4, 2, 3, 3, generator=generator)


def test_ends_and_middle_of_the_path(pair):
    x, noise = pair
    assert torch.equal(interpolate(x, noise, torch.zeros(4)), x)
    assert torch.equal(interpolate(x, noise, torch.ones(4)), noise)
    t = torch.tensor([0.0, 0.25, 0.5, 1.0])
    for i in range(4):
        torch.testing.assert_close(interpolate(x, noise, t)[i], (1 - t[i]) * x[i] + t[i] * noise[i])


def test_velocity_is_the_derivative_of_the_path(pair):
    x, noise = (tensor.double() for tensor in pair)
    t = torch.full((4,), 0.3, dtype=torch.float64)
    difference = (interpolate(x, noise, t + 0.1) - interpolate(x, noise, t - 0.1)) / 0.2
    torch.testing.assert_close(difference, velocity_target(x, noise))


def test_loss_of_each_image(pair):
    x, noise = pair
    t, y = torch.tensor([0.0, 0.2, 0.7, 1.0]), torch.tensor([0, 1, 2, 3])
    seen = {}

    def model(x_t, t, y):
        seen.update(x_t=x_t, t=t, y=y)
        return y.view(-1, 1, 1, 1) * torch.ones_like(x_t)

    loss = flow_loss(model, x, y, noise, t)
    assert loss.shape == (4,) and loss.dtype == torch.float32
    for i in range(4):
        torch.testing.assert_close(loss[i], (i - (noise[i] - x[i])).square().mean())
    assert torch.equal(seen["x_t"], interpolate(x, noise, t)) and seen["t"] is t and seen["y"] is y


def test_loss_of_a_perfect_model_is_zero(pair):
    x, noise = pair
    assert not flow_loss(lambda x_t, t, y: noise - x, x, torch.zeros(4), noise, torch.rand(4)).any()


def test_loss_is_float32_where_everything_else_is_bf16(pair):
    x, noise = (tensor.bfloat16() for tensor in pair)
    loss = flow_loss(lambda x_t, t, y: torch.zeros_like(x_t), x, torch.zeros(4), noise, torch.rand(4).bfloat16())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, (noise.float() - x.float()).square().mean((1, 2, 3)))


def test_shapes_that_broadcasting_would_hide_are_refused(pair):
    x, noise = pair
    with pytest.raises(ValueError, match=r"\(4, 2, 3, 3\).*\(1, 2, 3, 3\)"):
        interpolate(x, noise[:1], torch.rand(4))
    with pytest.raises(ValueError, match=r"t has shape \(1,\).*\(4,\)"):
        interpolate(x, noise, torch.rand(1))
    with pytest.raises(ValueError, match=r"\(4, 4, 3, 3\).*\(4, 2, 3, 3\)"):
        flow_loss(lambda x_t, t, y: torch.cat([x_t, x_t], 1), x, torch.zeros(4), noise, torch.rand(4))
