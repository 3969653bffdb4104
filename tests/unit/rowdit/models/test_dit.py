from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from reference.dit import reference
from rowdit.models import DiT, DiTConfig
from rowdit.models.dit import rotate, rotation
from rowdit.models.init import initial_value, sincos_positions

SMALL = DiTConfig(
    image_size=6, in_channels=2, patch_size=3, hidden_size=12, depth=2, num_heads=3, num_classes=4, mlp_ratio=2.0
)


def randomised(config: DiTConfig, seed: int = 0) -> DiT:
    """A model without zeros, so that every part shows in the output."""
    model = DiT(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def inputs(config: DiTConfig, batch: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, config.in_channels, config.image_size, config.image_size, generator=generator)
    y = torch.randint(0, config.num_classes + 1, (batch,), generator=generator)
    t = torch.rand(batch, generator=generator)
    if config.caption_dim is not None:
        y = torch.randn(batch, config.caption_dim, generator=generator)
        y[0] = 0  # no caption
    return x, t, y


@pytest.mark.parametrize("learn_sigma", [False, True])
@pytest.mark.parametrize(
    "config", [SMALL, DiTConfig(14, 1, 2, hidden_size=24, depth=3, num_heads=2, num_classes=10)], ids=["6px", "14px"]
)
def test_forward_equals_the_reference(config, learn_sigma):
    config = dataclasses.replace(config, learn_sigma=learn_sigma)
    model = randomised(config).double()
    x, t, y = inputs(config)
    got = model(x.double(), t, y, all_channels=True)
    assert torch.equal(got[:, : config.in_channels], model(x.double(), t, y))
    for i in range(len(x)):
        expected = reference(model.state_dict(), config, x[i], t[i].item(), y[i])
        # Only the time embedding is float32 (angles up to 1000, rounded to 3e-5); everything else is float64.
        torch.testing.assert_close(got[i], expected, rtol=1e-3, atol=1e-3)


OPTIONS = {
    "qk_norm": {"qk_norm": True},
    "rope": {"positions": "rope"},
    "swiglu": {"mlp": "swiglu"},
    "captions": {"num_classes": 0, "caption_dim": 7},
    "freq_shift": {"freq_shift": 1},
    "all": {"qk_norm": True, "positions": "rope", "mlp": "swiglu", "num_classes": 0, "caption_dim": 7},
}


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=list(OPTIONS))
def test_options_equal_the_reference(changes):
    config = dataclasses.replace(SMALL, **changes)
    model = randomised(config).double()
    x, t, y = inputs(config)
    if "freq_shift" not in changes:
        t = torch.zeros_like(t)  # the embedding of other times is float32
    got = model(x.double(), t, y)
    for i in range(len(x)):
        expected = reference(model.state_dict(), config, x[i], t[i].item(), y[i])
        tolerance = {"rtol": 1e-3, "atol": 1e-3} if "freq_shift" in changes else {"rtol": 2e-6, "atol": 2e-6}
        torch.testing.assert_close(got[i], expected, **tolerance)  # rotations are float32
    plain = randomised(SMALL).double()
    if "caption_dim" not in changes:
        assert not torch.allclose(got, plain(x.double(), t, y), atol=1e-3)


def test_rotations_tell_where_tokens_are_and_keep_lengths():
    turned = rotate(torch.ones(1, 1, 9, 8), rotation(3, 8, torch.device("cpu")))[0, 0]
    assert len(torch.unique(turned.round(decimals=4), dim=0)) == 9
    torch.testing.assert_close(turned.square().sum(-1), torch.full((9,), 8.0))
    # what attention sees depends on the distance alone: from (0, 0) to (1, 2) as from (1, 0) to (2, 2)
    dots = turned @ turned.T
    torch.testing.assert_close(dots[0, 5], dots[3, 8])


