"""The feature networks by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rowdit.evaluate.features import EfficientNetLite0Features, FeatureNetwork

if TYPE_CHECKING:
    import torch

    from rowdit.evaluate.weights import WeightsFile

NETWORKS = ("effnet_lite0", "inception", "inception_pytorch_fid", "dinov2_vitl14")


def open_network(
    name: str, device: str | torch.device = "cpu", *, weights: Path | None = None, batch_size: int | None = None
) -> FeatureNetwork:
    """A feature network with its weights.

    Args:
        name: one of NETWORKS.
        device: where it runs.
        weights: its weights file; None takes the installed package's, or what was downloaded.
        batch_size: images a forward pass; None takes the network's default.

    Raises:
        ValueError: an unknown name, or a file that isn't the published one.
        FileNotFoundError, ModuleNotFoundError: the weights aren't here; the message says how to get them.
    """
    options = {} if batch_size is None else {"batch_size": batch_size}
    if name == "effnet_lite0":
        return EfficientNetLite0Features(device, weights=weights, **options)
    if name in ("inception", "inception_pytorch_fid"):
        from rowdit.evaluate.inception import InceptionFeatures

        if name == "inception":
            return InceptionFeatures(device, weights=weights, resize="tensorflow", **options)
        return InceptionFeatures(device, weights=weights, resize="pytorch_fid", **options)
    if name == "dinov2_vitl14":
        from rowdit.evaluate.dinov2 import DINOv2Features

        return DINOv2Features(device, weights=weights, **options)
    raise ValueError(f"there is no feature network {name!r}; there are {', '.join(NETWORKS)}")


def published_weights(name: str) -> WeightsFile | None:
    """The file that a network's weights are published in; None for the one that is installed as a package."""
    if name.startswith("inception"):
        from rowdit.evaluate.inception import WEIGHTS

        return WEIGHTS
    if name == "dinov2_vitl14":
        from rowdit.evaluate.dinov2 import WEIGHTS

        return WEIGHTS
    return None
