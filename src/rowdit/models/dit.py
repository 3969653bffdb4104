"""The Diffusion Transformer with adaLN-zero, whole and readable in one sitting.

Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", arXiv:2212.09748. The parameters have the names
and shapes of the published model, so its weights fit. What a block computes from the tokens x and the condition c:

    shift, scale, gate, shift', scale', gate' = Linear(SiLU(c)), six vectors for each image
    x <- x + gate  * Attention(LayerNorm(x) * (1 + scale)  + shift)
    x <- x + gate' * MLP      (LayerNorm(x) * (1 + scale') + shift')

Legend: B batch, C channels, H height, W width, T tokens, D width of the model, P patch size, N heads, K head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rowdit.models.init import sincos_positions, write_initial_value_

TIME_FREQUENCIES = 256  # width of the sinusoidal time embedding
TIME_SCALE = 1000.0  # t in [0, 1] becomes 0..1000, the range that the embedding's frequencies were made for


@dataclass(frozen=True)
class DiTConfig:
    """The shape of a DiT.

    Args:
        image_size: height and width of the (latent) image, in pixels.
        in_channels: channels of the image.
        patch_size: height and width of a patch; must divide image_size.
        hidden_size: width D; a multiple of num_heads and of 4 (two axes of sines and cosines).
        depth: number of blocks.
        num_heads: attention heads.
        num_classes: classes 0 .. num_classes - 1; the class table has one more row, the null class num_classes.
        mlp_ratio: width of the MLP over D.
        learn_sigma: as in the published checkpoints, the final layer also gives C channels for a variance. The flow has
            no use for them: forward computes the C velocity channels alone. False leaves the parameters out.

    Raises:
        ValueError: sizes that don't fit together, with the nearest that do.
    """

    image_size: int
    in_channels: int
    patch_size: int
    hidden_size: int
    depth: int
    num_heads: int
    num_classes: int
    mlp_ratio: float = 4.0
    learn_sigma: bool = False

    def __post_init__(self) -> None:
        for name in ("image_size", "in_channels", "patch_size", "hidden_size", "depth", "num_heads", "num_classes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not math.isfinite(self.mlp_ratio) or self.mlp_size < 1:
            raise ValueError(f"mlp_ratio is {self.mlp_ratio}; it must be finite, and hidden_size times it >= 1")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} isn't divisible by patch_size {self.patch_size}; "
                f"the nearest valid sizes are {_nearest_multiples(self.image_size, self.patch_size)}"
            )
        step = math.lcm(self.num_heads, 4)
        if self.hidden_size % step:
            raise ValueError(
                f"hidden_size {self.hidden_size} isn't a multiple of num_heads {self.num_heads} and of 4; "
                f"the nearest valid widths are {_nearest_multiples(self.hidden_size, step)}"
            )

    @property
    def side(self) -> int:
        """Tokens along one side of the image."""
        return self.image_size // self.patch_size

    @property
    def num_tokens(self) -> int:
        return self.side**2

    @property
    def mlp_size(self) -> int:
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def patch_dim(self) -> int:
        """Numbers in one patch of the image: C P^2."""
        return self.in_channels * self.patch_size**2


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

    pos_embed: Tensor

    def __init__(self, config: DiTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        D = config.hidden_size
        device = torch.get_default_device()
        with torch.device("meta"):  # so that torch's own initialisation costs nothing and draws nothing
            self.x_embedder = PatchEmbed(config)
            self.t_embedder = TimeEmbedder(D)
            self.y_embedder = ClassEmbedder(config.num_classes, D)
            self.register_buffer("pos_embed", torch.empty(1, config.num_tokens, D))
            self.blocks = nn.ModuleList(DiTBlock(D, config.num_heads, config.mlp_size) for _ in range(config.depth))
            self.final_layer = FinalLayer(config)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights(seed)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predicted velocity.

        Args:
            x: (B, C, H, W) noisy images.
            t: (B,) in [0, 1], 0 data and 1 noise; scaled by 1000 inside, for the sinusoidal embedding alone.
            y: (B,) int64 classes, num_classes for none. Not checked here, that would read back from the device: call
                :func:`rowdit.models.check_labels` once.

        Returns:
            (B, C, H, W).

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
        x_BTD = self.x_embedder(x) + self.pos_embed
        for block in self.blocks:
            x_BTD = block(x_BTD, c_BD)
        return self.final_layer(x_BTD, c_BD)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Write the initial weights (:func:`initial_value`) and the fixed positions, in place; of sharded parameters
        the rows that are here, so that every number of ranks starts from the same weights."""
        for name, parameter in self.named_parameters():
            write_initial_value_(parameter, name, seed)
        self.pos_embed.copy_(sincos_positions(self.config.hidden_size, self.config.side))


