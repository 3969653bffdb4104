"""`rowdit export`: a trained model as one file to pass on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from rowdit.commands.parsing import parse


@dataclass(frozen=True)
class ExportOptions:
    """Writes a run's averaged weights and its config as one safetensors file; `rowdit.train.export.load_export` reads
    it. Any number of ranks may have trained the run.

    Args:
        run: folder of a run.
        out: the file; by default RUN/model.safetensors.
        which: the averaged weights (ema), those as trained (model), or the label of another average.
        step: of the checkpoint; the newest by default.
        ema_std: instead of `which`, the width of a power-function average, put together from the run's snapshots.
        dtype: of the weights in the file.
    """

    run: tyro.conf.Positional[Path]
    out: Path | None = None
    which: str = "ema"
    step: int | None = None
    ema_std: float | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


def run(arguments: list[str]) -> int:
    options = parse("export", ExportOptions, arguments)
    from rowdit.train.export import export

    out = options.out or options.run / "model.safetensors"
    origin = export(options.run, out, which=options.which, step=options.step, std=options.ema_std, dtype=options.dtype)
    print(f"{out}: {origin['which']} at step {origin['step']}, {out.stat().st_size / 1e6:.1f} MB")
    return 0
