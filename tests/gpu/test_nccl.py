"""The tests of tests/distributed once more, on CUDA devices with NCCL: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
@pytest.mark.timeout(1800)
def test_the_distributed_tests_on_cuda() -> None:
    """As many ranks as there are devices; the cases of larger W are skipped."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/distributed"]
    environment = {**os.environ, "ROWMUON_TEST_DEVICE": "cuda"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
