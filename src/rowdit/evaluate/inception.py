"""The Inception-v3 of the Frechet Inception Distance: TensorFlow's graph of 2015, in torch.

It is not torchvision's Inception-v3. The weights are others; the average pools inside the blocks leave the padding out
of the mean; the last block pools by maximum; there are 1,008 classes. The parameters have torchvision's names, which
the published file uses. The FID's features are the 2,048 numbers before the classifier.

Source: Szegedy et al., arXiv:1512.00567 (the blocks); Heusel et al., arXiv:1706.08500 (the FID, on the graph
inception-2015-12-05); the weights in torch were published with mseitzer/pytorch-fid.

Legend: B images, C channels, H x W pixels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rowdit.evaluate.features import check_images, full_float32
from rowdit.evaluate.weights import WeightsFile

WEIGHTS = WeightsFile(
    name="pt_inception-2015-12-05-6726825d.pth",
    url="https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
    num_bytes=95_628_359,
    sha256="6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
)
INPUT_SIZE = 299
FEATURE_CHANNELS = 2048
NUM_CLASSES = 1008
BATCH_NORM_EPS = 1e-3

Pool = Literal["average", "max", "max_stride_2"]


class Conv(NamedTuple):
    """A convolution: its name in the block, its width, kernel and stride. At stride 1 the size is kept."""

    name: str
    out_channels: int
    kernel: int | tuple[int, int]
    stride: int = 1


class Block(NamedTuple):
    """Branches side by side, concatenated. A branch is a chain; a pair at its end are two convolutions of the same.

    The last branch begins with the pool, and has a convolution after it unless the block halves the size.
    """

    pool: Pool
    branches: tuple[tuple[Conv | tuple[Conv, Conv], ...], ...]


def _block_a(pool_channels: int) -> Block:
    return Block(
        "average",
        (
            (Conv("branch1x1", 64, 1),),
            (Conv("branch5x5_1", 48, 1), Conv("branch5x5_2", 64, 5)),
            (Conv("branch3x3dbl_1", 64, 1), Conv("branch3x3dbl_2", 96, 3), Conv("branch3x3dbl_3", 96, 3)),
            (Conv("branch_pool", pool_channels, 1),),
        ),
    )


def _block_c(width: int) -> Block:
    row, column = (1, 7), (7, 1)
    return Block(
        "average",
        (
            (Conv("branch1x1", 192, 1),),
            (Conv("branch7x7_1", width, 1), Conv("branch7x7_2", width, row), Conv("branch7x7_3", 192, column)),
            (
                Conv("branch7x7dbl_1", width, 1),
                Conv("branch7x7dbl_2", width, column),
                Conv("branch7x7dbl_3", width, row),
                Conv("branch7x7dbl_4", width, column),
                Conv("branch7x7dbl_5", 192, row),
            ),
            (Conv("branch_pool", 192, 1),),
        ),
    )


def _block_e(pool: Pool) -> Block:
    row, column = (1, 3), (3, 1)
    return Block(
        pool,
        (
            (Conv("branch1x1", 320, 1),),
            (Conv("branch3x3_1", 384, 1), (Conv("branch3x3_2a", 384, row), Conv("branch3x3_2b", 384, column))),
            (
                Conv("branch3x3dbl_1", 448, 1),
                Conv("branch3x3dbl_2", 384, 3),
                (Conv("branch3x3dbl_3a", 384, row), Conv("branch3x3dbl_3b", 384, column)),
            ),
            (Conv("branch_pool", 192, 1),),
        ),
    )


_BLOCK_B = Block(
    "max_stride_2",
    (
        (Conv("branch3x3", 384, 3, 2),),
        (Conv("branch3x3dbl_1", 64, 1), Conv("branch3x3dbl_2", 96, 3), Conv("branch3x3dbl_3", 96, 3, 2)),
        (),
    ),
)
_BLOCK_D = Block(
    "max_stride_2",
    (
        (Conv("branch3x3_1", 192, 1), Conv("branch3x3_2", 320, 3, 2)),
        (
            Conv("branch7x7x3_1", 192, 1),
            Conv("branch7x7x3_2", 192, (1, 7)),
            Conv("branch7x7x3_3", 192, (7, 1)),
            Conv("branch7x7x3_4", 192, 3, 2),
        ),
        (),
    ),
)
# name, input channels, block
BLOCKS = (
    ("Mixed_5b", 192, _block_a(32)),
    ("Mixed_5c", 256, _block_a(64)),
    ("Mixed_5d", 288, _block_a(64)),
    ("Mixed_6a", 288, _BLOCK_B),
    ("Mixed_6b", 768, _block_c(128)),
    ("Mixed_6c", 768, _block_c(160)),
    ("Mixed_6d", 768, _block_c(160)),
    ("Mixed_6e", 768, _block_c(192)),
    ("Mixed_7a", 768, _BLOCK_D),
    ("Mixed_7b", 1280, _block_e("average")),
    ("Mixed_7c", 2048, _block_e("max")),
)


class ConvNormReLU(nn.Module):
    """A convolution without bias, batch normalisation with fixed statistics, ReLU."""

    def __init__(self, in_channels: int, spec: Conv, *, keep_size: bool = True) -> None:
        super().__init__()
        height, width = (spec.kernel, spec.kernel) if isinstance(spec.kernel, int) else spec.kernel
        padding = (height // 2, width // 2) if keep_size and spec.stride == 1 else (0, 0)
        self.conv = nn.Conv2d(in_channels, spec.out_channels, (height, width), spec.stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(spec.out_channels, eps=BATCH_NORM_EPS)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x_BCHW)))


class Mixed(nn.Module):
    """One block of the table, its convolutions by their names."""

    def __init__(self, in_channels: int, block: Block) -> None:
        super().__init__()
        self.block = block
        for branch in block.branches:
            channels = in_channels
            for step in branch:
                for conv in step if isinstance(step[0], Conv) else (step,):
                    assert isinstance(conv, Conv)
                    self.add_module(conv.name, ConvNormReLU(channels, conv))
                    channels_after = conv.out_channels
                channels = channels_after

    def forward(self, x_BCHW: Tensor) -> Tensor:
        *branches, pool_branch = self.block.branches
        outputs = [self._follow(branch, x_BCHW) for branch in branches]
        return torch.cat([*outputs, self._follow(pool_branch, _pool(x_BCHW, self.block.pool))], dim=1)

    def _follow(self, branch: tuple[Conv | tuple[Conv, Conv], ...], x_BCHW: Tensor) -> Tensor:
        for step in branch:
            if isinstance(step, Conv):
                x_BCHW = self.get_submodule(step.name)(x_BCHW)
            else:
                x_BCHW = torch.cat([self.get_submodule(conv.name)(x_BCHW) for conv in step], dim=1)
        return x_BCHW


def _pool(x_BCHW: Tensor, pool: Pool) -> Tensor:
    if pool == "max_stride_2":
        return F.max_pool2d(x_BCHW, kernel_size=3, stride=2)
    if pool == "max":
        return F.max_pool2d(x_BCHW, kernel_size=3, stride=1, padding=1)
    return F.avg_pool2d(x_BCHW, kernel_size=3, stride=1, padding=1, count_include_pad=False)


class Inception(nn.Module):
    """(B, 3, 299, 299) float32 in [-1, 1] to (B, 2048) features; `fc` gives the 1,008 logits of them."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = ConvNormReLU(3, Conv("", 32, 3, 2))
        self.Conv2d_2a_3x3 = ConvNormReLU(32, Conv("", 32, 3), keep_size=False)
        self.Conv2d_2b_3x3 = ConvNormReLU(32, Conv("", 64, 3))
        self.Conv2d_3b_1x1 = ConvNormReLU(64, Conv("", 80, 1))
        self.Conv2d_4a_3x3 = ConvNormReLU(80, Conv("", 192, 3), keep_size=False)
        for name, in_channels, block in BLOCKS:
            self.add_module(name, Mixed(in_channels, block))
        self.fc = nn.Linear(FEATURE_CHANNELS, NUM_CLASSES)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x_BCHW)))
        x_BCHW = F.max_pool2d(x_BCHW, kernel_size=3, stride=2)
        x_BCHW = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x_BCHW))
        x_BCHW = F.max_pool2d(x_BCHW, kernel_size=3, stride=2)
        for name, _, _ in BLOCKS:
            x_BCHW = self.get_submodule(name)(x_BCHW)
        return x_BCHW.mean(dim=(2, 3))


