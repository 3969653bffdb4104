"""DINOv2's transformer: names, shapes and count of the published file, and a step-by-step float64 reference.

The published weights can't be had in a test, so no published FD-DINOv2 is reproduced here; docs/evaluate.md says so.
"""

from __future__ import annotations

import math

import pytest
import torch

from rowdit.evaluate.dinov2 import WEIGHTS, DINOv2, DINOv2Features, ViTConfig, load_dinov2, prepare

SMALL = ViTConfig(width=16, depth=2, num_heads=2, patch_size=4, positions_side=5)


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in DINOv2(SMALL).state_dict().items()}
    return {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_names_shapes_and_count():
    """304,368,640 parameters is what is published for the backbone of ViT-L/14."""
    with torch.device("meta"):
        network = DINOv2(ViTConfig())
    assert sum(p.numel() for p in network.parameters()) == 304_368_640
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    assert len(shapes) == 3 + 2 + 24 * 14 + 2
    assert shapes["pos_embed"] == (1, 1370, 1024) and shapes["cls_token"] == (1, 1, 1024)
    assert shapes["mask_token"] == (1, 1024) and shapes["patch_embed.proj.weight"] == (1024, 3, 14, 14)
    assert shapes["blocks.23.attn.qkv.weight"] == (3072, 1024) and shapes["blocks.0.ls1.gamma"] == (1024,)
    assert shapes["blocks.7.mlp.fc2.weight"] == (1024, 4096) and shapes["norm.bias"] == (1024,)


def layer_norm(x, weight, bias):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt() * weight + bias


def cubic(distance: float) -> float:
    """The bicubic kernel with a = -0.75."""
    a, d = -0.75, abs(distance)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


def interpolated(grid: torch.Tensor, side: int) -> torch.Tensor:
    """(S, S, D) to (side, side, D), output pixel i at (i + 0.5) / ((side + 0.1) / S) - 0.5, edges repeated."""
    stored = len(grid)
    out = torch.zeros(side, side, grid.shape[-1], dtype=torch.float64)
    for i in range(side):
        for j in range(side):
            y, x = ((k + 0.5) * stored / (side + 0.1) - 0.5 for k in (i, j))
            for p in range(math.floor(y) - 1, math.floor(y) + 3):
                for q in range(math.floor(x) - 1, math.floor(x) + 3):
                    value = grid[min(max(p, 0), stored - 1), min(max(q, 0), stored - 1)].double()
                    out[i, j] += cubic(y - p) * cubic(x - q) * value
    return out


def slow_dinov2(w: dict[str, torch.Tensor], image: torch.Tensor, config: ViTConfig) -> torch.Tensor:
    """(3, H, W) to (D,), token by token and head by head."""
    w = {name: tensor.double() for name, tensor in w.items()}
    P, side, heads = config.patch_size, image.shape[-1] // config.patch_size, config.num_heads
    positions = w["pos_embed"][0, 1:].view(config.positions_side, config.positions_side, -1)
    if side != config.positions_side:
        positions = interpolated(positions, side)
    tokens = [w["cls_token"][0, 0] + w["pos_embed"][0, 0]]
    for i in range(side):
        for j in range(side):
            patch = image[:, i * P : (i + 1) * P, j * P : (j + 1) * P].double()
            token = (w["patch_embed.proj.weight"] * patch).sum((1, 2, 3)) + w["patch_embed.proj.bias"]
            tokens.append(token + positions[i, j])
    x = torch.stack(tokens)
    for block in range(config.depth):
        b = {name.removeprefix(f"blocks.{block}."): v for name, v in w.items() if name.startswith(f"blocks.{block}.")}
        y = layer_norm(x, b["norm1.weight"], b["norm1.bias"]) @ b["attn.qkv.weight"].T + b["attn.qkv.bias"]
        q, k, v = y.chunk(3, dim=-1)
        width = q.shape[-1] // heads
        out = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            scores = q[:, part] @ k[:, part].T / math.sqrt(width)
            out.append(torch.softmax(scores, dim=-1) @ v[:, part])
        x = x + b["ls1.gamma"] * (torch.cat(out, -1) @ b["attn.proj.weight"].T + b["attn.proj.bias"])
        y = layer_norm(x, b["norm2.weight"], b["norm2.bias"]) @ b["mlp.fc1.weight"].T + b["mlp.fc1.bias"]
        y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        x = x + b["ls2.gamma"] * (y @ b["mlp.fc2.weight"].T + b["mlp.fc2.bias"])
    return layer_norm(x, w["norm.weight"], w["norm.bias"])[0]


@pytest.mark.parametrize("side", [5, 3, 2, 7])
def test_token_by_token(state, side):
    """At the stored number of patches, and at fewer and more: positions interpolated."""
    images = torch.randn(2, 3, 4 * side, 4 * side, generator=torch.Generator().manual_seed(1))
    expected = torch.stack([slow_dinov2(state, image, SMALL) for image in images])
    # In float64 nothing hides behind rounding: not another GELU, which differs by some 1e-4.
    got = load_dinov2(state, SMALL).double()(images.double())
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(load_dinov2(state, SMALL)(images).double(), expected, rtol=1e-4, atol=1e-4)


def test_the_tenth_in_the_factor_is_seen(state):
    """Without it the positions of 3 x 3 patches would be others: the reference above would tell."""
    positions = load_dinov2(state, SMALL).positions(3)[0, 1:].view(3, 3, -1)
    grid = state["pos_embed"][:, 1:].view(1, 5, 5, -1).permute(0, 3, 1, 2)
    plain = torch.nn.functional.interpolate(grid, size=(3, 3), mode="bicubic")[0].permute(1, 2, 0)
    assert (positions - plain).abs().max() > 1e-2
    torch.testing.assert_close(positions.double(), interpolated(grid[0].permute(1, 2, 0), 3), rtol=1e-4, atol=1e-5)


def test_the_published_shape_at_224_pixels():
    with torch.device("meta"):
        network = DINOv2(ViTConfig())
    assert network(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1024)
    assert network.positions(16).shape == (1, 257, 1024)


def test_preparation():
    images = torch.tensor([0, 100, 255], dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 1, 224, 224)
    x = prepare(images)
    assert x.shape == (3, 3, 224, 224)
    for value, row in zip((0, 100, 255), x[:, :, 7, 9].tolist(), strict=True):
        expected = [(value / 255 - m) / s for m, s in zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)]
        assert row == pytest.approx(expected, abs=1e-6)
    generator = torch.Generator().manual_seed(0)
    large = torch.randint(0, 256, (1, 3, 448, 300), generator=generator, dtype=torch.uint8)
    assert prepare(large).shape == (1, 3, 224, 224)
    # Antialiased: the means of noise have a much smaller spread than noise.
    assert prepare(large).std() < 0.6 * prepare(large[..., :224, :224]).std()


def test_weights_that_are_missing_or_others(tmp_path, monkeypatch, state):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"1218 MB.*--weights, or fetch it with --download"):
        DINOv2Features()
    path = tmp_path / "other.pth"
    torch.save(state, path)
    with pytest.raises(ValueError, match=f"isn't the published {WEIGHTS.name}"):
        DINOv2Features(weights=path)
    with pytest.raises(ValueError, match="aren't the weights of DINOv2"):
        load_dinov2({name: tensor for name, tensor in state.items() if name != "blocks.1.ls2.gamma"}, SMALL)
