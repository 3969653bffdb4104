"""The straight path between an image and noise, and its loss.

Convention of the whole package: t = 0 is data, t = 1 is noise.

    x_t = (1 - t) x + t eps         v = d x_t / d t = eps - x

A model learns v from (x_t, t, class), so an image is made by following dx/dt = v from t = 1 down to t = 0. Source: flow
matching (Lipman et al., arXiv:2210.02747) and rectified flow (Liu et al., arXiv:2209.03003), with time counted from
data to noise as in "Scaling Rectified Flow Transformers" (Esser et al., arXiv:2403.03206).

Legend: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

VelocityModel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_BCHW, t_B, y_B) -> v_BCHW, what :class:`rowdit.models.DiT` is."""


def interpolate(x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t = (1 - t) x + t eps.

    Args:
        x: (B, ...) images in [-1, 1].
        noise: same shape, standard normal.
        t: (B,) in [0, 1].

    Returns:
        Same shape as ``x``.

    Raises:
        ValueError: shapes that don't fit, which broadcasting would hide.
    """
    if x.shape != noise.shape:
        raise ValueError(f"x has shape {tuple(x.shape)} but noise {tuple(noise.shape)}; they must be equal")
    if t.shape != x.shape[:1]:
        raise ValueError(f"t has shape {tuple(t.shape)}; one time for each image, ({x.shape[0]},), is needed")
    t = t.view(-1, *[1] * (x.ndim - 1))
    return (1 - t) * x + t * noise


def velocity_target(x: Tensor, noise: Tensor) -> Tensor:
    """v = eps - x, the velocity of the straight path: the same at every t."""
    return noise - x


def flow_loss(model: VelocityModel, x: Tensor, y: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Mean squared error of the predicted velocity, for each image.

    Args:
        model: (x_BCHW, t_B, y_B) -> v_BCHW.
        x: (B, C, H, W) images in [-1, 1].
        y: (B,) int64 classes; num_classes is the null class.
        noise: (B, C, H, W) standard normal.
        t: (B,) in [0, 1].

    Returns:
        (B,) float32, whatever the model's precision: the mean over C, H, W.

    Raises:
        ValueError: shapes that don't fit.
    """
    velocity = model(interpolate(x, noise, t), t, y)
    if velocity.shape != x.shape:
        raise ValueError(f"the model returned shape {tuple(velocity.shape)} for images of shape {tuple(x.shape)}")
    return (velocity.float() - velocity_target(x.float(), noise.float())).square().flatten(1).mean(1)
