"""An estimate as text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rowdit.cost.estimate import Estimate
from rowdit.cost.optimizer import Routed

_UNITS = ("", "K", "M", "G", "T", "P", "E")


def quantity(value: float, unit: str) -> str:
    """Three digits and a decimal prefix.

    Example:
        >>> quantity(12_076_646_400, "B"), quantity(0, "FLOP"), quantity(999.9e9, "B")
        ('12.1 GB', '0 FLOP', '1 TB')
    """
    if value < 1:
        return f"{value:.3g} {unit}" if value else f"0 {unit}"
    prefix = 0
    while value >= 999.5 and prefix + 1 < len(_UNITS):
        value, prefix = value / 1000, prefix + 1
    return f"{value:.3g} {_UNITS[prefix]}{unit}"


def describe(found: Estimate) -> str:
    """Parameters and routing, batch, optimizer, memory."""
    parts = [_head(found), _parameters(found.optimizer.parameters), _batch(found), _optimizer(found), _memory(found)]
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns; the first ``left`` ones are aligned to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _head(found: Estimate) -> str:
    mesh, model = found.mesh, found.config.model
    if mesh.world_size == 1:
        held = "1 rank"
    elif mesh.num_replicas == 1:
        held = f"{mesh.world_size} ranks, every parameter in Shard(0) over all of them (FSDP2)"
    else:
        held = f"{mesh.world_size} ranks: {mesh.num_replicas} replicas of {mesh.num_shards} shards (HSDP)"
    return (
        f"model      {found.num_parameters:,} parameters: {model.depth} blocks of width {model.hidden_size}, "
        f"{model.num_tokens} tokens of {model.in_channels} x {model.patch_size} x {model.patch_size}\n"
        f"ranks      {held}\n"
        f"optimizer  {_optimizer_words(found)}"
    )


def _optimizer_words(found: Estimate) -> str:
    config = found.config.optimizer
    if config.name == "adamw":
        return "AdamW"
    words = "Muon" if config.name == "muon" else f"Periodic Row-wise Muon, period {config.period}"
    return f"{words}, refresh by {found.refresh}"


def _parameters(parameters: Sequence[Routed]) -> str:
    alike: dict[tuple, int] = {}
    for p in parameters:
        kind = (re.sub(r"\.\d+\.", ".*.", p.name, count=1) if p.name.startswith("blocks.") else p.name,)
        alike[(*kind, p.shape, p.algorithm, p.chunks)] = alike.get((*kind, p.shape, p.algorithm, p.chunks), 0) + 1
    rows = []
    for (name, shape, algorithm, chunks), count in alike.items():
        numel = count * _numel(shape)
        how = f"{algorithm}, {chunks} chunks" if chunks > 1 else algorithm
        rows.append((name, how, str(count), "x".join(map(str, shape)) or "scalar", f"{numel:,}"))
    total = sum(p.numel for p in parameters)
    muon = sum(p.numel for p in parameters if p.algorithm == "muon")
    rows.append(("all", f"{100 * muon / total:.1f} % Muon", str(len(parameters)), "", f"{total:,}"))
    return table(("parameter", "goes to", "number", "shape", "elements"), rows, left=2)


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _batch(found: Estimate) -> str:
    batch = found.batch
    tokens = batch.images_per_rank * batch.num_tokens
    return (
        f"batch      {batch.num_images:,} images a step = {found.mesh.world_size} ranks x {batch.images_per_rank} "
        f"= {batch.num_micro_batches} forward pass(es) of {batch.micro_batch_size}; "
        f"{tokens:,} tokens a rank\n"
        f"compute    {quantity(found.model_flops_per_rank, 'FLOP')} a rank and step, forward and backward"
    )


def _optimizer(found: Estimate) -> str:
    cost = found.optimizer
    if found.refresh == "none":
        return "the optimizer sends nothing and multiplies no matrices"
    rows = []
    for kind, step in (("refresh", cost.refresh), ("row step", cost.row)):
        sent, flops = step.bytes_sent, step.flops
        rows.append(
            (
                kind,
                quantity(sent.mean, "B"),
                quantity(sent.max, "B"),
                quantity(flops.mean, "FLOP"),
                quantity(flops.max, "FLOP"),
                str(step.num_collectives),
                quantity(step.peak_bytes, "B"),
            )
        )
    sent_mean, sent_max = cost.mean("bytes_sent")
    flops_mean, flops_max = cost.mean("flops")
    rows.append(
        (
            f"mean of steps ({100 * cost.refresh_share:.0f} % refreshes)",
            quantity(sent_mean, "B"),
            quantity(sent_max, "B"),
            quantity(flops_mean, "FLOP"),
            quantity(flops_max, "FLOP"),
            "",
            "",
        )
    )
    head = ("optimizer, by rank", "sent, mean", "sent, most", "products, mean", "most", "collectives", "memory, most")
    return table(head, rows)


def _memory(found: Estimate) -> str:
    memory = found.memory
    says = {
        "weights": "this rank's part",
        "gradients": "this rank's part, reduced",
        "optimizer": "state: momentum, AdamW's moments",
        "ema": "this rank's part",
        "buffers": "whole on every rank",
        "activations": f"forward and backward of {found.batch.micro_batch_size} image(s)",
        "unsharded": "gathered by FSDP and not yet reduced",
        "refresh": "buffers of the optimizer's step",
    }
    rows = [(name, quantity(value, "B"), says[name]) for name, value in memory.parts().items()]
    rows.append(("peak", quantity(memory.peak, "B"), "the most at a time; no sum, for they aren't all alive at once"))
    lines = table(("memory per rank", "bytes", ""), [(a, b, "") for a, b, _ in rows]).splitlines()
    return "\n".join([*lines[:2], *(f"{line}  {row[2]}" for line, row in zip(lines[2:], rows, strict=True))])
