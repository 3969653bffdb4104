"""A small convolutional variational autoencoder: images to latents and back.

Not a rival of published autoencoders; it makes the latent path complete on one processor: ``rowdit train-vae`` trains
it in about a minute on the bundled images.

    encoder   3x3 stride-2 convolution and a residual block for each halving of the side; means and log variances
    decoder   the same in reverse, doubling by pixel shuffle
    loss      mean((x - x')^2) / 2 sigma_x^2  +  mean(KL(q(z|x) || N(0, 1))) * d_z / d_x,   per pixel   (Kingma and
              Welling, arXiv:1312.6114), d_z and d_x the numbers of latent values and pixels

Legend: B images, C channels, H x W pixels; c, h, w of latents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOG_VARIANCE_RANGE = (-20.0, 10.0)  # beyond it exp() loses meaning in fp32


@dataclass(frozen=True)
class VAEConfig:
    """Shape of a :class:`ConvVAE`.

    Args:
        in_channels: of the images, 1 or 3.
        latent_channels: >= 1.
        downsample_factor: pixels a latent pixel's side; a power of two, >= 2.
        hidden_channels: at half the images' side; doubled at each further halving. A multiple of 8.
        pixel_deviation: sigma_x of the loss, in units where images span [-1, 1]; smaller gives sharper images and
            latents that are farther from normal. > 0.
    """

    in_channels: int = 1
    latent_channels: int = 4
    downsample_factor: int = 4
    hidden_channels: int = 32
    pixel_deviation: float = 0.1

    def __post_init__(self) -> None:
        factor = self.downsample_factor
        if factor < 2 or factor & (factor - 1):
            raise ValueError(f"downsample_factor {factor} must be a power of two, at least 2")
        if self.in_channels < 1 or self.latent_channels < 1:
            raise ValueError(f"in_channels {self.in_channels} and latent_channels {self.latent_channels} must be >= 1")
        if self.hidden_channels < 8 or self.hidden_channels % 8:
            raise ValueError(f"hidden_channels {self.hidden_channels} must be a multiple of 8")
        if not 0 < self.pixel_deviation < math.inf:
            raise ValueError(f"pixel_deviation {self.pixel_deviation} must be a finite number > 0")


class ConvVAE(nn.Module):
    """The autoencoder.

    Args:
        config: its shape.
        seed: of the initial weights, which depend on nothing else.

    Example:
        >>> vae = ConvVAE(VAEConfig())
        >>> mean, log_variance = vae.encode(torch.zeros(2, 1, 28, 28))
        >>> mean.shape, vae.decode(mean).shape
        (torch.Size([2, 4, 7, 7]), torch.Size([2, 1, 28, 28]))
    """

    def __init__(self, config: VAEConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        num_halvings = config.downsample_factor.bit_length() - 1
        widths = [config.hidden_channels << level for level in range(num_halvings)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            down: list[nn.Module] = []
            for before, width in zip([config.in_channels, *widths], widths, strict=False):
                down += [nn.Conv2d(before, width, 3, stride=2, padding=1), _Residual(width)]
            self.encoder = nn.Sequential(
                *down, _norm_act(widths[-1]), nn.Conv2d(widths[-1], 2 * config.latent_channels, 1)
            )
            up: list[nn.Module] = [nn.Conv2d(config.latent_channels, widths[-1], 3, padding=1)]
            for width, after in zip(widths[::-1], [*widths[-2::-1], config.in_channels], strict=True):
                up += [
                    _Residual(width),
                    _norm_act(width),
                    nn.Conv2d(width, 4 * after, 3, padding=1),
                    nn.PixelShuffle(2),
                ]
            self.decoder = nn.Sequential(*up)

    def encode(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance (B, c, h, w) of q(z|x), of images in [-1, 1]; H and W multiples of the factor."""
        mean, log_variance = self.encoder(x_BCHW).chunk(2, dim=1)
        return mean, log_variance.clamp(*LOG_VARIANCE_RANGE)

    def decode(self, z_Bchw: Tensor) -> Tensor:
        """The mean of p(x|z), (B, C, H, W)."""
        return self.decoder(z_Bchw)

    def loss(self, x_BCHW: Tensor, noise_Bchw: Tensor) -> Tensor:
        """The negative evidence bound, per pixel and without its constant; the module's docstring has the formula."""
        mean, log_variance = self.encode(x_BCHW)
        decoded = self.decode(mean + noise_Bchw * (0.5 * log_variance).exp())
        squared_error = F.mse_loss(decoded, x_BCHW)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        return squared_error / (2 * self.config.pixel_deviation**2) + divergence * mean.numel() / x_BCHW.numel()

    def latent_shape(self, image_size: int) -> tuple[int, int, int]:
        """(c, h, w) of an image of ``image_size`` pixels a side."""
        side = image_size // self.config.downsample_factor
        return self.config.latent_channels, side, side


class _Residual(nn.Module):
    """x + conv(act(norm(conv(act(norm(x))))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _norm_act(width),
            nn.Conv2d(width, width, 3, padding=1),
            _norm_act(width),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def _norm_act(width: int) -> nn.Sequential:
    return nn.Sequential(nn.GroupNorm(8, width), nn.SiLU())
