"""How much a verb may ask of this machine: processes, threads, memory. Told before anything is started or made.

What is asked for beyond it would end in an allocator's message, a killed process, or a machine that no longer answers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rowdit.train.plain import ConfigError

if TYPE_CHECKING:
    from rowdit.train.config import RunConfig

PROCESSES_PER_CORE = 4
FEWEST_PROCESSES = 32
"""Reading may wait for a disk, so there may be more processes than cores, and on a small machine still some."""
CGROUP = Path("/sys/fs/cgroup/memory.max")


def most_processes() -> int:
    """That one command may start here."""
    return max(FEWEST_PROCESSES, PROCESSES_PER_CORE * (os.cpu_count() or 1))


def check_count(name: str, value: int | None, *, least: int = 1, most: int | None = None) -> None:
    """Refuses a number of things out of range; None is in order.

    Raises:
        ConfigError: naming it, its value and its range.
    """
    if value is not None and value < least:
        raise ConfigError(f"{name} = {value}: must be an integer >= {least}")
    if value is not None and most is not None and value > most:
        raise ConfigError(f"{name} = {value}: must be an integer <= {most}")


def check_processes(name: str, value: int, *, least: int = 1) -> None:
    """Refuses a number of processes or threads that this machine has no use for.

    Args:
        name: of the option or field.
        value: what was given.
        least: 0 where none is a choice too.

    Raises:
        ConfigError: out of [least, `most_processes()`].
    """
    check_count(name, value, least=least)
    if value > most_processes():
        raise ConfigError(
            f"{name} = {value}: must be <= {most_processes()}: this machine has {os.cpu_count()} cores, and more than "
            f"{PROCESSES_PER_CORE} a core would only wait for each other"
        )


def memory_bytes() -> int | None:
    """Of this machine, or of the part of it that this process may use; None where the system doesn't tell."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    try:
        return min(found, int(CGROUP.read_text()))
    except (OSError, ValueError):  # no cgroup, or "max"
        return found


def check_memory(what: str, num_bytes: int, way_out: str) -> None:
    """Refuses what can't fit into the memory of this machine, whatever else runs on it.

    Args:
        what: with its values, such as "batch_size 1000000000 at image_size 64".
        num_bytes: that it takes at the very least.
        way_out: what to change.

    Raises:
        ConfigError: more than there is.
    """
    there = memory_bytes()
    if there is not None and num_bytes > there:
        raise ConfigError(
            f"{what} takes at least {_readable(num_bytes)} of memory, this machine has {_readable(there)}: {way_out}"
        )


def check_images(
    num: int, image_size: int | None, channels: int | None, *, name: str = "batch_size", bytes_each: int = 1
) -> None:
    """Refuses images that don't fit at once.

    Args:
        num: at once.
        image_size: their side in pixels; None where only the source knows it.
        channels: of each; None is taken as 1.
        name: of the option that says how many.
        bytes_each: of a number.

    Raises:
        ConfigError: they take more memory than there is.
    """
    num_bytes = bytes_each * num * (image_size or 1) ** 2 * (channels or 1)
    size = "" if image_size is None else f" at image_size {image_size}"
    check_memory(f"{name} {num}{size}", num_bytes, f"give a smaller {name}" + (" or image_size" if size else ""))


def check_run(config: RunConfig, num_ranks: int) -> None:
    """Refuses a run that no rank could hold, by what surely is in memory at a time: no estimate, for that see
    `rowdit plan`.

    Raises:
        ConfigError: naming what takes more memory than there is, or more processes than make sense.
    """
    check_processes("data.num_workers", config.data.num_workers, least=0)
    model, train, evaluate = config.model, config.train, config.evaluate
    share = -(-train.batch_size // num_ranks)
    micro = min(share, train.micro_batch_size or share)
    check_images(share, model.image_size, model.in_channels, name="train.batch_size")
    # of a micro-batch the images and their noise in float32, and what each block keeps for its backward pass
    way_out = "give a smaller train.micro_batch_size, or a smaller model"
    kept = 1 if config.parallel.activation_checkpointing else 4
    token_bytes = kept * model.depth * model.hidden_size * (2 if config.parallel.param_dtype == "bfloat16" else 4)
    image_bytes = 8 * model.in_channels * model.image_size**2 + model.num_tokens * token_bytes
    check_memory(f"a micro-batch of {micro} images of this model", micro * image_bytes, way_out)
    check_images(
        max(evaluate.num_samples, evaluate.grid_images),
        model.image_size,
        model.in_channels,
        name="evaluate.num_samples",
    )
    D = model.hidden_size
    blocks = model.depth * D * (10 * D + 2 * model.mlp_size)
    ends = D * (model.num_classes + 2 * model.in_channels * model.patch_size**2)
    copies = 2 + len(train.ema_decays) + len(train.ema_stds)  # weights and averages, in float32
    check_memory(
        f"a model of hidden_size {D} and depth {model.depth}, with its averages,",
        4 * copies * (blocks + ends) * config.parallel.replicas // num_ranks,
        "take a smaller model, or more ranks",
    )


def _readable(num_bytes: int) -> str:
    units = ("bytes", "KB", "MB", "GB", "TB", "PB")
    power = min(len(units) - 1, max(0, (len(str(num_bytes)) - 1) // 3))
    return f"{num_bytes / 1000**power:.3g} {units[power]}"