def load_inception(state: dict[str, Tensor]) -> Inception:
    """The network with these weights, in eval mode, frozen, on the CPU.

    Raises:
        ValueError: names or shapes that aren't the network's.
    """
    # Files of another torch do or don't count batches, which eval mode doesn't read.
    weights = {name: tensor.float() for name, tensor in state.items() if not name.endswith("num_batches_tracked")}
    with torch.device("meta"):  # no first weights, so the global generator isn't moved
        network = Inception()
    counters = {name: torch.tensor(0) for name in network.state_dict() if name.endswith("num_batches_tracked")}
    try:
        network.load_state_dict(weights | counters, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"these aren't the weights of the FID's Inception: {' '.join(str(error).split())}") from None
    return network.eval().requires_grad_(False)


class InceptionFeatures:
    """The FID's features: 2,048 before the classifier.

    Grey is repeated to RGB. An image is resized to 299 x 299 in float32, not rounded, and scaled:

        "tensorflow"   bilinear as TensorFlow 1 did, pixel i at i * in / out, no antialiasing; (x - 128) / 128. What the
                       FID was defined with, and published ImageNet scores are made with
        "pytorch_fid"  bilinear with half-pixel centres, no antialiasing; 2 x / 255 - 1. What pytorch-fid does

    Scores of the two aren't to be compared, so they have names of their own. All in full float32.

    Args:
        device: where the network runs.
        batch_size: images a forward pass.
        weights: the weights file; by default where a download was put.
        resize: one of the above.

    Raises:
        FileNotFoundError: there are no weights; the message says how to get them.
        ValueError: the file isn't the published one.
    """

    sha256 = WEIGHTS.sha256
    dim = FEATURE_CHANNELS
    input_size = INPUT_SIZE

    def __init__(
        self,
        device: str | torch.device = "cpu",
        *,
        batch_size: int = 50,
        weights: Path | None = None,
        resize: Literal["tensorflow", "pytorch_fid"] = "tensorflow",
    ) -> None:
        if resize not in ("tensorflow", "pytorch_fid"):
            raise ValueError(f"resize is {resize!r}; it must be tensorflow or pytorch_fid")
        self.device, self.batch_size, self.resize = torch.device(device), batch_size, resize
        self.name = "inception" if resize == "tensorflow" else "inception_pytorch_fid"
        self._network = load_inception(WEIGHTS.load(weights)).to(self.device)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return (N, 2048) float32 of (N, 1 or 3, H, W) uint8 images, on the network's device."""
        check_images(images)
        features = images.new_empty((len(images), self.dim), dtype=torch.float32, device=self.device)
        with full_float32(self.device):
            for start in range(0, len(images), self.batch_size):
                batch = images[start : start + self.batch_size].to(self.device)
                features[start : start + len(batch)] = self._network(prepare(batch, self.resize))
        return features

    def fingerprint(self) -> dict[str, Any]:
        """Plain data that names the network, its weights and its preprocessing."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "layer": "pooled before classifier",
            "dim": self.dim,
            "input_size": self.input_size,
            "resize": f"bilinear, no antialias, float32, as {self.resize}",
            "scale": "(x - 128) / 128" if self.resize == "tensorflow" else "2 x / 255 - 1",
        }


def prepare(images_BCHW: Tensor, resize: str) -> Tensor:
    """(B, 1 or 3, H, W) uint8 to what the network takes, (B, 3, 299, 299) float32."""
    x = images_BCHW.float()
    if resize == "tensorflow":
        x = (resize_tensorflow_1(x, INPUT_SIZE) - 128) / 128
    else:
        x = F.interpolate(x / 255, size=(INPUT_SIZE, INPUT_SIZE), mode="bilinear", align_corners=False)
        x = 2 * x - 1
    return x.expand(-1, 3, -1, -1)


def resize_tensorflow_1(x_BCHW: Tensor, size: int) -> Tensor:
    """Bilinear, output pixel i at i * in / out of the input: the top left corners agree, not the centres."""

    def places(pixels: int) -> tuple[Tensor, Tensor, Tensor]:
        at = torch.arange(size, dtype=torch.float32, device=x_BCHW.device) * (pixels / size)
        low = at.floor().long()
        return low, (low + 1).clamp(max=pixels - 1), at - low

    top, bottom, down = places(x_BCHW.shape[2])
    left, right, across = places(x_BCHW.shape[3])
    rows = torch.lerp(x_BCHW[:, :, top], x_BCHW[:, :, bottom], down[:, None])
    return torch.lerp(rows[..., left], rows[..., right], across)
