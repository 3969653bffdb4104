"""The row step on a CPU: `row_step.cpp`, built by the machine's C++ compiler for the dtypes at hand, called by ctypes.

`torch.compile` can't write this kernel: its loops keep two row buffers too many, so that long rows cost twice what
memory allows, and a call of it costs as much as a small matrix. Here all matrices of a step are one call, whose threads
part the rows of each. Building takes about a second, once in a process for each combination of dtypes; nothing is kept
on disk, so nothing there can be stale or made for another machine.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["build", "row_step_", "takes"]

_SOURCE = Path(__file__).with_name("row_step.cpp")
_TYPES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bf16"}
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# The first that the compiler knows: not all have OpenMP (Apple's), or name the machine so.
_EXTRA_FLAGS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-fopenmp",), ("-march=native",), ())
_LEAST_NUMEL = 1 << 15  # of a thread: under that, waking it costs more than it does
_TIMEOUT_S = 120.0  # of a compiler that takes a second, on a machine that is busy with much else


def takes(weight: Tensor, momentum: Tensor, grad: Tensor) -> bool:
    """Whether `row_step_` can work on a matrix: dense and contiguous, in dtypes that the kernel knows.

    What stands for a tensor (a fake one, one that is still on its way from another rank) has no memory to point at.
    """
    for tensor in (weight, momentum, grad):
        if (
            tensor.dtype not in _TYPES
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
            or tensor.is_neg()
            or tensor.data_ptr() == 0
        ):
            return False
    return True


@cache
def build(weight: torch.dtype, momentum: torch.dtype, grad: torch.dtype) -> Callable[..., None]:
    """The kernel for these dtypes. Takes about a second, once in a process.

    Raises:
        OSError, subprocess.SubprocessError: there is no compiler, it fails or hangs, or what it made can't be loaded;
            the message is one line.
    """
    compiler = _compiler()
    dtypes = {"WEIGHT": weight, "MOMENTUM": momentum, "GRAD": grad}
    common = [
        *compiler,
        *_FLAGS,
        *(f"-D{name}={_TYPES[dtype]}" for name, dtype in dtypes.items()),
        str(_SOURCE),
    ]
    with tempfile.TemporaryDirectory(prefix="rowmuon-", ignore_cleanup_errors=True) as folder:
        library = Path(folder) / "row_step.so"
        for extra in _EXTRA_FLAGS:
            done = _run([*common, *extra, "-o", str(library)])
            if done.returncode == 0 and library.exists():  # where SIGCHLD is ignored all codes are 0
                break
        else:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            reason = (lines or [f"exit code {done.returncode}, and no library was made"])[0]
            raise subprocess.SubprocessError(f"{shlex.join(compiler)}: {reason}")
        try:
            kernel = ctypes.CDLL(str(library)).row_steps
        except OSError as error:
            raise OSError(
                f"{error} (if programs may not be run from {tempfile.gettempdir()}, name another folder in TMPDIR)"
            ) from error
    number = ctypes.c_double
    kernel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, *[number] * 5, ctypes.c_int64]
    kernel.restype = None
    return kernel


def _compiler() -> list[str]:
    """CXX is the path of a compiler, spaces and all, or a command with arguments, quoted as for a shell."""
    named = os.environ.get("CXX", "").strip()
    if not named:
        found = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
        if found is None:
            raise FileNotFoundError("no C++ compiler (g++, clang++ or c++) on PATH, and CXX isn't set")
        return [found]
    if shutil.which(named):
        return [named]
    try:
        return shlex.split(named)
    except ValueError as error:
        raise OSError(f"CXX={named!r} is no command: {error}") from error


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",  # a compiler may speak another encoding than this process
        timeout=_TIMEOUT_S,
        check=False,
    )


# libgomp's threads are gone in a forked child, which would wait for them: one whose parent had some goes alone.
_had_threads = False
_goes_alone = False


def _after_fork() -> None:
    global _goes_alone
    _goes_alone = _goes_alone or _had_threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _num_threads(numel: int) -> int:
    global _had_threads
    wanted = 1 if _goes_alone else min(torch.get_num_threads(), 1 + numel // _LEAST_NUMEL)
    _had_threads = _had_threads or wanted > 1
    return wanted


@torch.no_grad()
def row_step_(
    matrices: Sequence[tuple[Tensor, Tensor, Tensor]],
    steps: Sequence[float],
    *,
    decay: float,
    beta: float,
    nesterov: bool,
    floor: float,
    maximize: bool,
) -> None:
    """Row steps of (weight, momentum, gradient), (rows, n) each, all of the same dtypes.

    Weights may be views of one tensor, which are stepped one after another; nothing else may share memory.

    Args:
        matrices: at least one; `takes` says which. The first two of each are updated.
        steps: lr * scale of each.
        decay: lr * weight_decay.
        floor: least norm that is divided by, > 0.
    """
    numel = 0
    places: list[int] = []
    for weight, momentum, grad in matrices:
        num_rows, num_cols = weight.shape
        numel += num_rows * num_cols
        places += (weight.data_ptr(), momentum.data_ptr(), grad.data_ptr(), num_rows, num_cols)
    build(*(tensor.dtype for tensor in matrices[0]))(
        (ctypes.c_int64 * len(places))(*places),
        (ctypes.c_double * len(steps))(*steps),
        len(steps),
        -1.0 if maximize else 1.0,
        1 - beta,
        1 - beta if nesterov else 0.0,
        1 - decay,
        floor,
        _num_threads(numel),
    )
    # The kernel writes behind autograd's back; a graph that has kept one of these must notice, as with any other step.
    written = [tensor for weight, momentum, _ in matrices for tensor in (weight, momentum) if not tensor.is_inference()]
    torch.autograd.graph.increment_version(written)
