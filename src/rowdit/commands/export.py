"""`rowdit export`: a trained model as one file to pass on."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from rowdit.commands.outputs import check_file, check_folder
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
        format: rowdit: one file with its config; public: one file under the public DiT checkpoints' names; diffusers: a
            folder for diffusers' DiTTransformer2DModel, RUN/diffusers by default. It predicts a velocity there too.
    """

    run: tyro.conf.Positional[Path]
    out: Path | None = None
    which: str = "ema"
    step: int | None = None
    ema_std: float | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    format: Literal["rowdit", "public", "diffusers"] = "rowdit"


def run(arguments: list[str]) -> int:
    options = parse("export", ExportOptions, arguments)
    from rowdit.train.export import export

    if options.format == "diffusers":
        check_folder(options.out)
    else:
        check_file(options.out, example="model.safetensors")
    if options.format != "rowdit":
        return _for_others(options)
    out = options.out or options.run / "model.safetensors"
    origin = export(options.run, out, which=options.which, step=options.step, std=options.ema_std, dtype=options.dtype)
    print(f"{out}: {origin['which']} at step {origin['step']}, {out.stat().st_size / 1e6:.1f} MB")
    return 0


def _for_others(options: ExportOptions) -> int:
    """Our own export, read back and written in another form."""
    from rowdit.models.published import WeightsError, save_diffusers, save_public
    from rowdit.train.config import ConfigError
    from rowdit.train.export import DTYPES, export, load_export

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        origin = export(options.run, file, which=options.which, step=options.step, std=options.ema_std)
        model = load_export(file).to(DTYPES[options.dtype])
    name, save = {
        "public": ("public.safetensors", save_public),
        "diffusers": ("diffusers", save_diffusers),
    }[options.format]
    out = options.out or options.run / name
    try:
        save(model, out)
    except WeightsError as error:
        raise ConfigError(str(error)) from None
    print(f"{out}: {origin['which']} at step {origin['step']}, for {options.format}")
    return 0
