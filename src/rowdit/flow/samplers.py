"""Solvers for dx/dt = velocity(x, t), from noise at t = 1 to an image at t = 0. Plain functions of one signature.

    sampler(velocity, x, times, callback=None) -> x at times[-1]

``velocity(x, t)`` gets t as a 0-dimensional tensor; ``times`` is the grid, (num_steps + 1,), any direction (an image
needs 1 to 0); ``callback(step, t, x)`` is called after every step with the time and the state that it reached. ``x`` is
never written to. Gradients are the caller's choice (``torch.no_grad()``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

Velocity = Callable[[Tensor, Tensor], Tensor]
Callback = Callable[[int, Tensor, Tensor], None]
Sampler = Callable[..., Tensor]


def time_grid(num_steps: int) -> Tensor:
    """The evenly spaced grid from noise to data: 1, 1 - 1/n, ..., 0.

    Args:
        num_steps: n >= 1.

    Returns:
        (num_steps + 1,) float32 on the CPU, descending, both ends exact. The samplers move it to where x is.

    Raises:
        ValueError: num_steps < 1.

    Example:
        >>> time_grid(4).tolist()
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; sampling needs at least 1 step")
    return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64, device="cpu").float()


def euler(velocity: Velocity, x: Tensor, times: Tensor, callback: Callback | None = None) -> Tensor:
    """First order, one velocity a step: x <- x + h v(x, t), h = t' - t.

    Args:
        velocity: (x, t of shape ()) -> dx/dt.
        x: state at times[0], any shape.
        times: (num_steps + 1,) grid.
        callback: called as callback(step, t', x) after every step.

    Returns:
        The state at times[-1].

    Raises:
        ValueError: a grid without a step.
    """
    for step, (t, t_next) in enumerate(_intervals(times, x.device)):
        x = x + (t_next - t) * velocity(x, t)
        if callback is not None:
            callback(step, t_next, x)
    return x


def heun(velocity: Velocity, x: Tensor, times: Tensor, callback: Callback | None = None) -> Tensor:
    """Second order, two velocities a step (explicit trapezoidal rule): x <- x + h/2 (v(x, t) + v(x + h v(x, t), t')).

    Args, Returns, Raises: as for :func:`euler`.
    """
    for step, (t, t_next) in enumerate(_intervals(times, x.device)):
        h = t_next - t
        v = velocity(x, t)
        x = x + (h / 2) * (v + velocity(x + h * v, t_next))
        if callback is not None:
            callback(step, t_next, x)
    return x


def _intervals(times: Tensor, device: torch.device) -> zip[tuple[Tensor, Tensor]]:
    if times.ndim != 1 or len(times) < 2:
        raise ValueError(f"times has shape {tuple(times.shape)}; a grid of at least two times is needed")
    times = times.to(device)
    return zip(times[:-1].unbind(), times[1:].unbind(), strict=True)


SAMPLERS: Mapping[str, Sampler] = MappingProxyType({"euler": euler, "heun": heun})
"""By the names that configurations and command lines use."""
