"""An estimate as text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rowdit.cost.estimate import Estimate
from rowdit.cost.hardware import Cluster
from rowdit.cost.optimizer import Routed
from rowdit.cost.predict import StepTime

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


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, notes: bool = False) -> str:
    """Columns, numbers to the right; the first ``left`` ones and, if it holds notes, the last to the left."""
    columns = len(head)
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(columns)]
    words = {*range(left), *([columns - 1] if notes else [])}
    rule = ["-" * width if not notes or i < columns - 1 else "" for i, width in enumerate(widths)]
    return "\n".join(
        "  ".join(cell.ljust(widths[i]) if i in words else cell.rjust(widths[i]) for i, cell in enumerate(row)).rstrip()
        for row in (head, rule, *rows)
    )


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
    return table(("memory per rank", "bytes", ""), rows, notes=True)


def describe_time(time: StepTime, cluster: Cluster, hangs_on: Mapping[str, float]) -> str:
    """Where the milliseconds of a step go, and what they hang on."""
    rows = [
        ("forward and backward", time.compute, "matrix products of all micro-batches"),
        ("FSDP, not hidden", time.fsdp_exposed, f"of {1e3 * time.fsdp_traffic:,.1f} ms of messages"),
        ("averages", time.averages, ""),
    ]
    for kind, step in (("refresh", time.refresh), ("row step", time.row)):
        says = (
            f"memory {1e3 * step.memory:,.2f}, products {1e3 * step.products:,.2f}, waiting {1e3 * step.exposed:,.2f}"
        )
        if step.traffic:
            says += f" of {1e3 * step.traffic:,.2f} ms of messages"
        rows.append((f"optimizer, {kind}", step.total, says))
    share = 100 * time.optimizer / time.total
    rows.append(("optimizer, mean", time.optimizer, f"{share:.1f} % of the step"))
    rows.append(("step, mean", time.total, ""))
    cells = [(name, f"{1e3 * seconds:,.2f}", says) for name, seconds, says in rows]
    body = [table((f"time on {cluster.name}", "ms", ""), cells, notes=True)]
    (first, effect), *others = hangs_on.items()
    more = ", ".join(f"{name} {100 * value:.1f} %" for name, value in others[:2] if value >= 0.0005)
    body.append(
        f"hangs most on: {first}; if that is a fifth less, a step takes {100 * effect:.1f} % longer"
        + (f" (then: {more})" if more else "")
    )
    return "\n".join(body)


def time_dict(time: StepTime, cluster: Cluster, hangs_on: Mapping[str, float]) -> dict[str, Any]:
    """The same as plain data, in seconds."""
    return {
        "cluster": dataclasses.asdict(cluster),
        "compute": time.compute,
        "fsdp_exposed": time.fsdp_exposed,
        "fsdp_traffic": time.fsdp_traffic,
        "averages": time.averages,
        "optimizer_refresh": {**dataclasses.asdict(time.refresh), "total": time.refresh.total},
        "optimizer_row": {**dataclasses.asdict(time.row), "total": time.row.total},
        "optimizer": time.optimizer,
        "step": time.total,
        "longer_if_a_fifth_less": dict(hangs_on),
    }
