"""DINOv2's Vision Transformer, ViT-L/14, whose class token gives the features of FD-DINOv2.

    tokens = [class, patches of 14 x 14] + positions
    x <- x + scale  * Attention(LayerNorm(x))
    x <- x + scale' * MLP(LayerNorm(x))          the two scales are learned vectors (LayerScale)
    features = LayerNorm(x)[class]

The parameters have the names of the published file. Its positions are those of 37 x 37 patches (518 pixels); for the
16 x 16 of 224 pixels they are interpolated as the published code does, by the factor (16 + 0.1) / 37, whose tenth
changes the result a little and is part of the network.

Source: Oquab et al., arXiv:2304.07193; as a metric: Stein et al., arXiv:2306.04675.

Legend: B images, T tokens, D width, N heads, K head width, P patch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rowdit.evaluate.features import check_images, full_float32
from rowdit.evaluate.weights import WeightsFile

WEIGHTS = WeightsFile(
    name="dinov2_vitl14_pretrain.pth",
    url="https://dl.fbaipublicfiles.com/dinov2/dinov2_vitl14/dinov2_vitl14_pretrain.pth",
    num_bytes=1_217_586_395,
    sha256="d5383ea8f4877b2472eb973e0fd72d557c7da5d3611bd527ceeb1d7162cbf428",
)
INPUT_SIZE = 224
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
NORM_EPS = 1e-6
POSITION_OFFSET = 0.1  # added to the number of patches a side when the positions are interpolated


@dataclass(frozen=True)
class ViTConfig:
    """The shape of a DINOv2 transformer; by default ViT-L/14."""

    width: int = 1024
    depth: int = 24
    num_heads: int = 16
    patch_size: int = 14
    positions_side: int = 37
    mlp_ratio: int = 4


class Attention(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q_BNTK, k_BNTK, v_BNTK = self.qkv(x_BTD).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        out_BNTK = F.scaled_dot_product_attention(q_BNTK, k_BNTK, v_BNTK)
        return self.proj(out_BNTK.transpose(1, 2).reshape(B, T, D))


class Mlp(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.mlp_ratio * config.width)
        self.fc2 = nn.Linear(config.mlp_ratio * config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_BTD)))


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * self.gamma


class Block(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=NORM_EPS)
        self.attn = Attention(config)
        self.ls1 = LayerScale(config.width)
        self.norm2 = nn.LayerNorm(config.width, eps=NORM_EPS)
        self.mlp = Mlp(config)
        self.ls2 = LayerScale(config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.ls1(self.attn(self.norm1(x_BTD)))
        return x_BTD + self.ls2(self.mlp(self.norm2(x_BTD)))


class PatchEmbed(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        P = config.patch_size
        self.proj = nn.Conv2d(3, config.width, kernel_size=P, stride=P)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.proj(x_BCHW).flatten(2).transpose(1, 2)


class DINOv2(nn.Module):
    """(B, 3, H, W) normalised images, H = W a multiple of the patch size, to (B, D): the normalised class token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + config.positions_side**2, config.width))
        self.mask_token = nn.Parameter(torch.zeros(1, config.width))  # of the training; in the file, and not used here
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=NORM_EPS)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        patches_BTD = self.patch_embed(x_BCHW)
        side = x_BCHW.shape[-1] // self.config.patch_size
        class_B1D = self.cls_token.expand(len(x_BCHW), -1, -1)
        x_BTD = torch.cat([class_B1D, patches_BTD], dim=1) + self.positions(side)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.norm(x_BTD[:, 0])

    def positions(self, side: int) -> Tensor:
        """(1, 1 + side^2, D): those of the file, or between them by bicubic interpolation."""
        stored = self.config.positions_side
        if side == stored:
            return self.pos_embed
        grid = self.pos_embed[:, 1:].view(1, stored, stored, -1).permute(0, 3, 1, 2)
        scale = (side + POSITION_OFFSET) / stored  # given as a factor, it is also what pixel centres are placed by
        grid = F.interpolate(grid, scale_factor=(scale, scale), mode="bicubic")
        if grid.shape[-2:] != (side, side):
            raise ValueError(f"{side} x {side} patches can't be interpolated from {stored} x {stored}")
        return torch.cat([self.pos_embed[:, :1], grid.permute(0, 2, 3, 1).reshape(1, side**2, -1)], dim=1)


def load_dinov2(state: dict[str, Tensor], config: ViTConfig) -> DINOv2:
    """The network with these weights, in eval mode, frozen, on the CPU.

    Raises:
        ValueError: names or shapes that aren't the network's.
    """
    with torch.device("meta"):
        network = DINOv2(config)
    try:
        network.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"these aren't the weights of DINOv2 ViT-L/14: {' '.join(str(error).split())}") from None
    return network.eval().requires_grad_(False)


class DINOv2Features:
    """The class token of DINOv2 ViT-L/14: 1,024 features.

    An image is resized to 224 x 224 in float32 (bicubic, half-pixel centres; antialiased along a side that shrinks; not
    rounded, not clipped), grey is repeated to RGB, and each channel x / 255 is normalised by ImageNet's mean and
    deviation. All in full float32.

    Args:
        device: where the network runs.
        batch_size: images a forward pass.
        weights: the weights file; by default where a download was put.

    Raises:
        FileNotFoundError: there are no weights; the message says how to get them.
        ValueError: the file isn't the published one.
    """

    name = "dinov2_vitl14"
    sha256 = WEIGHTS.sha256
    dim = ViTConfig().width
    input_size = INPUT_SIZE

    def __init__(
        self, device: str | torch.device = "cpu", *, batch_size: int = 32, weights: Path | None = None
    ) -> None:
        self.device, self.batch_size = torch.device(device), batch_size
        self._network = load_dinov2(WEIGHTS.load(weights), ViTConfig()).to(self.device)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return (N, 1024) float32 of (N, 1 or 3, H, W) uint8 images, on the network's device."""
        check_images(images)
        features = images.new_empty((len(images), self.dim), dtype=torch.float32, device=self.device)
        with full_float32(self.device):
            for start in range(0, len(images), self.batch_size):
                batch = images[start : start + self.batch_size].to(self.device)
                features[start : start + len(batch)] = self._network(prepare(batch))
        return features

    def fingerprint(self) -> dict[str, Any]:
        """Plain data that names the network, its weights and its preprocessing."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "layer": "class token, normalised",
            "dim": self.dim,
            "input_size": self.input_size,
            "resize": "bicubic, antialias, float32",
            "scale": "(x / 255 - mean) / std of ImageNet",
        }


def prepare(images_BCHW: Tensor) -> Tensor:
    """(B, 1 or 3, H, W) uint8 to what the network takes, (B, 3, 224, 224) float32."""
    x = images_BCHW.float()
    if x.shape[-2:] != (INPUT_SIZE, INPUT_SIZE):
        x = F.interpolate(x, size=(INPUT_SIZE, INPUT_SIZE), mode="bicubic", align_corners=False, antialias=True)
    mean = x.new_tensor(IMAGENET_MEAN)[:, None, None]
    std = x.new_tensor(IMAGENET_STD)[:, None, None]
    return (x.expand(-1, 3, -1, -1) / 255 - mean) / std
