"""Moving averages of the weights, in fp32 whatever the weights are in, sharded as the weights are.

    ema <- ema + (1 - d_n) (w - ema),     n = updates before this one

`Ema`: d_n = min(decay, (1 + n) / (10 + n)). The ramp lets a short run forget its random start: with a decay of 0.999
and no ramp, after 600 steps more than half of the average would still be the initial weights.

`PowerEma`: d_n = (1 - 1 / t)^(gamma + 1) with t = n + 1. The weights' profile is then tau^gamma over the run up to t,
so its width is a fixed share of the run, and averages of other widths can be put together afterwards
(`rowdit.train.posthoc`).

Source: the moving average is Polyak's; the ramp is TensorFlow's `ExponentialMovingAverage(num_updates=n)`; power
functions are Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models", arXiv:2312.02696.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rowdit.train.posthoc import gamma_of_std


class Ema:
    """The averaged copy of a model's trainable parameters; of a sharded model each rank's shards.

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

    def next_decay(self) -> float:
        """The share of the old average in the next update."""
        return min(self.decay, (1 + self.num_updates) / (10 + self.num_updates)) if self.decay else 0.0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Moves the average towards the model's present weights."""
        pairs = self._local_pairs(model)
        torch._foreach_lerp_([average for average, _ in pairs], [w.float() for _, w in pairs], 1 - self.next_decay())
        self.num_updates += 1

    @contextmanager
    def swap_in(self, model: nn.Module) -> Iterator[nn.Module]:
        """Within the context the model computes with the averaged weights; afterwards with its own, to the bit.

        The values change places in memory, so no further copy of the model is held, and optimizers, compiled graphs
        and views stay valid. A model with gathered shards must give them back before and after.
        """
        kept = self._exchange(model, {})
        try:
            yield model
        finally:
            self._exchange(model, kept)

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

    def _local_pairs(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """(average, weight) of every averaged parameter, this rank's part."""
        return [
            (_local(self.weights[name]), _local(p.detach()))
            for name, p in model.named_parameters()
            if name in self.weights
        ]

    @torch.no_grad()
    def _exchange(self, model: nn.Module, kept: dict[int, Tensor]) -> dict[int, Tensor]:
        """Averages and weights change places. Weights in less than fp32 can't hold an average: they are kept aside."""
        aside: dict[int, Tensor] = {}
        for i, (average, weight) in enumerate(self._local_pairs(model)):
            if i in kept:
                weight.copy_(kept[i])
            elif average.dtype == weight.dtype:
                own = weight.clone()
                weight.copy_(average)
                average.copy_(own)
            else:
                aside[i] = weight.clone()
                weight.copy_(average)
        return aside


class PowerEma(Ema):
    """An average whose profile over the run is a power function.

    Args:
        model: as for `Ema`.
        std: width sigma_rel of the profile, its deviation over the length of the run, in (0, 0.288): EDM2 takes 0.05
            and 0.10.
    """

    def __init__(self, model: nn.Module, std: float) -> None:
        self.std, self.gamma = std, gamma_of_std(std)
        super().__init__(model, 0.0)

    def next_decay(self) -> float:
        return (1 - 1 / (self.num_updates + 1)) ** (self.gamma + 1)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; a plain one as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
