"""A slow float64 DiT for one image, straight from the paper's figure, by the names of the published parameters.

Source: arXiv:2212.09748; options from arXiv:2302.05442 (normalised queries and keys), arXiv:2104.09864 (rotations) and
arXiv:2002.05202 (SwiGLU).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rowdit.models import DiTConfig

State = dict[str, Tensor]


def norm(rows: Tensor) -> Tensor:
    centred = rows - rows.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()


def silu(v: Tensor) -> Tensor:
    return v / (1 + (-v).exp())


def gelu(v: Tensor) -> Tensor:
    return v / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


def linear(state: State, name: str, v: Tensor) -> Tensor:
    return v @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def condition(state: State, config: DiTConfig, t: float, y: Tensor) -> Tensor:
    angles = [1000 * t * 10_000 ** (-i / (128 - config.freq_shift)) for i in range(128)]
    embedding = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles], dtype=torch.float64)
    c = linear(state, "t_embedder.mlp.2", silu(linear(state, "t_embedder.mlp.0", embedding)))
    if config.caption_dim is None:
        return c + state["y_embedder.embedding_table.weight"][int(y)]
    caption = y.double() if y.any() else state["y_embedder.null_embedding"]
    return c + linear(state, "y_embedder.mlp.2", silu(linear(state, "y_embedder.mlp.0", caption)))


def turned(vector: Tensor, row: int, column: int) -> Tensor:
    """Pairs (i, i + K/2) of a head's vector turned: the first quarter of K by the row, the second by the column."""
    half, quarter = len(vector) // 2, len(vector) // 4
    out = vector.clone()
    for i in range(half):
        angle = (row if i < quarter else column) * 100 ** (-(i % quarter) / quarter)
        a, b = vector[i], vector[i + half]
        out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(state: State, config: DiTConfig, block: str, x: Tensor) -> Tensor:
    heads, side = config.num_heads, config.image_size // config.patch_size
    q, k, v = linear(state, f"{block}.attn.qkv", x).chunk(3, dim=1)
    outputs = []
    for q_h, k_h, v_h in zip(q.chunk(heads, 1), k.chunk(heads, 1), v.chunk(heads, 1), strict=True):
        if config.qk_norm:
            q_h = q_h / (q_h.square().mean(1, keepdim=True) + 1e-6).sqrt() * state[f"{block}.attn.q_norm.weight"]
            k_h = k_h / (k_h.square().mean(1, keepdim=True) + 1e-6).sqrt() * state[f"{block}.attn.k_norm.weight"]
        if config.positions == "rope":
            q_h = torch.stack([turned(vector, *divmod(i, side)) for i, vector in enumerate(q_h)])
            k_h = torch.stack([turned(vector, *divmod(i, side)) for i, vector in enumerate(k_h)])
        outputs.append(torch.softmax(q_h @ k_h.T / math.sqrt(q_h.shape[1]), dim=1) @ v_h)
    return linear(state, f"{block}.attn.proj", torch.cat(outputs, 1))


def reference(state: State, config: DiTConfig, image: Tensor, t: float, y: Tensor) -> Tensor:
    """All channels that the final layer gives, (out_channels, H, W) float64.

    Args:
        image: (C, H, W).
        t: in [0, 1].
        y: a class, or a caption's embedding.
    """
    state = {name: tensor.double() for name, tensor in state.items()}
    P, side = config.patch_size, config.image_size // config.patch_size
    c = condition(state, config, t, y)

    tokens = []
    for row in range(side):
        for column in range(side):
            patch = image.double()[:, row * P : (row + 1) * P, column * P : (column + 1) * P]
            tokens.append((state["x_embedder.proj.weight"] * patch).sum((1, 2, 3)) + state["x_embedder.proj.bias"])
    x = torch.stack(tokens)
    if config.positions == "sincos":
        x = x + state["pos_embed"][0]

    for i in range(config.depth):
        block = f"blocks.{i}"
        shift1, scale1, gate1, shift2, scale2, gate2 = linear(state, f"{block}.adaLN_modulation.1", silu(c)).chunk(6)
        x = x + gate1 * attention(state, config, block, norm(x) * (1 + scale1) + shift1)
        hidden = norm(x) * (1 + scale2) + shift2
        if config.mlp == "gelu":
            hidden = linear(state, f"{block}.mlp.fc2", gelu(linear(state, f"{block}.mlp.fc1", hidden)))
        else:
            gate, up = (linear(state, f"{block}.mlp.{name}", hidden) for name in ("w1", "w2"))
            hidden = linear(state, f"{block}.mlp.w3", silu(gate) * up)
        x = x + gate2 * hidden

    shift, scale = linear(state, "final_layer.adaLN_modulation.1", silu(c)).chunk(2)
    out = linear(state, "final_layer.linear", norm(x) * (1 + scale) + shift)
    channels = config.in_channels * (2 if config.learn_sigma else 1)
    image_out = torch.empty(channels, side * P, side * P, dtype=torch.float64)
    for token in range(side * side):
        row, column = divmod(token, side)
        patch = out[token].view(P, P, channels).permute(2, 0, 1)
        image_out[:, row * P : (row + 1) * P, column * P : (column + 1) * P] = patch
    return image_out