def test_a_caption_of_zeros_is_the_null_caption():
    config = dataclasses.replace(SMALL, num_classes=0, caption_dim=7)
    model = randomised(config)
    x, t, _ = inputs(config, batch=3)
    x, t = x[:1].expand(3, -1, -1, -1), t[:1].expand(3)
    null = model.y_embedder.null_embedding.detach()
    none, given, other = model(x, t, torch.stack([torch.zeros(7), null, null + 1]))
    torch.testing.assert_close(none, given)
    assert not torch.allclose(none, other)


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=list(OPTIONS))
def test_options_start_and_train(changes):
    config = dataclasses.replace(SMALL, **changes)
    with torch.device("meta"):
        model = DiT(config)
    model.to_empty(device="cpu")
    model.init_weights(0)
    x, t, y = inputs(config)
    assert torch.equal(model(x, t, y), torch.zeros_like(x))
    model = randomised(config)
    model(x, t, y).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_swiglu_has_about_as_many_parameters_as_gelu():
    plain, gated = (DiTConfig(8, 4, 2, 384, 1, 6, 10, mlp=mlp) for mlp in ("gelu", "swiglu"))
    with torch.device("meta"):
        numbers = [sum(p.numel() for p in DiT(config).blocks.parameters()) for config in (plain, gated)]
    assert (plain.mlp_size, gated.mlp_size) == (1536, 1024)
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-3)


def test_forward_equals_the_reference_to_float64_where_the_angles_are_exact():
    model = randomised(SMALL).double()
    x, _, y = inputs(SMALL)
    got = model(x.double(), torch.zeros(len(x)), y)
    for i in range(len(x)):
        torch.testing.assert_close(got[i], reference(model.state_dict(), SMALL, x[i], 0.0, y[i]))


def test_parameter_names_are_the_published_ones():
    block = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1"]
    modules = ["x_embedder.proj", "t_embedder.mlp.0", "t_embedder.mlp.2", "final_layer.linear"]
    modules += ["final_layer.adaLN_modulation.1", *(f"blocks.{i}.{name}" for i in range(2) for name in block)]
    expected = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    model = DiT(SMALL)
    assert {name for name, _ in model.named_parameters()} == expected | {"y_embedder.embedding_table.weight"}
    assert set(model.state_dict()) == expected | {"y_embedder.embedding_table.weight", "pos_embed"}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.x_embedder.proj.weight.shape == (12, 2, 3, 3) and model.pos_embed.shape == (1, 4, 12)


# ---- the start


def test_adaln_zero_starts_with_identity_blocks_and_zero_output():
    model = DiT(SMALL)
    x, t, y = inputs(SMALL)
    assert torch.equal(model(x, t, y), torch.zeros_like(x))
    tokens, c = torch.randn(3, 4, 12), torch.randn(3, 12)
    assert all(torch.equal(block(tokens, c), tokens) for block in model.blocks)


def test_initial_weights_have_the_published_distributions():
    config = DiTConfig(8, 3, 2, hidden_size=128, depth=1, num_heads=4, num_classes=100)
    for name, parameter in DiT(config).named_parameters():
        value = parameter.detach()
        if name.endswith("bias") or "adaLN" in name or name.startswith("final_layer"):
            assert not value.any(), name
        elif name.startswith(("t_embedder", "y_embedder")):
            assert value.std().item() == pytest.approx(0.02, rel=0.03), name
            assert value.abs().max() > 0.05, name  # normal, not uniform
        else:
            bound = math.sqrt(6 / (value.shape[0] + value[0].numel()))
            assert 0.99 * bound < value.abs().max() <= bound, name
            assert value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03), name
            assert abs(value.mean().item()) < 0.05 * bound, name


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    model = DiT(SMALL, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    again, other = DiT(SMALL, seed=3).state_dict(), DiT(SMALL, seed=4).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, again[name]), name
        if value.any() and name != "pos_embed":
            assert not torch.equal(value, other[name]), name


def test_meta_device_then_materialise_gives_the_same_model():
    with torch.device("meta"):
        model = DiT(SMALL, seed=3)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(math.nan)
    model.init_weights(3)
    expected = DiT(SMALL, seed=3).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_no_two_parameters_start_alike_and_depth_changes_none():
    shallow = DiT(SMALL).state_dict()
    deep = DiT(dataclasses.replace(SMALL, depth=4)).state_dict()
    assert all(torch.equal(value, deep[name]) for name, value in shallow.items())
    assert not torch.equal(deep["blocks.0.attn.qkv.weight"], deep["blocks.1.attn.qkv.weight"])
    assert not torch.equal(deep["blocks.0.mlp.fc1.weight"].flatten(), deep["blocks.0.mlp.fc2.weight"].flatten())