class DiTBlock(nn.Module):
    """Attention and MLP, each modulated and gated by the condition."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_size: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(hidden_size, num_heads)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(hidden_size, mlp_size)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x_BTD: Tensor, c_BD: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c_BD).unsqueeze(1).chunk(6, dim=-1)
        x_BTD = torch.addcmul(x_BTD, gate1, self.attn(modulate(self.norm1(x_BTD), shift1, scale1)))
        return torch.addcmul(x_BTD, gate2, self.mlp(modulate(self.norm2(x_BTD), shift2, scale2)))


class Attention(nn.Module):
    """Softmax attention of all tokens with all; qkv is one matrix, its rows ordered q, k, v."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q_BNTK, k_BNTK, v_BNTK = self.qkv(x_BTD).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        out_BNTK = F.scaled_dot_product_attention(q_BNTK, k_BNTK, v_BNTK)
        return self.proj(out_BNTK.transpose(1, 2).reshape(B, T, D))


class Mlp(nn.Module):
    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, mlp_size)
        self.fc2 = nn.Linear(mlp_size, hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_BTD), approximate="tanh"))


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

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(TIME_FREQUENCIES, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )

    def forward(self, t_B: Tensor) -> Tensor:
        half = TIME_FREQUENCIES // 2
        frequencies = torch.exp(-math.log(10_000) / half * torch.arange(half, dtype=torch.float32, device=t_B.device))
        angles = TIME_SCALE * t_B.float()[:, None] * frequencies  # float32 always: bf16 can't tell 998 from 1000
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1).to(next(self.parameters()).dtype))


class ClassEmbedder(nn.Module):
    """One row for each class and one, the last, for none."""

    def __init__(self, num_classes: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, hidden_size)

    def forward(self, y_B: Tensor) -> Tensor:
        return self.embedding_table(y_B)


class FinalLayer(nn.Module):
    """Tokens to the image: modulated norm, linear layer, patches put in their places."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        D = config.hidden_size
        self.norm_final = nn.LayerNorm(D, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(D, config.patch_dim * (2 if config.learn_sigma else 1))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 2 * D))

    def forward(self, x_BTD: Tensor, c_BD: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c_BD).unsqueeze(1).chunk(2, dim=-1)
        patches = self.linear(modulate(self.norm_final(x_BTD), shift, scale))
        P, C, side = self.config.patch_size, self.config.in_channels, self.config.side
        # Within a patch the channels come last, the velocity's before the variance's.
        patches = patches.view(-1, side, side, P, P, patches.shape[-1] // P**2)[..., :C]
        return patches.permute(0, 5, 1, 3, 2, 4).reshape(-1, C, side * P, side * P)


def modulate(x_BTD: Tensor, shift_B1D: Tensor, scale_B1D: Tensor) -> Tensor:
    """x * (1 + scale) + shift, each image by its own two vectors."""
    return torch.addcmul(shift_B1D, x_BTD, 1 + scale_B1D)


def _nearest_multiples(value: int, step: int) -> str:
    below, above = value // step * step, (value // step + 1) * step
    return f"{below} and {above}" if below else f"{above}"
