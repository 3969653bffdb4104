"""The flow from noise to images: path and loss, training times, samplers, guidance. Knows no model and no data."""

from rowdit.flow.guidance import drop_labels, guided_velocity
from rowdit.flow.path import flow_loss, interpolate, velocity_target
from rowdit.flow.samplers import SAMPLERS, dpm_solver_2m, euler, heun, time_grid
from rowdit.flow.times import logit_normal_time, uniform_time

__all__ = [
    "SAMPLERS",
    "dpm_solver_2m",
    "drop_labels",
    "euler",
    "flow_loss",
    "guided_velocity",
    "heun",
    "interpolate",
    "logit_normal_time",
    "time_grid",
    "uniform_time",
    "velocity_target",
]
