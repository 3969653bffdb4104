"""`rowdit plan`: what a recipe takes on any number of ranks, without them."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from rowdit.commands.outputs import check_folder
from rowdit.commands.parsing import from_arguments

if TYPE_CHECKING:
    from rowdit.cost import Estimate
    from rowdit.cost.hardware import Cluster
    from rowdit.study.comparison import Comparison
    from rowdit.train.config import RunConfig


@dataclass(frozen=True)
class PlanOptions:
    """What a recipe takes on N ranks, with no GPU and no weights in memory: parameters and where they go, batch, memory
    of a rank by part, bytes sent and FLOPs of each kind of optimizer step. Any field of the recipe can be changed:
    --train.batch-size 1024. Bytes sent are the optimizer's own: what leaves a rank, padding included. FLOPs are two for
    each multiply-add of a matrix product. Both are given as the mean over the ranks and for the rank with most; "per
    step" is the mean over a period.

    Args:
        world_size: number of ranks; alone, one FSDP2 mesh over all of them, every parameter in Shard(0).
        replicas: HSDP: copies of the model, each sharded over world_size / replicas ranks; by default the recipe's.
        period: K of the periodic optimizer; by default the recipe's.
        refresh: "exchange" (each matrix orthogonalised once) or "gather" (by everyone); by default the recipe's.
        label: which optimizer, where the recipe is a comparison of several; by default its last.
        device: what the ranks have; a CPU leaves out half of large symmetric products.
        cluster: machines for which the time of a step is predicted: a100, h100 (the default), h100-ethernet, h100-100g,
            h200, b200, or a .json file. On a CPU only a file makes sense, and by default no time is given.
        sweep: a table of periods and numbers of ranks up to 4096, gather and exchange, at as many images a rank.
        out: folder for the sweep as sweep.svg and sweep.json.
        json: nothing but JSON on standard output.
    """

    world_size: int = 1
    replicas: int | None = None
    period: int | None = None
    refresh: Literal["exchange", "gather"] | None = None
    label: str | None = None
    device: Literal["cuda", "cpu"] = "cuda"
    cluster: str | None = None
    sweep: bool = False
    out: Path | None = None
    json: bool = False


def run(arguments: list[str]) -> int:
    options, recipe, name = parse(arguments)
    from rowdit.cost import RankMesh, estimate
    from rowdit.cost.predict import predict, sensitivities
    from rowdit.cost.text import describe, describe_time, time_dict
    from rowdit.train.config import ConfigError

    check_folder(options.out)
    if options.out is not None and not options.sweep:
        raise ConfigError(f"--out {options.out} is for the files of --sweep, which wasn't asked for")
    config = run_config(recipe, options)
    try:
        replicas = config.parallel.replicas if options.replicas is None else options.replicas
        mesh = RankMesh(options.world_size, replicas)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        found = estimate(config, mesh, refresh=options.refresh, device=options.device)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        sizes = str(error).partition("sizes=")[2]
        raise ConfigError(
            f"a tensor of {sizes} has more bytes than can be counted: give a smaller model or train.batch_size"
        ) from None
    if problem := found.batch.problem(mesh.world_size):
        print(f"rowdit: {problem}", file=sys.stderr)
    data, text = {"recipe": name, **found.to_dict()}, [f"recipe     {name}\n{describe(found)}"]
    machines = _cluster(options)
    if machines is not None:
        time, hangs_on = predict(found, machines), sensitivities(found, machines)
        data["seconds"] = time_dict(time, machines, hangs_on)
        text.append(describe_time(time, machines, hangs_on))
    if options.sweep:
        if machines is None:
            raise ConfigError("--sweep needs --cluster: without machines there is no time")
        data["sweep"], more = _sweep(found, machines, options, name)
        text.append(more)
    print(json.dumps(data) if options.json else "\n\n".join(text))
    return 0


def _cluster(options: PlanOptions) -> Cluster | None:
    from rowdit.cost.hardware import ClusterError, cluster
    from rowdit.train.config import ConfigError

    if options.cluster is None and options.device == "cpu":
        return None
    try:
        return cluster(options.cluster or "h100")
    except ClusterError as error:
        raise ConfigError(str(error)) from None


def _sweep(found: Estimate, machines: Cluster, options: PlanOptions, name: str) -> tuple[list[dict[str, Any]], str]:
    from rowdit.cost.plot import sweep_svg
    from rowdit.cost.sweep import PERIODS, WORLD_SIZES, sweep, sweep_dict, sweep_table
    from rowdit.train.config import ConfigError

    if found.config.optimizer.name == "adamw":
        raise ConfigError("--sweep varies the period and the refresh, and AdamW has neither; take another --label")
    num_shards = found.mesh.num_shards if found.mesh.num_replicas > 1 else None
    points = sweep(found.config, machines, found.batch.images_per_rank, num_shards, WORLD_SIZES)
    data = sweep_dict(points)
    if options.out is not None:
        title = f"{name} on {machines.name}, {found.batch.images_per_rank} images a rank: ms of a step, predicted"
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "sweep.svg").write_text(sweep_svg(points, PERIODS, title), encoding="utf-8")
        (options.out / "sweep.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return data, sweep_table(points)


def run_config(recipe: RunConfig | Comparison, options: PlanOptions) -> RunConfig:
    """The one run that is priced.

    Raises:
        ConfigError: a label that the recipe doesn't have, or a period for an optimizer that has none.
    """
    from rowdit.study.comparison import Comparison
    from rowdit.train.config import ConfigError

    if isinstance(recipe, Comparison):
        label = recipe.select(options.label)[-1]
        config = recipe.run_config(label, recipe.train.seed)
    elif options.label is not None:
        raise ConfigError(f"label = {options.label!r}: this recipe is one run, with one optimizer")
    else:
        config = recipe
    if options.period is None:
        return config
    if config.optimizer.name != "periodic":
        raise ConfigError(
            f"period = {options.period}: the optimizer {config.optimizer.name!r} has no period, only 'periodic' has"
        )
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, period=options.period))


def parse(arguments: list[str]) -> tuple[PlanOptions, RunConfig | Comparison, str]:
    """Options, the recipe with what is overridden in it, and its name."""
    from rowdit import recipes

    has_recipe = bool(arguments) and not arguments[0].startswith("-")
    name = arguments[0] if has_recipe else "quickstart"
    recipe = recipes.load(name)
    part = tyro.conf.arg(name="")  # no prefix: --world-size and --train.steps, not --options.world-size
    fields = [
        ("options", Annotated[PlanOptions, part], field(default_factory=PlanOptions)),
        ("recipe", Annotated[type(recipe), part], field(default_factory=lambda: recipe)),
    ]
    command = from_arguments(
        dataclasses.make_dataclass("Command", fields, frozen=True),
        f"rowdit plan [{'|'.join(recipes.RECIPES)}]",
        arguments[1:] if has_recipe else arguments,
        description=" ".join((PlanOptions.__doc__ or "").partition("\n\n")[0].split()),
        config=(tyro.conf.AvoidSubcommands,),
    )
    return command.options, command.recipe, name
