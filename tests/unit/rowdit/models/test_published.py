"""Weights under other people's names give equal outputs here, and ours there. The weights are random."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reference.dit import reference
from rowdit.models import DiT, DiTConfig
from rowdit.models.published import (
    WeightsError,
    diffusers_model,
    from_diffusers,
    from_public,
    load_diffusers,
    published_time,
    read_weights,
    save_diffusers,
    to_diffusers,
    to_public,
)

CONFIG = DiTConfig(8, 4, 2, hidden_size=16, depth=2, num_heads=2, num_classes=5, learn_sigma=True)


def public_shapes(hidden: int = 16, depth: int = 2, channels: int = 4, patch: int = 2, classes: int = 5) -> dict:
    """Names and shapes of a public checkpoint, written down from its files."""
    shapes = {"pos_embed": (1, 16, hidden), "x_embedder.proj.weight": (hidden, channels, patch, patch)}
    shapes |= {"x_embedder.proj.bias": (hidden,), "y_embedder.embedding_table.weight": (classes + 1, hidden)}
    linears = {"t_embedder.mlp.0": (hidden, 256), "t_embedder.mlp.2": (hidden, hidden)}
    for i in range(depth):
        linears |= {
            f"blocks.{i}.attn.qkv": (3 * hidden, hidden),
            f"blocks.{i}.attn.proj": (hidden, hidden),
            f"blocks.{i}.mlp.fc1": (4 * hidden, hidden),
            f"blocks.{i}.mlp.fc2": (hidden, 4 * hidden),
            f"blocks.{i}.adaLN_modulation.1": (6 * hidden, hidden),
        }
    linears |= {
        "final_layer.linear": (patch**2 * 2 * channels, hidden),
        "final_layer.adaLN_modulation.1": (2 * hidden, hidden),
    }
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def public_state(**sizes: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    state = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in public_shapes(**sizes).items()}
    hidden = state["pos_embed"].shape[-1]
    positions = [[f(p / 10_000 ** (i / (hidden // 4))) for p in (column, row) for f in (math.sin, math.cos)
                  for i in range(hidden // 4)] for row in range(4) for column in range(4)]  # fmt: skip
    return state | {"pos_embed": torch.tensor([positions])}


def inputs(batch: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 4, 8, 8, generator=generator)
    return x, torch.tensor([0, 17, 500, 999]), torch.tensor([0, 4, 5, 2])


def random_model(config: DiTConfig) -> DiT:
    model = DiT(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


# ---- the public DiT


def test_public_weights_give_the_reference_outputs() -> None:
    state = public_state()
    model = from_public(state, num_heads=2)
    assert model.config == CONFIG
    x, k, y = inputs()
    got = model(x, published_time(k), y, all_channels=True)
    assert got.shape == (4, 8, 8, 8)
    for i in range(4):
        # float32 against float64, and angles up to 1000 in float32
        expected = reference(state, CONFIG, x[i], k[i].item() / 1000, y[i]).float()
        torch.testing.assert_close(got[i], expected, rtol=2e-3, atol=2e-3)


def test_to_public_and_back() -> None:
    model = random_model(CONFIG)
    state = to_public(model)
    assert {name: tuple(t.shape) for name, t in state.items()} == public_shapes()
    again = from_public(state, num_heads=2)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), state.values(), strict=True))


def test_published_widths_know_their_heads() -> None:
    state = {name: torch.zeros(shape) for name, shape in public_shapes(hidden=384, depth=1).items()}
    assert from_public(state).config.num_heads == 6


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda s: s.pop("blocks.1.mlp.fc2.bias"), r"missing \['blocks.1.mlp.fc2.bias'\]"),
        (lambda s: s.update(other=torch.zeros(1)), r"unexpected \['other'\]"),
        (lambda s: s.pop("x_embedder.proj.weight"), "x_embedder.proj.weight is missing"),
        (lambda s: s.update(pos_embed=torch.zeros(1, 15, 16)), "15 tokens"),
        (lambda s: s.update({"blocks.1.attn.qkv.bias": torch.zeros(7)}), r"blocks.1.attn.qkv.bias is \(7,\)"),
        (lambda s: s.update({"final_layer.linear.weight": torch.zeros(12, 16)}), "gives 3 channels"),
    ],
)
def test_public_weights_that_do_not_fit(spoil, words: str) -> None:
    state = public_state()
    spoil(state)
    with pytest.raises(WeightsError, match=words):
        from_public(state, num_heads=2)


def test_an_unknown_width_asks_for_the_heads() -> None:
    with pytest.raises(WeightsError, match=r"width 16 .* say num_heads"):
        from_public(public_state())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qk_norm": True}, "qk_norm = True"),
        ({"positions": "rope"}, "positions = 'rope'"),
        ({"mlp": "swiglu"}, "mlp = 'swiglu'"),
        ({"num_classes": 0, "caption_dim": 3}, "caption_dim = 3"),
    ],
)
def test_options_that_others_lack_are_refused(changes: dict, words: str) -> None:
    model = DiT(dataclasses.replace(CONFIG, **changes))
    with pytest.raises(WeightsError, match=words):
        to_public(model)
    with pytest.raises(WeightsError, match=words):
        to_diffusers(DiT(dataclasses.replace(CONFIG, **changes, freq_shift=1)))


# ---- files


def test_files_are_read_as_tensors_alone(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = public_state()
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "b.pt")
    torch.save({"ema": state, "model": {}, "steps": 3}, tmp_path / "c.pt")
    for name in ("a.safetensors", "b.pt", "c.pt"):
        found = read_weights(tmp_path / name)
        assert set(found) == set(state) and all(torch.equal(found[key], state[key]) for key in state)
    torch.save({"ema": state, "args": Path("x")}, tmp_path / "d.pt")
    with pytest.raises(WeightsError, match="d.pt can't be read as plain tensors"):
        read_weights(tmp_path / "d.pt")
    torch.save([1, 2], tmp_path / "e.pt")
    with pytest.raises(WeightsError, match="no table of tensors"):
        read_weights(tmp_path / "e.pt")


# ---- diffusers' real class


def transformer(**changes: object):
    diffusers = pytest.importorskip("diffusers")
    config = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2,
              "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 5, "norm_eps": 1e-6}  # fmt: skip
    model = diffusers.DiTTransformer2DModel(**{**config, **changes}).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".norm1.emb." in name and "blocks.0." not in name:
                continue
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        first = model.transformer_blocks[0].norm1.emb.state_dict()
        for block in model.transformer_blocks:
            block.norm1.emb.load_state_dict(first)
    return model


@torch.no_grad()
@pytest.mark.parametrize("out_channels", [4, 8])
def test_diffusers_weights_give_its_outputs(out_channels: int) -> None:
    theirs = transformer(out_channels=out_channels)
    ours = from_diffusers(theirs.state_dict(), theirs.config)
    x, k, y = inputs()
    expected = theirs(x, timestep=k, class_labels=y).sample
    got = ours(x, published_time(k), y, all_channels=True)
    # Angles up to 1000 in float32: k / 1000 and back is off by one unit in the last place, 6e-5 of an angle.
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    at_zero = ours(x, torch.zeros(4), y, all_channels=True)
    torch.testing.assert_close(at_zero, theirs(x, timestep=torch.zeros(4), class_labels=y).sample, rtol=1e-5, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("freq_shift", [0, 1])
def test_our_weights_give_our_outputs_in_diffusers(freq_shift: int) -> None:
    ours = random_model(dataclasses.replace(CONFIG, freq_shift=freq_shift))  # type: ignore[arg-type]
    pytest.importorskip("diffusers")
    theirs = diffusers_model(ours)
    x, k, y = inputs()
    got = theirs(x, timestep=1000 * published_time(k), class_labels=y).sample
    torch.testing.assert_close(got, ours(x, published_time(k), y, all_channels=True), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_folders_go_there_and_back(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    ours = random_model(dataclasses.replace(CONFIG, freq_shift=1))
    save_diffusers(ours, tmp_path / "ours")
    x, k, y = inputs()
    theirs = diffusers.DiTTransformer2DModel.from_pretrained(tmp_path / "ours").eval()
    expected = ours(x, published_time(k), y, all_channels=True)
    torch.testing.assert_close(theirs(x, timestep=k, class_labels=y).sample, expected, rtol=1e-3, atol=1e-3)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_diffusers(tmp_path / "theirs")
    assert again.config == ours.config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))


def test_what_diffusers_cannot_hold_or_we_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"freq_shift = 0: .*diffusers_model\(model\)"):
        to_diffusers(DiT(CONFIG))
    with pytest.raises(WeightsError, match="mlp_ratio = 2.0"):
        to_diffusers(DiT(dataclasses.replace(CONFIG, mlp_ratio=2.0, freq_shift=1)))
    config, state = to_diffusers(random_model(dataclasses.replace(CONFIG, freq_shift=1)))
    name = "transformer_blocks.1.norm1.emb.timestep_embedder.linear_1.weight"
    with pytest.raises(WeightsError, match="isn't the same in all blocks"):
        from_diffusers(state | {name: state[name] + 1}, config)
    with pytest.raises(WeightsError, match="activation_fn = 'geglu'"):
        from_diffusers(state, config | {"activation_fn": "geglu"})
    with pytest.raises(WeightsError, match="unexpected tensors: .*caption"):
        from_diffusers(state | {"caption.weight": torch.zeros(1)}, config)
    with pytest.raises(WeightsError, match="attn1.to_q.weight is missing"):
        from_diffusers({k: v for k, v in state.items() if "to_q" not in k}, config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="no config.json or no"):
        load_diffusers(tmp_path)
