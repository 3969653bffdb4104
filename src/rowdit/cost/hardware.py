"""Clusters as data: what a datasheet says, and how much of it programs get. Every figure has its source.

Rates are per GPU and direction, in units per second. "Peak" is the datasheet's; "achieved" is what the best programs
reach, and those are what times are computed with.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Link:
    """A kind of connection between ranks.

    Args:
        rate: bytes per second that a rank sends while it receives as many.
        achieved: share of it that large collectives reach.
        base_seconds: of starting a collective.
        hop_seconds: of each further rank in a ring, and of each further peer in an all-to-all.
        source: of these figures.
        all_to_all: share of what large collectives reach that an all-to-all does.
    """

    rate: float
    achieved: float
    base_seconds: float
    hop_seconds: float
    source: str = ""
    all_to_all: float = 1.0

    @property
    def speed(self) -> float:
        """Bytes per second as achieved."""
        return self.rate * self.achieved


@dataclass(frozen=True)
class Cluster:
    """Equal machines of equal GPUs.

    Args:
        name: for tables.
        peak_flops: dense bf16 matrix products, FLOP/s.
        float32_flops: the same in float32, without TF32.
        matmul: share of it that the best large product reaches.
        model: share of the best product's rate that forward and backward of a transformer reach, attention, norms and
            launches included. Depends on the model and on how it is run more than on the hardware.
        newton_schulz: the same of Newton-Schulz, whose products are batched and of a block's size.
        memory_rate: bytes per second to and from the GPU's memory.
        memory: share of it that elementwise kernels reach.
        memory_bytes: of a GPU.
        ranks_per_node: GPUs of one machine.
        inside, between: links within a machine and between machines; of the latter every rank has one.
        source: of the GPU's figures.
        overlaps: whether FSDP's messages travel beside computing. FSDP2 on a CPU waits for each.
        scatter_passes: what a reduce-scatter sends, over what it must. gloo's is an all-reduce: 2.
    """

    name: str
    peak_flops: float
    float32_flops: float
    matmul: float
    model: float
    newton_schulz: float
    memory_rate: float
    memory: float
    memory_bytes: float
    ranks_per_node: int
    inside: Link
    between: Link
    source: str = ""
    overlaps: bool = True
    scatter_passes: float = 1.0

    @property
    def matmul_speed(self) -> float:
        """FLOP/s of the best product."""
        return self.peak_flops * self.matmul

    @property
    def memory_speed(self) -> float:
        return self.memory_rate * self.memory


_NCCL = "latencies: NCCL's own tuning table (src/graph/tuning.cc: ring, simple protocol)"
_NDR = "400 Gbit/s a GPU; NCCL gets 46 to 48 of 50 GB/s (NVIDIA/nccl-tests, issue 290); "
_MAMF = "largest measured bf16 product: stas00/ml-engineering, compute/accelerator, table of achievable matmul FLOPS"

NVLINK3 = Link(300e9, 0.65, 8.4e-6, 3.4e-6, "600 GB/s both ways (A100 datasheet); about 195 GB/s measured; " + _NCCL)
NVLINK4 = Link(450e9, 0.80, 8.4e-6, 3.4e-6, "900 GB/s both ways (H100 datasheet); share achieved: assumed; " + _NCCL)
NVLINK5 = Link(900e9, 0.80, 8.4e-6, 3.4e-6, "1.8 TB/s both ways (B200 datasheet); share achieved: assumed; " + _NCCL)
HDR = Link(25e9, 0.94, 8.4e-6, 14e-6, "200 Gbit/s a GPU (DGX A100 datasheet); share achieved: as NDR's; " + _NCCL)
NDR = Link(50e9, 0.94, 8.4e-6, 14e-6, _NDR + _NCCL)
ETHERNET_100 = Link(
    12.5e9, 0.75, 8.4e-6, 30e-6, "100 Gbit/s a GPU, RoCE; 600 of 800 Gbit/s (NVIDIA/nccl, issue 495); latency assumed"
)
ETHERNET_400 = Link(
    50e9, 0.75, 8.4e-6, 30e-6, "400 Gbit/s a GPU, RoCE; share achieved as at 100 Gbit/s; latency assumed"
)

# What no datasheet says. 0.5 of an achievable 0.8 is a model FLOPs utilisation of 40 %, a usual figure of transformers
# of these sizes; 0.75 and 0.85 are guesses of the same kind. `rowdit plan` says how much hangs on each.
_SHARES = {"model": 0.5, "newton_schulz": 0.75, "memory": 0.85, "ranks_per_node": 8}

# fmt: off
_ROWS = (
    # name             bf16      fp32     matmul  memory B/s  bytes   inside   between       datasheet
    ("a100",           312e12,   19.5e12, 0.859,  2.039e12,   80e9,   NVLINK3, HDR,          "A100 80GB SXM"),
    ("h100",           989.4e12, 66.9e12, 0.803,  3.35e12,    80e9,   NVLINK4, NDR,          "H100 SXM"),
    ("h100-ethernet",  989.4e12, 66.9e12, 0.803,  3.35e12,    80e9,   NVLINK4, ETHERNET_400, "H100 SXM"),
    ("h100-100g",      989.4e12, 66.9e12, 0.803,  3.35e12,    80e9,   NVLINK4, ETHERNET_100, "H100 SXM"),
    ("h200",           989.4e12, 66.9e12, 0.803,  4.8e12,     141e9,  NVLINK4, NDR,          "H200 SXM"),
    ("b200",           2250e12,  80e12,   0.776,  8.0e12,     180e9,  NVLINK5, NDR,          "DGX B200"),
)
# fmt: on

CLUSTERS: Mapping[str, Cluster] = MappingProxyType(
    {
        name: Cluster(
            name,
            peak,
            float32,
            matmul,
            memory_rate=memory_rate,
            memory_bytes=size,
            inside=inside,
            between=between,
            source=f"NVIDIA {sheet} datasheet; {_MAMF}",
            **_SHARES,  # type: ignore[arg-type]
        )
        for name, peak, float32, matmul, memory_rate, size, inside, between, sheet in _ROWS
    }
)


class ClusterError(ValueError):
    """No such cluster, or a file that describes none."""


def cluster(name: str) -> Cluster:
    """The cluster of that name, or of a JSON file with the fields of :class:`Cluster`, links as tables.

    A file may say "like" and a known name, and then only what differs.

    Raises:
        ClusterError: neither; the nearest name, or the field, is named.

    Example:
        >>> round(cluster("h100").matmul_speed / 1e12)
        794
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    if not name.endswith(".json"):
        near = difflib.get_close_matches(name, CLUSTERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(CLUSTERS)}"
        raise ClusterError(f"there is no cluster {name!r}; {hint}; or name a .json file")
    try:
        data = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ClusterError(f"{name} can't be read: {error}") from None
    if not isinstance(data, dict):
        raise ClusterError(f"{name} should be an object with the fields of a cluster, but is a {type(data).__name__}")
    return cluster_from_dict(data, name)


def cluster_from_dict(data: Mapping[str, Any], where: str) -> Cluster:
    """See :func:`cluster`."""
    values = dict(data)
    like = values.pop("like", None)
    if like is not None and like not in CLUSTERS:
        raise ClusterError(f"{where}: like = {like!r}; there are {', '.join(CLUSTERS)}")
    base = {f.name: getattr(CLUSTERS[str(like)], f.name) for f in dataclasses.fields(Cluster)} if like else {}
    for key in ("inside", "between"):
        if key not in values:
            continue
        if not isinstance(values[key], Mapping):
            raise ClusterError(f"{where}: {key} = {values[key]!r}: must be an object with the fields of a link")
        values[key] = _made(Link, values[key], f"{where}: {key}")
    return _made(Cluster, {**base, **values}, where)


def _made(kind: Any, values: Mapping[str, object], where: str) -> Any:
    names = [field.name for field in dataclasses.fields(kind)]
    for key in values:
        if key not in names:
            raise ClusterError(f"{where}: unknown key {key!r}; there are {', '.join(names)}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ClusterError(f"{where}: {error}") from None
