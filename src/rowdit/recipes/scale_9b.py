"""A DiT of 9B parameters with Periodic Row-wise Muon, on the latents of 256 x 256 images.

    rowdit plan scale_9b --world-size 256                             # memory, bytes, FLOPs; needs no GPU
    torchrun --nnodes 32 --nproc-per-node 8 ... -m rowdit train scale_9b --data.source latents:OUT

machine   256 GPUs of 80 GB
gave      not run
"""

from __future__ import annotations

from rowdit.recipes._scale import scale_run
from rowdit.train.config import RunConfig


def recipe() -> RunConfig:
    """See the module and `rowdit.recipes._scale`."""
    return scale_run("9B")
