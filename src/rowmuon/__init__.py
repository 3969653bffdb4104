"""Periodic Row-wise Muon for any PyTorch training loop. These are all the public names."""

from rowmuon import rules
from rowmuon.clipping import clip_grad_norm_
from rowmuon.coefficients import COEFFICIENTS
from rowmuon.muon import Muon
from rowmuon.optimizer import PeriodicRowMuon
from rowmuon.orthogonalize import newton_schulz, newton_schulz_flops
from rowmuon.routing import ParamGroups, Rule, param_groups
from rowmuon.traffic import StepTraffic, Traffic
from rowmuon.update import convert_lr, row_step_scale, spectral_scale

__all__ = [
    "COEFFICIENTS",
    "Muon",
    "ParamGroups",
    "PeriodicRowMuon",
    "Rule",
    "StepTraffic",
    "Traffic",
    "clip_grad_norm_",
    "convert_lr",
    "newton_schulz",
    "newton_schulz_flops",
    "param_groups",
    "row_step_scale",
    "rules",
    "spectral_scale",
]
