"""Solvers for dx/dt = velocity(x, t), from noise at t = 1 to an image at t = 0. Plain functions of one signature.

    sampler(velocity, x, times, callback=None) -> x at times[-1]

``velocity(x, t)`` gets t as a 0-dimensional tensor; ``times`` is the grid, (num_steps + 1,), any direction (an image
needs 1 to 0); ``callback(step, t, x)`` is called after every step with the time and the state that it reached. ``x`` is
never written to. Gradients are the caller's choice (``torch.no_grad()``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

Velocity = Callable[[Tensor, Tensor], Tensor]
Callback = Callable[[int, Tensor, Tensor], None]
Sampler = Callable[..., Tensor]


def time_grid(num_steps: int, shift: float = 1.0) -> Tensor:
    """The grid from noise to data: u = 1, 1 - 1/n, ..., 0, evenly spaced, then t = s u / (1 + (s - 1) u).

    Args:
        num_steps: n >= 1.
        shift: s > 0. 1 leaves the grid even; above 1 more of the steps are spent near the noise, which images of more
            pixels need.

    Returns:
        (num_steps + 1,) float32 on the CPU, descending, both ends exact. The samplers move it to where x is.

    Raises:
        ValueError: num_steps < 1, or a shift that isn't finite and positive.

    Source: the shift is equation 23 of Esser et al., arXiv:2403.03206, where s is called alpha.

    Example:
        >>> time_grid(4).tolist()
        [1.0, 0.75, 0.5, 0.25, 0.0]
        >>> time_grid(2, shift=3.0).tolist()
        [1.0, 0.75, 0.0]
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; sampling needs at least 1 step")
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(f"shift is {shift}; it must be finite and > 0 (1 is the even grid)")
    u = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64, device="cpu")
    return (shift * u / (1 + (shift - 1) * u)).float()


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


def dpm_solver_2m(velocity: Velocity, x: Tensor, times: Tensor, callback: Callback | None = None) -> Tensor:
    """DPM-Solver++(2M): second order in the log signal-to-noise ratio, one velocity a step.

    On the straight path the signal is 1 - t, the noise t, lambda(t) = log((1 - t) / t), and the predicted image is
    x0 = x - t v. With h = lambda(t') - lambda(t), h_before the same of the step before, and r = h_before / h,

        D = x0 + (x0 - x0_before) / (2 r)          x <- (t' / t) x + (1 - t' / t) D

    Written with v, so that nothing cancels near t = 0, it is Euler's step and a correction:

        x <- x + (t' - t) v + (1 - t' / t) (x0 - x0_before) / (2 r)

    Where this step or the one before touches t = 0 or t = 1, lambda is infinite and the correction is left out: the
    first two steps and the last are Euler's, which on this path is DDIM. Away from the ends the order is 2; on the
    whole grid the steps next to them leave an error of about log(n) / n^2.

    Args, Returns, Raises: as for :func:`euler`.

    Source: Lu et al., arXiv:2211.01095, algorithm 2, for this path.
    """
    intervals = _intervals(times, x.device)
    correction = _multistep_weights(times)
    before: Tensor | None = None
    for step, (t, t_next) in enumerate(intervals):
        v = velocity(x, t)
        image = x - t * v
        x = x + (t_next - t) * v
        if correction[step] and before is not None:
            x = x + correction[step] * (image - before)
        before = image
        if callback is not None:
            callback(step, t_next, x)
    return x


def _multistep_weights(times: Tensor) -> list[float]:
    """(1 - t' / t) / (2 r) for each step, in float64; 0 where a step of the two has no finite length in lambda."""
    grid = times.detach().cpu().double()
    log_snr = torch.log1p(-grid) - torch.log(grid)
    h = log_snr[1:] - log_snr[:-1]
    h_before = torch.cat([torch.full((1,), math.inf, dtype=torch.float64), h[:-1]])
    weights = (1 - grid[1:] / grid[:-1]) * h / (2 * h_before)
    usable = h.isfinite() & h_before.isfinite() & (h_before != 0)
    return torch.where(usable, weights, 0.0).tolist()


def _intervals(times: Tensor, device: torch.device) -> zip[tuple[Tensor, Tensor]]:
    if times.ndim != 1 or len(times) < 2:
        raise ValueError(f"times has shape {tuple(times.shape)}; a grid of at least two times is needed")
    times = times.to(device)
    return zip(times[:-1].unbind(), times[1:].unbind(), strict=True)


SAMPLERS: Mapping[str, Sampler] = MappingProxyType({"euler": euler, "heun": heun, "dpm": dpm_solver_2m})
"""By the names that configurations and command lines use."""
