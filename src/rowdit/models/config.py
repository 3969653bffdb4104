"""The shape of a DiT, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

TIME_FREQUENCIES = 256
"""Width of the sinusoidal time embedding."""

MOST_BLOCKS = 10_000


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
            no use for them: forward gives the C velocity channels, unless it is asked for all. False leaves the
            parameters out.
        qk_norm: each head's queries and keys are brought to RMS 1 and scaled by learned vectors (arXiv:2302.05442).
        positions: `"sincos"`, fixed vectors added to the tokens, as published; or `"rope"`, queries and keys rotated by
            row and column (arXiv:2104.09864, along two axes).
        mlp: `"gelu"`, as published; or `"swiglu"`, silu(W1 x) * W2 x, then W3 (arXiv:2002.05202), two thirds as wide,
            so with about as many parameters.
        caption_dim: width of a caption's embedding, made beforehand; the model is then conditioned on those instead of
            classes, and num_classes must be 0. None conditions on classes.
        freq_shift: the time embedding has 128 frequencies 10000^(-i / (128 - freq_shift)): 0 as published, 1 as
            diffusers computes it.

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
    qk_norm: bool = False
    positions: Literal["sincos", "rope"] = "sincos"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    caption_dim: int | None = None
    freq_shift: Literal[0, 1] = 0

    def __post_init__(self) -> None:
        for name in ("image_size", "in_channels", "patch_size", "hidden_size", "depth", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.depth > MOST_BLOCKS:
            raise ValueError(f"depth is {self.depth}; it must be at most {MOST_BLOCKS}, each block is a module")
        self._check_condition()
        for name, known in (("positions", ("sincos", "rope")), ("mlp", ("gelu", "swiglu")), ("freq_shift", (0, 1))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {known[0]!r} or {known[1]!r}")
        if not math.isfinite(self.mlp_ratio) or self.mlp_size < 1:
            raise ValueError(f"mlp_ratio is {self.mlp_ratio}; it must be finite, and hidden_size times it >= 1")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} isn't divisible by patch_size {self.patch_size}; "
                f"the nearest valid sizes are {_nearest_multiples(self.image_size, self.patch_size)}"
            )
        rotates = self.positions == "rope"
        step = 4 * self.num_heads if rotates else math.lcm(self.num_heads, 4)
        if self.hidden_size % step:
            wanted = "4 times num_heads" if rotates else "num_heads"
            raise ValueError(
                f"hidden_size {self.hidden_size} isn't a multiple of {wanted} {self.num_heads} and of 4; "
                f"the nearest valid widths are {_nearest_multiples(self.hidden_size, step)}"
            )

    def _check_condition(self) -> None:
        if self.caption_dim is None:
            if self.num_classes < 1:
                raise ValueError(f"num_classes is {self.num_classes}; it must be at least 1, or caption_dim given")
            return
        if self.caption_dim < 1:
            raise ValueError(f"caption_dim is {self.caption_dim}; it must be at least 1, or None for classes")
        if self.num_classes != 0:
            raise ValueError(
                f"num_classes is {self.num_classes} and caption_dim {self.caption_dim}; a model is conditioned on "
                "classes or on captions: set num_classes to 0, or caption_dim to None"
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
        """Width of the MLP between its layers; of a SwiGLU two thirds of mlp_ratio D, up to a multiple of 16."""
        size = int(self.hidden_size * self.mlp_ratio)
        return size if self.mlp == "gelu" else -(-2 * size // 48) * 16

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def out_channels(self) -> int:
        """Channels that the final layer gives: of the velocity, and with learn_sigma as many of a variance."""
        return self.in_channels * (2 if self.learn_sigma else 1)


def _nearest_multiples(value: int, step: int) -> str:
    below, above = value // step * step, (value // step + 1) * step
    return f"{below} and {above}" if below else f"{above}"
