"""Seconds of a training step on a cluster: forward, backward, FSDP's traffic, optimizer; of each kind of step.

Nothing here is measured on such a cluster. It is arithmetic on the plan that the runtime executes and on the figures of
`rowdit.cost.hardware`, and :func:`sensitivities` says how much hangs on each of those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rowdit.cost.collectives import Members, all_to_all_latency, all_to_all_pace, ring_seconds
from rowdit.cost.estimate import Estimate
from rowdit.cost.hardware import Cluster, Link
from rowdit.cost.mesh import RankMesh
from rowdit.cost.pipeline import OptimizerTime, refresh_time
from rowdit.cost.traffic import gathered_bytes, most_moved, owned_counts
from rowdit.models.parallel import DTYPES
from rowmuon.buckets import Bucket
from rowmuon.plan import StepPlan
from rowmuon.stacks import Renewal

_ROW_BYTES = 5 * 4  # read gradient, momentum, weights; write momentum and weights: memory is passed over once
_ADAMW_BYTES = 7 * 4  # read gradient, two moments, weights; write all but the gradient
_EMA_BYTES = 3 * 4


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the busiest rank.

    compute: forward and backward of all micro-batches.
    fsdp_exposed, fsdp_traffic: weights gathered and gradients reduced: what isn't hidden, and all of it.
    averages: of the weights.
    refresh, row: the optimizer, in either kind of step.
    refresh_share: refreshes among all steps.
    """

    compute: float
    fsdp_exposed: float
    fsdp_traffic: float
    averages: float
    refresh: OptimizerTime
    row: OptimizerTime
    refresh_share: float

    @property
    def optimizer(self) -> float:
        """Mean over a period."""
        return self.refresh_share * self.refresh.total + (1 - self.refresh_share) * self.row.total

    @property
    def rest(self) -> float:
        """All but the optimizer."""
        return self.compute + self.fsdp_exposed + self.averages

    @property
    def total(self) -> float:
        """Mean over a period."""
        return self.rest + self.optimizer


def predict(found: Estimate, cluster: Cluster) -> StepTime:
    """The time of a step of the run that was estimated."""
    compute, exposed, traffic = _passes(found, cluster)
    cost, mesh = found.optimizer, found.mesh
    local = {name: 0 for name in ("muon", "adamw", "frozen")}
    for parameter in cost.parameters:
        local[parameter.algorithm] += mesh.numel(parameter.shape)
    train = found.config.train
    num_averages = 1 + len(train.ema_decays) + len(train.ema_stds)
    averages = num_averages * _EMA_BYTES * (local["muon"] + local["adamw"]) / cluster.memory_speed
    adamw = _ADAMW_BYTES * local["adamw"] / cluster.memory_speed
    row = OptimizerTime(adamw + _ROW_BYTES * local["muon"] / cluster.memory_speed, 0.0, 0.0, 0.0)
    refresh = row
    if cost.refresh_plan:
        refresh = refresh_time(cost.refresh_plan, cost.rank_works, _groups(mesh, cluster), cluster, adamw)
    if cost.refresh_plan and cost.row_plan:
        refresh = _with_gram(refresh, cost.refresh_plan, mesh, cluster)
        row = _with_gram(row, cost.row_plan, mesh, cluster)
    return StepTime(compute, exposed, traffic, averages, refresh, row, cost.refresh_share)


# ---------------------------------------------------------------------------------------------------------------------
# forward and backward


def _passes(found: Estimate, cluster: Cluster) -> tuple[float, float, float]:
    """Compute, exposed and all seconds of messages of a step's forward and backward passes."""
    config, batch, parallel = found.config, found.batch, found.config.parallel
    in_float32 = parallel.param_dtype == "float32"
    speed = (cluster.float32_flops if in_float32 else cluster.peak_flops) * cluster.matmul * cluster.model
    again = 4 / 3 if parallel.activation_checkpointing else 1.0  # the forward pass is computed twice
    compute = again * found.model_flops_per_rank / speed
    mesh = found.mesh
    if mesh.world_size == 1:
        return compute, 0.0, 0.0
    depth, num_micro = config.model.depth, batch.num_micro_batches
    passes = 4 if parallel.activation_checkpointing else 3
    forward = compute / num_micro / depth / passes  # of one block; the ends are small
    block, root = (_messages(found, cluster, root=root) for root in (False, True))
    exposed = traffic = 0.0
    for micro in range(num_micro):
        last = micro == num_micro - 1
        reduces = last or not parallel.accumulate_unsharded
        regather = block.gather if parallel.reshard_after_forward else 0.0
        back, root_back = (
            (part.scatter if reduces else 0.0) + (part.sum_up if last else 0.0) for part in (block, root)
        )
        # The first block's weights and the last block's gradients wait for nobody; the others' go beside computing.
        exposed += block.gather + (depth - 1) * max(0.0, block.gather - forward)
        exposed += regather + (depth - 1) * max(0.0, regather + back - (passes - 1) * forward) + back
        exposed += root.gather + root_back
        traffic += depth * (block.gather + regather + back) + root.gather + root_back
    if not cluster.overlaps:
        exposed = traffic
    return compute, exposed, traffic


@dataclass(frozen=True)
class _Messages:
    """Seconds to gather the weights of one of FSDP's units, to reduce its gradients, to sum them over the replicas."""

    gather: float
    scatter: float
    sum_up: float


