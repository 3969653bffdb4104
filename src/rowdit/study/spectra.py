"""How far a row step is from a spectral one, recorded while a model trains: `rowdit compare --spectra`.

At refreshes, for every matrix under Muon, of U, which is the momentum or its Nesterov mix:

    cosine       <R, O> / (|R| |O|) of the row step's direction R (rows over their lengths) and the polar factor O:
                 1 says that the cheap step and the expensive one are the same
    stable_rank  |U|_F^2 / |U|_2^2, between 1 and min(m, n)
    row_spread   standard deviation of the rows' lengths over their mean

A row step has O's Frobenius norm whatever the spectrum, so the cosine says how much of it goes where a spectral step
would go.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rowdit.study.figures import Figure, Line, draw
from rowdit.study.steps import build_optimizer
from rowdit.train.config import OptimizerConfig
from rowdit.train.log import read_jsonl, write_bytes

MEASURES = ("cosine", "stable_rank", "row_spread")
FILE_NAME = "spectra.jsonl"


def spectrum(U_mn: Tensor) -> dict[str, float] | None:
    """The three measures of one matrix; None where it is zero, for then it has no direction.

    Args:
        U_mn: (m, n), floating, finite.
    """
    top = U_mn.abs().max()
    if not top > 0:
        return None
    U = U_mn.double() / top
    left, values, right = torch.linalg.svd(U, full_matrices=False)
    kept = values > values[0] * 1e-10
    polar = left[:, kept] @ right[kept]
    lengths = torch.linalg.vector_norm(U, dim=1)
    rows = U / lengths.clamp_min(torch.finfo(torch.float64).tiny)[:, None]
    return {
        "cosine": float((rows * polar).sum() / (torch.linalg.vector_norm(rows) * torch.linalg.vector_norm(polar))),
        "stable_rank": float(values.square().sum() / values[0] ** 2),
        "row_spread": float(lengths.std(correction=0) / lengths.mean()),
    }


def layer_kind(name: str) -> str:
    """`"blocks.3.mlp.fc1.weight"` as `"mlp.fc1"`: what the layers of all blocks have in common.

    >>> layer_kind("blocks.3.adaLN_modulation.1.weight")
    'adaLN_modulation'
    """
    return re.sub(r"(^|\.)(blocks|weight|\d+)(?=\.|$)", "", name).strip(".")


class SpectraRecorder:
    """Builds optimizers that record the spectra of their momentum into `folder/spectra.jsonl`; AdamW records nothing.

    A row is a layer kind at a refresh: step, kind, the means of the measures over its matrices, num (how many). After a
    resume a step may stand there twice; `read_spectra` takes the later one.

    Args:
        folder: of the run.
        every: refreshes from one record to the next, >= 1; a record takes a singular value decomposition a matrix.
    """

    def __init__(self, folder: Path, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"every = {every}: must be an integer >= 1")
        self.path, self.every = folder / FILE_NAME, every

    def build(self, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
        """As `rowdit.study.steps.build_optimizer`, with the recorder hooked in."""
        optimizer = build_optimizer(model, config)
        if config.name == "adamw":
            return optimizer
        names = {parameter: name for name, parameter in model.named_parameters()}
        refreshes = 0

        def before(optimizer: Any, *_: Any) -> None:
            nonlocal refreshes
            refreshes += optimizer.next_step_kind == "refresh"
            optimizer._records_spectra = optimizer.next_step_kind == "refresh" and (refreshes - 1) % self.every == 0

        def after(optimizer: Any, *_: Any) -> None:
            if optimizer._records_spectra:
                self._append(measure(optimizer, names))

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return optimizer

    def _append(self, rows: list[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


@torch.no_grad()
def measure(optimizer: Any, names: Mapping[Any, str]) -> list[dict[str, Any]]:
    """A row a layer kind, after a step whose gradients are still there."""
    found: dict[str, list[dict[str, float]]] = {}
    step = 0
    for parameter, group, U in _directions(optimizer):
        step = max(step, int(optimizer.state[parameter]["step"]))
        for U_mn in U.chunk(group["chunks"]):
            measured = spectrum(U_mn)
            if measured:
                found.setdefault(layer_kind(names[parameter]), []).append(measured)
    return [
        {"step": step, "kind": kind, "num": len(rows)}
        | {key: statistics.fmean(row[key] for row in rows) for key in MEASURES}
        for kind, rows in found.items()
    ]


def _directions(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Any], Tensor]]:
    for group in optimizer.param_groups:
        if group["algorithm"] == "muon":
            for p in group["params"]:
                if p.grad is not None:
                    M = optimizer.state[p]["momentum_buffer"]
                    yield p, group, torch.lerp(p.grad.to(M.dtype), M, group["momentum"]) if group["nesterov"] else M


def read_spectra(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, by step and kind."""
    rows = {(row["step"], row["kind"]): row for row in read_jsonl(folder / FILE_NAME)}
    return [rows[key] for key in sorted(rows)]


def write_spectra_figures(folder: Path) -> list[Path]:
    """`spectra-MEASURE.svg` in a run's folder, a line a layer kind; none if nothing was recorded."""
    rows = read_spectra(folder)
    paths = []
    for key in MEASURES if rows else ():
        lines = []
        for kind in dict.fromkeys(row["kind"] for row in rows):
            own = [row for row in rows if row["kind"] == kind]
            lines.append(Line(kind, tuple(float(row["step"]) for row in own), tuple(row[key] for row in own)))
        figure = Figure(f"{folder.name}: {key.replace('_', ' ')}", "step", key.replace("_", " "), tuple(lines))
        paths.append(folder / f"spectra-{key}.svg")
        write_bytes(paths[-1], draw(figure).encode())
    return paths
