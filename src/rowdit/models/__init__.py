"""Diffusion Transformers: the model, named shapes, their FLOPs. Knows no flow and no data."""

from rowdit.models.dit import DiT, DiTConfig
from rowdit.models.flops import forward_flops
from rowdit.models.labels import check_labels
from rowdit.models.presets import PRESETS, preset

__all__ = ["PRESETS", "DiT", "DiTConfig", "check_labels", "forward_flops", "preset"]