@pytest.mark.parametrize("name", ["blocks.0.attn.qkv.weight", "t_embedder.mlp.0.weight", "final_layer.linear.weight"])
def test_a_rank_can_draw_its_own_rows(name):
    whole = initial_value(name, (9, 5), seed=2)
    assert torch.equal(initial_value(name, (9, 5), seed=2, rows=range(3, 7)), whole[3:7])
    assert initial_value(name, (9, 5), seed=2, rows=[]).shape == (0, 5)


def test_positions_are_distinct_and_of_known_values():
    positions = sincos_positions(8, 3)
    assert positions.shape == (1, 9, 8)
    row, column = 2, 1  # frequencies 1 and 0.01
    expected = [f(p * w) for p in (column, row) for f in (math.sin, math.cos) for w in (1, 0.01)]
    assert positions[0, row * 3 + column].tolist() == pytest.approx(expected, abs=1e-7)
    assert len(torch.unique(positions[0], dim=0)) == 9


# ---- the function


def test_an_image_does_not_depend_on_its_batch():
    model = randomised(SMALL)
    x, t, y = inputs(SMALL)
    alone = torch.cat([model(x[i : i + 1], t[i : i + 1], y[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(model(x, t, y), alone, rtol=1e-5, atol=1e-5)


def test_time_class_and_null_class_matter():
    model = randomised(SMALL)
    x = inputs(SMALL, batch=1)[0].expand(6, -1, -1, -1)
    t, y = torch.tensor([0.0, 1.0, 0.5, 0.5, 0.5, 0.501]), torch.tensor([0, 0, 0, 3, 4, 0])
    outputs = model(x, t, y)
    assert len(torch.unique(outputs.flatten(1), dim=0)) == 6


def test_every_parameter_gets_a_gradient():
    model = randomised(SMALL)
    model(*inputs(SMALL)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_bf16_model_keeps_the_time_embedding_in_float32():
    """In bf16, t = 0.998 and t = 1 are one number; the angles must be made before the cast."""
    model = randomised(SMALL).bfloat16()
    x = inputs(SMALL, batch=1)[0].bfloat16().expand(2, -1, -1, -1)
    output = model(x, torch.tensor([0.998, 1.0]), torch.tensor([0, 0]))
    assert output.dtype == torch.bfloat16 and not torch.equal(output[0], output[1])


@pytest.mark.parametrize(
    ("image_size", "in_channels", "patch_size", "num_classes"), [(7, 1, 7, 1), (28, 1, 4, 10), (20, 3, 2, 1000)]
)
def test_any_size_channels_and_classes(image_size, in_channels, patch_size, num_classes):
    config = DiTConfig(image_size, in_channels, patch_size, 8, depth=1, num_heads=2, num_classes=num_classes)
    x, t, y = inputs(config, batch=2)
    assert randomised(config)(x, t, y).shape == x.shape


# ---- bad input


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_size": 29, "patch_size": 4}, "29 .* 4.* 28 and 32"),
        ({"image_size": 3, "patch_size": 4}, "nearest valid sizes are 4$"),
        ({"hidden_size": 100, "num_heads": 3}, "100 .* 3 .* 96 and 108"),
        ({"hidden_size": 6, "num_heads": 2}, "4 and 8"),
        ({"depth": 0}, "depth is 0"),
        ({"num_classes": -1}, "num_classes is -1"),
        ({"num_classes": 0}, "num_classes is 0; .* or caption_dim given"),
        ({"caption_dim": 8}, "num_classes is 4 and caption_dim 8; .* set num_classes to 0"),
        ({"num_classes": 0, "caption_dim": 0}, "caption_dim is 0"),
        ({"positions": "rope", "hidden_size": 16, "num_heads": 8}, "16 isn't a multiple of 4 times num_heads 8"),
        ({"positions": "rotary"}, "positions is 'rotary'; it must be 'sincos' or 'rope'"),
        ({"mlp": "relu"}, "mlp is 'relu'"),
        ({"freq_shift": 2}, "freq_shift is 2"),
        ({"mlp_ratio": 0.0}, "mlp_ratio is 0"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio is nan; it must be finite"),
        ({"mlp_ratio": float("inf")}, "mlp_ratio is inf; it must be finite"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_the_way_out(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **changes)


def test_images_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 1, 6, 6\).*\(B, 2, 6, 6\)"):
        DiT(SMALL)(torch.zeros(2, 1, 6, 6), torch.zeros(2), torch.zeros(2, dtype=torch.int64))
