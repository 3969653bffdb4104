"""The Diffusion Transformer with adaLN-zero, whole and readable in one sitting.

Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", arXiv:2212.09748. The parameters have the names
and shapes of the published model, so its weights fit. What a block computes from the tokens x and the condition c:

    shift, scale, gate, shift', scale', gate' = Linear(SiLU(c)), six vectors for each image
    x <- x + gate  * Attention(LayerNorm(x) * (1 + scale)  + shift)
    x <- x + gate' * MLP      (LayerNorm(x) * (1 + scale') + shift')

Options, off by default, are in :class:`DiTConfig`: normalised queries and keys, rotary positions, SwiGLU, captions.

Legend: B batch, C channels, H height, W width, T tokens, D width of the model, P patch size, N heads, K head width,
E width of a caption's embedding.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rowdit.models.config import TIME_FREQUENCIES, DiTConfig
from rowdit.models.init import sincos_positions, write_initial_value_

__all__ = ["TIME_FREQUENCIES", "TIME_SCALE", "DiT", "DiTBlock", "DiTConfig"]

TIME_SCALE = 1000.0  # t in [0, 1] becomes 0..1000, the range that the embedding's frequencies were made for


class DiT(nn.Module):
    """Velocity of an image's path: (x_BCHW, t_B, y_B) -> v_BCHW.

    The initial weights are a function of ``seed`` and the configuration; torch's global generator is neither read nor
    moved. Under ``with torch.device("meta")`` nothing is allocated: call ``to_empty(device=...)``, then
    ``init_weights(seed)``.

    Example:
        >>> model = DiT(DiTConfig(8, 1, 2, hidden_size=16, depth=1, num_heads=2, num_classes=10))
        >>> model(torch.zeros(3, 1, 8, 8), torch.rand(3), torch.tensor([0, 9, 10])).shape
        torch.Size([3, 1, 8, 8])
    """

    pos_embed: Tensor | None

    def __init__(self, config: DiTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        D = config.hidden_size
        device = torch.get_default_device()
        with torch.device("meta"):  # so that torch's own initialisation costs nothing and draws nothing
            self.x_embedder = PatchEmbed(config)
            self.t_embedder = TimeEmbedder(D, config.freq_shift)
            self.y_embedder: nn.Module = (
                ClassEmbedder(config.num_classes, D)
                if config.caption_dim is None
                else CaptionEmbedder(config.caption_dim, D)
            )
            rotates = config.positions == "rope"
            self.register_buffer("pos_embed", None if rotates else torch.empty(1, config.num_tokens, D))
            self.blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.depth))
            self.final_layer = FinalLayer(config)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights(seed)

    def forward(self, x: Tensor, t: Tensor, y: Tensor, *, all_channels: bool = False) -> Tensor:
        """Predicted velocity.

        Args:
            x: (B, C, H, W) noisy images.
            t: (B,) in [0, 1], 0 data and 1 noise; scaled by 1000 inside, for the sinusoidal embedding alone.
            y: (B,) int64 classes, num_classes for none. Not checked here, that would read back from the device: call
                :func:`rowdit.models.check_labels` once. With caption_dim: (B, E) embeddings, zeros for none.
            all_channels: with learn_sigma the C channels of the variance too, behind the others.

        Returns:
            (B, C, H, W); (B, out_channels, H, W) if all are asked for.

        Raises:
            ValueError: images of another shape than the configuration's.
        """
        config = self.config
        if x.shape[1:] != (config.in_channels, config.image_size, config.image_size):
            raise ValueError(
                f"images have shape {tuple(x.shape)}; this model needs "
                f"(B, {config.in_channels}, {config.image_size}, {config.image_size})"
            )
        c_BD = self.t_embedder(t) + self.y_embedder(y)
        x_BTD = self.x_embedder(x)
        rotation_2TK = None
        if self.pos_embed is None:
            rotation_2TK = rotation(config.side, config.head_dim, x.device)
        else:
            x_BTD = x_BTD + self.pos_embed
        for block in self.blocks:
            x_BTD = block(x_BTD, c_BD) if rotation_2TK is None else block(x_BTD, c_BD, rotation_2TK)
        out_BCHW = self.final_layer(x_BTD, c_BD)
        return out_BCHW if all_channels else out_BCHW[:, : config.in_channels]

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Write the initial weights (:func:`initial_value`) and the fixed positions, in place; of sharded parameters
        the rows that are here, so that every number of ranks starts from the same weights."""
        for name, parameter in self.named_parameters():
            write_initial_value_(parameter, name, seed)
        self.init_buffers()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Write what is fixed and not learnt; enough where weights are loaded next."""
        if self.pos_embed is not None:
            self.pos_embed.copy_(sincos_positions(self.config.hidden_size, self.config.side))


class DiTBlock(nn.Module):
    """Attention and MLP, each modulated and gated by the condition."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.norm1 = nn.LayerNorm(D, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(D, config.num_heads, config.qk_norm)
        self.norm2 = nn.LayerNorm(D, elementwise_affine=False, eps=1e-6)
        self.mlp: nn.Module = Mlp(D, config.mlp_size) if config.mlp == "gelu" else SwiGlu(D, config.mlp_size)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))

    def forward(self, x_BTD: Tensor, c_BD: Tensor, rotation_2TK: Tensor | None = None) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c_BD).unsqueeze(1).chunk(6, dim=-1)
        x_BTD = torch.addcmul(x_BTD, gate1, self.attn(modulate(self.norm1(x_BTD), shift1, scale1), rotation_2TK))
        return torch.addcmul(x_BTD, gate2, self.mlp(modulate(self.norm2(x_BTD), shift2, scale2)))


