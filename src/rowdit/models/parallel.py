"""How an untouched DiT is spread over the ranks and made ready to train.

The order is fixed, and `build_model` is its only caller: build on meta, checkpoint activations, compile, shard,
materialise, write the initial weights. So no rank ever holds the whole model, and parameters keep their names and
(as DTensors) their shapes: what routes by name or saves by name needs to know nothing of this file.

Blocks are sharded one by one (FSDP2's `fully_shard`), everything else as one more group. In bf16 the blocks compute in
bf16 from fp32 master weights; embeddings and the final layer, a small share of the work, stay in fp32, because bf16
can't tell the time 998 from 1000.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from rowdit.models.dit import DiT, DiTConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ParallelConfig:
    """How a run is spread over its ranks. It changes rounding, memory and speed, never what is trained.

    Args:
        replicas: groups of ranks that each hold a whole sharded copy (HSDP); must divide the number of ranks. 1 shards
            over all ranks (FSDP2), as many as there are ranks shards nothing.
        param_dtype: what the blocks compute in; master weights, momentum and averages are fp32 either way.
        reduce_dtype: what gradients are summed over the ranks in.
        reshard_after_forward: free a block's gathered weights after its forward and gather them again for its
            backward: less memory, more traffic.
        activation_checkpointing: keep a block's input alone and compute the rest again in its backward.
        compile: each block through `torch.compile`; the first steps take tens of seconds.
        accumulate_unsharded: of a step's micro-batches only the last one's gradients travel; until then each rank
            holds a whole model's gradients. If not, each micro-batch's gradients are summed over the ranks that share
            a copy at once, and over the replicas with the last one.
    """

    replicas: int = 1
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False
    compile: bool = False
    accumulate_unsharded: bool = False

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas = {self.replicas!r}: must be an integer >= 1")
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(DTYPES)}")

    @property
    def needs_sharding(self) -> bool:
        """Whether even one process needs `fully_shard`: for bf16 compute over fp32 weights."""
        return self.param_dtype != "float32"


def build_model(
    config: DiTConfig,
    parallel: ParallelConfig,
    *,
    seed: int | None,
    device: torch.device | str = "cpu",
    mesh: DeviceMesh | None = None,
) -> DiT:
    """A DiT on its device, sharded over `mesh`, with the initial weights of `seed`: the same at every number of ranks.

    Args:
        config: its shape.
        parallel: what to do to it.
        seed: of the initial weights; None leaves them unset, for weights that are loaded next.
        device: of this rank.
        mesh: one axis (FSDP2) or two, replicas and shards (HSDP); None leaves a plain model.

    Raises:
        ValueError: bf16 without a mesh.
    """
    with torch.device("meta"):
        model = DiT(config)
    if parallel.activation_checkpointing:
        checkpoint_blocks_(model)
    if parallel.compile:
        compile_blocks_(model)
    if mesh is not None:
        shard_(model, parallel, mesh)
    elif parallel.needs_sharding:
        raise ValueError(f"param_dtype = {parallel.param_dtype!r} needs a mesh, if only of one rank")
    model.to_empty(device=device)
    if seed is None:
        model.init_buffers()
    else:
        model.init_weights(seed)
    return model


def checkpoint_blocks_(model: DiT) -> None:
    """Makes each block keep only its inputs for the backward pass."""
    from torch.utils.checkpoint import checkpoint

    for block in _blocks(model):
        # The instance's forward, not a wrapping module: names stay. The blocks draw no random numbers.
        forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        object.__setattr__(block, "forward", forward)


def compile_blocks_(model: DiT) -> None:
    """Makes each block's forward a compiled one; equal blocks share the code. FSDP2's hooks stay outside of it."""
    for block in _blocks(model):
        object.__setattr__(block, "forward", torch.compile(block.forward))


def shard_(model: DiT, parallel: ParallelConfig, mesh: DeviceMesh) -> None:
    """`fully_shard` on each block, and on the rest as one group."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # The output is only read, never written to in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    reduce_dtype = DTYPES[parallel.reduce_dtype]
    compute_dtype = DTYPES[parallel.param_dtype]

    def policy(last: bool) -> MixedPrecisionPolicy:
        output = torch.float32 if last and compute_dtype != torch.float32 else None
        return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, output_dtype=output)

    blocks = _blocks(model)
    for i, block in enumerate(blocks):
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy(last=i == len(blocks) - 1),
            reshard_after_forward=parallel.reshard_after_forward,
        )
    rest = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    # The rest is needed first in the backward pass, so it stays gathered after the forward.
    fully_shard(model, mesh=mesh, mp_policy=rest, reshard_after_forward=False)


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the model."""
    return hasattr(model, "set_requires_gradient_sync")


def set_last_micro_batch_(model: nn.Module, last: bool, parallel: ParallelConfig) -> None:
    """Before each backward of an accumulated step: which of the gradients' sums are due."""
    if not is_sharded(model):
        return
    sharded = cast("FSDPModule", model)
    if parallel.accumulate_unsharded:
        sharded.set_requires_gradient_sync(last)
    else:
        sharded.set_requires_all_reduce(last)
    sharded.set_is_last_backward(last)


def reshard_(model: nn.Module) -> None:
    """Gives back what a forward without a backward has left gathered: else the next one would compute with old weights,
    and a checkpoint would hold whole ones."""
    if is_sharded(model):
        for module in model.modules():
            if hasattr(module, "reshard"):
                cast(Any, module).reshard()


@contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """Within the context the model may be run without gradients; around it each rank holds its shard alone."""
    reshard_(model)
    try:
        yield
    finally:
        reshard_(model)


def _blocks(model: DiT) -> list[nn.Module]:
    return list(model.blocks)
