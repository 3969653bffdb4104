"""`rowdit train`: one run, on one process or under torchrun."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from rowdit.commands.limits import check_run
from rowdit.commands.outputs import check_folder, no_empty_folder
from rowdit.commands.parsing import fail, from_arguments, set_threads
from rowdit.commands.ranks import num_ranks

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rowdit.data import Dataset
    from rowdit.train.config import OptimizerConfig, RunConfig
    from rowdit.train.loggers import Logger
    from rowdit.train.loop import Outcome
    from rowdit.train.stop import StopRequest
    from rowdit.train.world import World


@dataclass(frozen=True)
class TrainOptions:
    """Trains one run: on this process, or on all that torchrun starts. Ctrl-C or SIGTERM saves; the same command goes
    on, at any number of ranks. Any field of the recipe can be changed: --train.batch-size 256 --parallel.param-dtype
    bfloat16.

    Args:
        out: folder of the run; by default out/RECIPE-train.
        label: which optimizer, where the recipe is a comparison of several; by default its last.
        threads: processor threads of each rank; all cores by default.
        fresh: start over where a run exists, deleting it.
        allow_changes: go on under settings that train something else than before (a learning rate, more steps), if the
            state fits them; what differs is shown.
        evaluate: measure and sample at the recipe's evaluation steps.
        tensorboard: also write TensorBoard's event files, into the run's folder.
        wandb: also log to this project of Weights & Biases; WANDB_MODE=offline writes files alone.
    """

    out: Path | None = None
    label: str | None = None
    threads: int | None = None
    fresh: bool = False
    allow_changes: bool = False
    evaluate: bool = True
    tensorboard: bool = False
    wandb: str | None = None


def run(arguments: list[str]) -> int:
    options, config, recipe = parse(arguments)
    from rowdit.train.resume import AnotherRunError
    from rowdit.train.world import join_world

    set_threads(options.threads)
    out = options.out or Path("out") / f"{recipe.replace('/', '-').replace(':', '-')}-train"
    check_folder(out)
    check_run(config, num_ranks())
    try:
        with no_empty_folder(out), join_world(config.parallel) as world:
            outcome = _train(config, out, options, world)
            if not world.is_main:
                return 0
    except AnotherRunError as error:
        go_on = "--allow-changes to go on with it, " if error.state_fits else ""
        return fail(f"{error}; give {go_on}another --out, or --fresh to start it over")
    if outcome.status == "interrupted":
        again = shlex.join(["rowdit", "train", *(a for a in arguments if a != "--fresh")])
        return fail(f"stopped at step {outcome.step}; everything is saved. To go on: {again}", 130)
    if outcome.status == "diverged":
        return fail(f"{outcome.reason}. The last good checkpoint is kept in {out / 'checkpoints'}", 1)
    over = " (finished before; nothing was trained)" if outcome.was_over else ""
    print(f"run      {out}\nlast     step {outcome.step}{over}")
    return 0


def _train(config: RunConfig, out: Path, options: TrainOptions, world: World) -> Outcome:
    from rowdit.data.encoded import bad_images_met
    from rowdit.study.lock import lock_folder
    from rowdit.train.loop import check_dataset, check_ranks, check_same_run, remove_run, train
    from rowdit.train.progress import Progress, RunProgress, Silent
    from rowdit.train.stop import StopRequest

    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        loggers: list[Logger] = []
        progress: Progress = Silent()
        if world.is_main:
            stack.enter_context(lock_folder(out))
            num_evaluations = len(config.evaluate.steps(config.train.steps)) if options.evaluate else 0
            screen = RunProgress(out.name, config.train.steps, num_evaluations)
            stack.enter_context(screen)
            screen.message(f"ranks: {world.size} on {world.device.type}")
            progress = screen
        world.barrier()
        training, evaluate = _open(config, out, options, world, stop, progress.message)
        check_dataset(config, training)
        check_ranks(config, world)
        if not options.fresh:
            check_same_run(out, config, training, allow_changes=options.allow_changes)
        if world.is_main:  # nothing was deleted or written up to here, where all is known to fit
            if options.fresh:
                remove_run(out)
            loggers = [screen, *_loggers(config, out, options)]
        world.barrier()
        outcome = train(
            config,
            training,
            out,
            evaluate=evaluate,
            build=_reporting_builder(out, world, progress.message),
            stop=stop,
            progress=progress,
            world=world,
            loggers=loggers,
            allow_changes=options.allow_changes,
        )
        if met := bad_images_met(training):
            progress.message(met)
        return outcome


def _open(
    config: RunConfig,
    out: Path,
    options: TrainOptions,
    world: World,
    stop: StopRequest,
    say: Callable[[str], object],
) -> tuple[Dataset, Any]:
    """Training images, and the evaluator if one is wanted."""
    from rowdit.commands.loading import open_decoder
    from rowdit.commands.monitor import Monitor
    from rowdit.data import open_dataset

    size = config.model.image_size
    reading = {"num_classes": config.model.num_classes, **config.data.options()}
    training = open_dataset(config.data.source, "train", size, **reading)
    say(f"data: {training.fingerprint}")
    if not options.evaluate:
        return training, None
    held_out = open_dataset(config.data.source, "reference", size, **reading)
    decoder = open_decoder(config, None, world.device)
    # On several ranks nobody may leave a measurement alone: the others would wait for it.
    check_stop = stop.check if world.size == 1 else (lambda: None)
    return training, Monitor(config, held_out, out, world, decoder=decoder, check_stop=check_stop)


def _loggers(config: RunConfig, out: Path, options: TrainOptions) -> list[Logger]:
    from rowdit.train.config import to_dict
    from rowdit.train.loggers import TensorBoard, WeightsAndBiases

    out.mkdir(parents=True, exist_ok=True)
    loggers: list[Logger] = [TensorBoard(out)] if options.tensorboard else []
    if options.wandb:
        loggers.append(WeightsAndBiases(out, options.wandb, to_dict(config)))
    return loggers


def _reporting_builder(
    out: Path, world: World, say: Callable[[str], object]
) -> Callable[[nn.Module, OptimizerConfig], torch.optim.Optimizer]:
    """Builds the optimizer and says which parameters go where; the whole table is in RUN/optimizer.txt."""
    from rowdit.train.optimizers import build_optimizer

    def build(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
        optimizer = build_optimizer(model, config)
        if world.is_main and hasattr(optimizer, "describe"):
            out.mkdir(parents=True, exist_ok=True)
            (out / "optimizer.txt").write_text(optimizer.describe() + "\n", encoding="utf-8")
            sizes = {
                algorithm: [p for g in optimizer.param_groups if g["algorithm"] == algorithm for p in g["params"]]
                for algorithm in ("muon", "adamw")
            }
            parts = [
                f"{len(params)} parameters ({sum(p.numel() for p in params):,} numbers) by {algorithm}"
                for algorithm, params in sizes.items()
            ]
            say(f"optimizer: {config.name}, {', '.join(parts)}; {out / 'optimizer.txt'}")
        return optimizer

    return build


def parse(arguments: list[str]) -> tuple[TrainOptions, RunConfig, str]:
    """The verb's options, the run with what is overridden in it, and the recipe's name.

    Raises:
        ConfigError: no such recipe, or a label that it doesn't have.
    """
    from rowdit import recipes
    from rowdit.study.comparison import Comparison
    from rowdit.train.config import ConfigError, RunConfig

    has_recipe = bool(arguments) and not arguments[0].startswith("-")
    name = arguments[0] if has_recipe else "quickstart"
    recipe = recipes.load(name)
    label = _value_of("--label", arguments)
    if isinstance(recipe, Comparison):
        recipe = recipe.run_config(recipe.select(label)[-1], recipe.train.seed)
    elif label is not None:
        raise ConfigError(f"label = {label!r}: the recipe {name!r} is one run, with one optimizer")
    part = tyro.conf.arg(name="")  # no prefix: --out and --train.steps, not --options.out
    fields = [
        ("options", Annotated[TrainOptions, part], field(default_factory=TrainOptions)),
        ("config", Annotated[RunConfig, part], field(default_factory=lambda: recipe)),
    ]
    command = from_arguments(
        dataclasses.make_dataclass("Command", fields, frozen=True),
        f"rowdit train [{'|'.join(recipes.RECIPES)}]",
        arguments[1:] if has_recipe else arguments,
        description=" ".join((TrainOptions.__doc__ or "").partition("\n\n")[0].split()),
        config=(tyro.conf.AvoidSubcommands,),
    )
    return command.options, command.config, name


def _value_of(flag: str, arguments: list[str]) -> str | None:
    """The value of a flag that must be known before the others can be read."""
    for i, argument in enumerate(arguments):
        if argument == flag and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
    return None