class Attention(nn.Module):
    """Softmax attention of all tokens with all; qkv is one matrix, its rows ordered q, k, v."""

    def __init__(self, hidden_size: int, num_heads: int, qk_norm: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.q_norm: nn.Module = nn.RMSNorm(hidden_size // num_heads, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = nn.RMSNorm(hidden_size // num_heads, eps=1e-6) if qk_norm else nn.Identity()
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x_BTD: Tensor, rotation_2TK: Tensor | None = None) -> Tensor:
        B, T, D = x_BTD.shape
        q_BNTK, k_BNTK, v_BNTK = self.qkv(x_BTD).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q_BNTK, k_BNTK = self.q_norm(q_BNTK), self.k_norm(k_BNTK)
        if rotation_2TK is not None:
            q_BNTK, k_BNTK = rotate(q_BNTK, rotation_2TK), rotate(k_BNTK, rotation_2TK)
        out_BNTK = F.scaled_dot_product_attention(q_BNTK, k_BNTK, v_BNTK)
        return self.proj(out_BNTK.transpose(1, 2).reshape(B, T, D))


class Mlp(nn.Module):
    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, mlp_size)
        self.fc2 = nn.Linear(mlp_size, hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_BTD), approximate="tanh"))


class SwiGlu(nn.Module):
    """silu(W1 x) * W2 x, then W3. Three matrices, not a fused pair: each is one matrix to Muon."""

    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden_size, mlp_size)
        self.w2 = nn.Linear(hidden_size, mlp_size)
        self.w3 = nn.Linear(mlp_size, hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w3(F.silu(self.w1(x_BTD)) * self.w2(x_BTD))


class PatchEmbed(nn.Module):
    """Patches to tokens, row by row; ``proj`` has a convolution's weight (D, C, P, P), applied as a matrix."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        P = config.patch_size
        self.proj = nn.Conv2d(config.in_channels, config.hidden_size, kernel_size=P, stride=P)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.proj(x_BCHW).flatten(2).transpose(1, 2)


class TimeEmbedder(nn.Module):
    """Sines and cosines of 1000 t at 128 frequencies from 1 down to 1e-4, then an MLP."""

    def __init__(self, hidden_size: int, shift: int = 0) -> None:
        super().__init__()
        self.shift = shift
        self.mlp = nn.Sequential(
            nn.Linear(TIME_FREQUENCIES, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )

    def forward(self, t_B: Tensor) -> Tensor:
        half = TIME_FREQUENCIES // 2
        rate = -math.log(10_000) / (half - self.shift)
        frequencies = torch.exp(rate * torch.arange(half, dtype=torch.float32, device=t_B.device))
        angles = TIME_SCALE * t_B.float()[:, None] * frequencies  # float32 always: bf16 can't tell 998 from 1000
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1).to(next(self.parameters()).dtype))


class ClassEmbedder(nn.Module):
    """One row for each class and one, the last, for none."""

    def __init__(self, num_classes: int, hidden_size: int) -> None:
        super().__init__()
        # Given a weight, torch draws none: even on the meta device a draw would import its compiler, a second or two.
        table = torch.empty(num_classes + 1, hidden_size)
        self.embedding_table = nn.Embedding(num_classes + 1, hidden_size, _weight=table)

    def forward(self, y_B: Tensor) -> Tensor:
        return self.embedding_table(y_B)


class CaptionEmbedder(nn.Module):
    """An MLP of a caption's embedding; a learned embedding takes the place of one that is all zeros, "no caption"."""

    def __init__(self, caption_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.null_embedding = nn.Parameter(torch.empty(caption_dim))
        self.mlp = nn.Sequential(nn.Linear(caption_dim, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size))

    def forward(self, y_BE: Tensor) -> Tensor:
        given_B1 = y_BE.ne(0).any(dim=-1, keepdim=True)
        return self.mlp(torch.where(given_B1, y_BE.to(self.null_embedding.dtype), self.null_embedding))


class FinalLayer(nn.Module):
    """Tokens to the image: modulated norm, linear layer, patches put in their places."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        D = config.hidden_size
        self.norm_final = nn.LayerNorm(D, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(D, config.patch_size**2 * config.out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 2 * D))

    def forward(self, x_BTD: Tensor, c_BD: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c_BD).unsqueeze(1).chunk(2, dim=-1)
        patches = self.linear(modulate(self.norm_final(x_BTD), shift, scale))
        P, C, side = self.config.patch_size, self.config.out_channels, self.config.side
        # Within a patch the channels come last, the velocity's before the variance's.
        patches = patches.view(-1, side, side, P, P, C)
        return patches.permute(0, 5, 1, 3, 2, 4).reshape(-1, C, side * P, side * P)


def rotation(side: int, head_dim: int, device: torch.device) -> Tensor:
    """Cosines and sines by which heads are rotated: half of the pairs by the token's row, half by its column.

    Frequencies are 100^(-i / n), i < n = head_dim / 4: a token's place is at most some tens, not tens of thousands.

    Returns:
        (2, side^2, head_dim / 2) float32, tokens row by row.
    """
    quarter = head_dim // 4
    frequencies = 100.0 ** (-torch.arange(quarter, dtype=torch.float32, device=device) / quarter)
    angles = torch.arange(side, dtype=torch.float32, device=device)[:, None] * frequencies
    angles_TK = torch.cat([angles.repeat_interleave(side, dim=0), angles.repeat(side, 1)], dim=1)
    return torch.stack([angles_TK.cos(), angles_TK.sin()])


def rotate(x_BNTK: Tensor, rotation_2TK: Tensor) -> Tensor:
    """Element i of a head and element i + K / 2 are a pair, each turned by its own angle."""
    cos, sin = rotation_2TK.to(x_BNTK.dtype)
    first, second = x_BNTK.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def modulate(x_BTD: Tensor, shift_B1D: Tensor, scale_B1D: Tensor) -> Tensor:
    """x * (1 + scale) + shift, each image by its own two vectors."""
    return torch.addcmul(shift_B1D, x_BTD, 1 + scale_B1D)