def _messages(found: Estimate, cluster: Cluster, *, root: bool) -> _Messages:
    """Of a block, or of all that is outside of the blocks, which FSDP keeps in float32."""
    mesh, parallel = found.mesh, found.config.parallel
    shards, replicas = _groups(mesh, cluster)
    known = found.optimizer.parameters
    names = [p for p in known if (not p.name.startswith("blocks.") if root else p.name.startswith("blocks.0."))]
    numel = mesh.num_shards * sum(mesh.numel(p.shape) for p in names)  # padded
    share = (mesh.num_shards - 1) / mesh.num_shards
    weight_size = 4 if root else DTYPES[parallel.param_dtype].itemsize
    reduce_bytes = numel * DTYPES[parallel.reduce_dtype].itemsize
    gather = ring_seconds(share * numel * weight_size, shards, cluster)
    scatter = cluster.scatter_passes * ring_seconds(share * reduce_bytes, shards, cluster)
    if mesh.num_replicas == 1:
        return _Messages(gather, scatter, 0.0)
    part = (mesh.num_replicas - 1) / mesh.num_replicas * reduce_bytes / mesh.num_shards
    return _Messages(gather, scatter, 2 * ring_seconds(part, replicas, cluster))


def _groups(mesh: RankMesh, cluster: Cluster) -> tuple[Members, Members]:
    """A shard group and a replica group; consecutive ranks hold consecutive shards."""
    size = cluster.ranks_per_node
    shards = Members.of(range(mesh.num_shards), size)
    return shards, Members.of(range(0, mesh.world_size, mesh.num_shards), size)


def _with_gram(time: OptimizerTime, plan: StepPlan, mesh: RankMesh, cluster: Cluster) -> OptimizerTime:
    """And what Gram row steps take: a refresh's products in float32 and its messages, which nothing is taken to hide.

    A round of factors takes as long as the rank with most of them; Gram matrices as long as rank 0, which has as many
    rows as any.
    """
    if not plan.renewed and not plan.gram_rows:
        return time
    peak = cluster.float32_flops * cluster.matmul if plan.renewed else cluster.matmul_speed
    work = 0
    for entry in (plan.entries[index] for index in (*plan.renewed, *plan.gram_rows)):
        assert entry.gram is not None
        work += entry.gram.product_flops(entry.layout.box(0).shape[1])
    shards, _ = _groups(mesh, cluster)
    seconds = 0.0
    for renewal in plan.renewals:
        work += sum(_most_owned(part.there) * part.there.num_flops for part in renewal.rounds)
        if not renewal.is_local:
            seconds += _renewal_seconds(renewal, shards, cluster)
    products = work / (peak * cluster.newton_schulz)
    return OptimizerTime(time.memory, time.products + products, time.exposed + seconds, time.traffic + seconds)


def _most_owned(bucket: Bucket) -> int:
    return len(bucket.matrices) if bucket.kind == "local" else max(owned_counts(bucket))


def _renewal_seconds(renewal: Renewal, shards: Members, cluster: Cluster) -> float:
    """Of all messages, one after another."""
    latency, pace = all_to_all_latency(shards, cluster), all_to_all_pace(shards, cluster)
    seconds = 2 * ring_seconds(renewal.scale_bytes / 2, shards, cluster)
    for stack in renewal.stacks:
        sums, traces = stack.bytes_sent(0)
        seconds += latency + pace * sums + 2 * ring_seconds(traces / 2, shards, cluster)
    for part in renewal.rounds:
        moved = most_moved(part.there)
        seconds += 2 * latency + pace * moved * (part.there.comm_dtype.itemsize + part.back.comm_dtype.itemsize)
        seconds += sum(ring_seconds(gathered_bytes(bucket), shards, cluster) for bucket in part.gathers)
    return seconds


# ---------------------------------------------------------------------------------------------------------------------
# what hangs on what


def sensitivities(found: Estimate, cluster: Cluster, factor: float = 0.8) -> dict[str, float]:
    """How much longer a step takes, as a share, if a figure is ``factor`` of the assumed one; the largest first."""
    usual = predict(found, cluster).total
    changed = {name: predict(found, change(cluster, factor)).total / usual - 1 for name, change in _ASSUMPTIONS.items()}
    return dict(sorted(changed.items(), key=lambda item: -item[1]))


def _scaled(name: str) -> Callable[[Cluster, float], Cluster]:
    return lambda cluster, factor: dataclasses.replace(cluster, **{name: getattr(cluster, name) * factor})


def _link(name: str) -> Callable[[Cluster, float], Cluster]:
    def change(cluster: Cluster, factor: float) -> Cluster:
        link: Link = getattr(cluster, name)
        changed: dict[str, Any] = {name: dataclasses.replace(link, achieved=link.achieved * factor)}
        return dataclasses.replace(cluster, **changed)

    return change


def _slower_start(cluster: Cluster, factor: float) -> Cluster:
    def slower(link: Link) -> Link:
        return dataclasses.replace(link, base_seconds=link.base_seconds / factor, hop_seconds=link.hop_seconds / factor)

    return dataclasses.replace(cluster, inside=slower(cluster.inside), between=slower(cluster.between))


_ASSUMPTIONS: dict[str, Callable[[Cluster, float], Cluster]] = {
    "model's share of the matmul rate": _scaled("model"),
    "Newton-Schulz's share of the matmul rate": _scaled("newton_schulz"),
    "matmul rate": _scaled("matmul"),
    "memory rate": _scaled("memory"),
    "rate of the links inside a machine": _link("inside"),
    "rate of the links between machines": _link("between"),
    "latencies": _slower_start,
}
