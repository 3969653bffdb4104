"""Exponential moving average of the weights, in fp32 whatever the weights are in.

    ema <- ema + (1 - d_n) (w - ema),     d_n = min(decay, (1 + n) / (10 + n))

n counts the updates before this one. The ramp d_n lets a short run forget its random start: with a decay of 0.999 and
no ramp, after 600 steps more than half of the average would still be the initial weights.

Source: the moving average is Polyak's; the ramp is TensorFlow's `ExponentialMovingAverage(num_updates=n)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """The averaged copy of a model's trainable parameters.

    Args:
        model: whose parameters with `requires_grad` are averaged; their names are the keys of the state.
        decay: in [0, 1); 0 follows the weights at once.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> ema = Ema(model, decay=0.0)
        >>> _ = nn.init.ones_(model.weight); ema.update(model)
        >>> ema.weights["weight"].tolist()
        [[1.0, 1.0]]
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay = {decay!r}: must be in [0, 1)")
        self.decay = decay
        self.num_updates = 0
        # A deep copy of the model would fail on sharded or compiled ones; copies of tensors never do.
        self.weights: dict[str, Tensor] = {
            name: p.detach().to(torch.float32, copy=True) for name, p in model.named_parameters() if p.requires_grad
        }

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Moves the average towards the model's present weights."""
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates)) if self.decay else 0.0
        for name, p in model.named_parameters():
            if name in self.weights:
                self.weights[name].lerp_(p.detach().float(), 1 - decay)
        self.num_updates += 1

    @contextmanager
    def swap_in(self, model: nn.Module) -> Iterator[nn.Module]:
        """Within the context the model computes with the averaged weights; afterwards with its own, to the bit.

        The values are copied into the parameters in place, so optimizers, compiled graphs and views stay valid.
        """
        parameters = {name: p for name, p in model.named_parameters() if name in self.weights}
        own = {name: p.detach().clone() for name, p in parameters.items()}
        try:
            with torch.no_grad():
                for name, p in parameters.items():
                    p.copy_(self.weights[name])
            yield model
        finally:
            with torch.no_grad():
                for name, p in parameters.items():
                    p.copy_(own[name])

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights by name; the live tensors, as `nn.Module.state_dict` gives them."""
        return dict(self.weights)

    def load_state_dict(self, weights: Mapping[str, Tensor], num_updates: int) -> None:
        """Takes averaged weights of the same names and shapes, and the number of updates behind them."""
        if set(weights) != set(self.weights):
            missing, extra = sorted(set(self.weights) - set(weights)), sorted(set(weights) - set(self.weights))
            raise ValueError(f"EMA weights don't fit the model: missing {missing[:3]}, unexpected {extra[:3]}")
        for name, value in weights.items():
            if value.shape != self.weights[name].shape:
                raise ValueError(f"EMA of {name}: {tuple(value.shape)}, model has {tuple(self.weights[name].shape)}")
            self.weights[name].copy_(value)
        self.num_updates = num_updates
