"""The row step's own kernel on a CPU: it sees what a parameter is now, and leaves alone what it can't point at."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowmuon
from optimizer_cases import give_grads, make_params
from rowmuon import compiled, native, update

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler (g++ or clang++) on PATH"
)
FP32 = (torch.float32, torch.float32, torch.float32)
STEP = {"lr": 0.02, "weight_decay": 0.1, "beta": 0.9, "nesterov": True, "eps": 1e-7, "maximize": False}
SHAPES = [(40, 24), (3, 8, 8), (16, 2, 3, 3), (7, 1), (1, 9)]

Params = list[nn.Parameter]


class Pair:
    """The same optimizer twice, compiled and eager, on equal parameters that get equal gradients."""

    def __init__(self) -> None:
        self.params = [make_params(SHAPES) for _ in range(2)]
        self.opts = [self.build(params, flag) for params, flag in zip(self.params, (True, False), strict=True)]

    def build(self, params: Params, flag: bool) -> rowmuon.PeriodicRowMuon:
        return rowmuon.PeriodicRowMuon(params, lr=0.02, period=None, compile=flag, ns_dtype=torch.float32)

    def each(self, change: Callable[[Params, rowmuon.PeriodicRowMuon], object]) -> None:
        for params, opt in zip(self.params, self.opts, strict=True):
            change(params, opt)

    def step(self, seed: int) -> None:
        for params, opt in zip(self.params, self.opts, strict=True):
            give_grads(params, seed)
            opt.step()

    def check(self) -> None:
        for fast, eager in zip(*self.params, strict=True):
            torch.testing.assert_close(fast, eager, rtol=1e-5, atol=1e-6)
        for name in ("momentum_buffer",):
            for fast, eager in zip(*self.params, strict=True):
                torch.testing.assert_close(
                    self.opts[0].state[fast][name], self.opts[1].state[eager][name], rtol=1e-5, atol=1e-6
                )


def swap_data(params: Params, opt: rowmuon.PeriodicRowMuon) -> None:
    for param in params:
        param.data = param.data.clone() + 1


def swap_momentum(params: Params, opt: rowmuon.PeriodicRowMuon) -> None:
    for param in params:
        opt.state[param]["momentum_buffer"] = opt.state[param]["momentum_buffer"] * 2


def make_transposed(params: Params, opt: rowmuon.PeriodicRowMuon) -> None:
    params[0].data = params[0].data.t().contiguous().t()


def freeze(params: Params, opt: rowmuon.PeriodicRowMuon) -> None:
    params[1].requires_grad_(False)


def load(params: Params, opt: rowmuon.PeriodicRowMuon) -> None:
    state = copy.deepcopy(opt.state_dict())
    for entry in state["state"].values():
        entry["momentum_buffer"] += 1
    opt.load_state_dict(state)


def resize_storage(params: Params, opt: rowmuon.PeriodicRowMuon) -> None:
    """As FSDP frees and takes its memory: the tensor is the same, its memory isn't."""
    storage = params[0].untyped_storage()
    size, values = storage.nbytes(), params[0].detach().clone()
    storage.resize_(0)
    storage.resize_(size)
    with torch.no_grad():
        params[0].copy_(values)


CHANGES = [swap_data, swap_momentum, make_transposed, freeze, load, resize_storage]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_nothing_of_a_parameter_is_kept_from_step_to_step(change: Callable[..., None]) -> None:
    pair = Pair()
    for step in range(3):
        pair.step(step)
    before = [param.detach().clone() for param in pair.params[0]]
    pair.each(change)
    for step in range(3, 5):
        pair.step(step)
    pair.check()
    moved = [not torch.equal(param, old) for param, old in zip(pair.params[0], before, strict=True)]
    assert moved == [change is not freeze or i != 1 for i in range(len(SHAPES))]


def test_gradients_that_come_and_go() -> None:
    pair = Pair()
    pair.step(0)
    for step in range(1, 6):
        for params, opt in zip(pair.params, pair.opts, strict=True):
            give_grads(params, step)
            for param in params[step % 3 :: 3]:
                param.grad = None
            opt.step()
    pair.check()


def test_an_added_group_and_copies() -> None:
    pair = Pair()
    pair.step(0)
    pair.step(1)
    added = [make_params([(5, 6)]) for _ in range(2)]
    for params, opt, new in zip(pair.params, pair.opts, added, strict=True):
        opt.add_param_group({"params": new, "lr": 0.5})
        params += new
    for step in range(2, 5):
        pair.step(step)
    pair.check()
    for duplicate in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        kept = [param.detach().clone() for param in pair.params[0]]
        params, opt = duplicate((pair.params[0], pair.opts[0]))
        give_grads(params, 9)
        opt.step()
        for original, was, param in zip(pair.params[0], kept, params, strict=True):
            assert torch.equal(original, was) and not torch.equal(param, was)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_part_the_rows(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_LEAST_NUMEL", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    shapes = [(1, 50), (2, 3), (129, 17), (0, 4), (4, 0), (64, 300), (5, 2500)]
    weights, momenta, grads = ([torch.randn(shape) for shape in shapes] for _ in range(3))
    expected = [[t.clone() for t in ts] for ts in (weights, momenta)]
    compiled.row_step_(weights, momenta, grads, scales=[0.3] * len(shapes), **STEP)
    update.row_step_(*expected, grads, scales=[0.3] * len(shapes), **STEP)
    for found, right in zip([*weights, *momenta], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


def test_weights_that_are_views_of_one_tensor_are_stepped_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_LEAST_NUMEL", 1)
    start, grads = torch.randn(300, 40), [torch.randn(200, 40) for _ in range(2)]
    results = []
    for num_threads in (1, 4, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        base, momenta = start.clone(), [torch.zeros(200, 40) for _ in range(2)]
        for _ in range(50):
            compiled.row_step_([base[:200], base[100:]], momenta, grads, scales=[0.3, 0.2], **STEP)
        results.append(base)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_what_is_no_number_stays_one_in_its_row() -> None:
    weights, momenta, grads = ([torch.ones(4, 20)] for _ in range(3))
    grads[0][1, 3], grads[0][2, 5] = float("nan"), float("inf")
    compiled.row_step_(weights, momenta, grads, scales=[1.0], **STEP)
    assert torch.isfinite(weights[0]).all(dim=1).tolist() == [True, False, False, True]


@pytest.mark.parametrize("values", [[1.0, -3.3895e38, 1e-40, float("inf"), float("nan")], [1 + 2**-8, 1 + 3 * 2**-8]])
def test_bf16_is_rounded_as_torch_does(values: list[float]) -> None:
    # lr = 0 and beta = 0: the momentum becomes the fp32 gradient, rounded once; the weight stays.
    grad = torch.tensor([values])
    weight, momentum = torch.ones_like(grad), torch.zeros_like(grad, dtype=torch.bfloat16)
    compiled.row_step_([weight], [momentum], [grad], scales=[1.0], **{**STEP, "lr": 0.0, "beta": 0.0})
    torch.testing.assert_close(momentum, grad.bfloat16(), rtol=0, atol=0, equal_nan=True)


class Waiting(Tensor):
    """Stands for a tensor, as one does that is still on its way from another rank."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.as_subclass(Tensor) if isinstance(value, Waiting) else value

        return function(*map(plain, args), **(kwargs or {}))


def without_memory(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": lambda t: t.t().contiguous().t(),
    "negative": lambda t: torch._neg_view(-t),
    "fp16": lambda t: t.half(),
    "a subclass that dispatches": lambda t: t.as_subclass(Waiting),
    "no memory": lambda t: torch.empty_like(t, device="meta"),
    "freed memory": lambda t: without_memory(t.clone()),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_what_the_kernel_leaves_alone(other: Callable[[Tensor], Tensor]) -> None:
    plain = torch.randn(3, 4, 5).unbind()
    assert native.takes(*plain)
    for place in range(3):
        tensors = list(plain)
        tensors[place] = other(tensors[place])
        assert not native.takes(*tensors)


def test_a_negated_gradient_is_read_as_such() -> None:
    weight, momentum, grad = torch.randn(3, 4, 5).unbind()
    expected = weight.clone(), momentum.clone()
    compiled.row_step_([weight], [momentum], [torch._neg_view(grad)], scales=[0.3], **STEP)
    update.row_step_([expected[0]], [expected[1]], [-grad], scales=[0.3], **STEP)
    torch.testing.assert_close((weight, momentum), expected, rtol=1e-6, atol=1e-6)


def test_autograd_notices_that_a_weight_has_changed() -> None:
    weight = nn.Parameter(torch.ones(4, 5))
    loss = (weight * weight).sum()
    compiled.row_step_([weight], [torch.zeros(4, 5)], [torch.ones(4, 5)], scales=[1.0], **STEP)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        tensors = [torch.ones(4, 5) for _ in range(3)]
        compiled.row_step_(*([tensor] for tensor in tensors), scales=[1.0], **STEP)
        assert bool((tensors[0] < 1).all())


# ------------------------------------------------------------------------------------------------------ the compiler


@pytest.fixture
def nothing_is_built() -> Iterator[None]:
    native.build.cache_clear()
    compiled._build_native.cache_clear()
    yield
    native.build.cache_clear()
    compiled._build_native.cache_clear()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


BROKEN = {  # what it does, and what is told of it
    "fails": ("echo first line >&2; echo 'row_step.cpp:1: error: too old' >&2; exit 1", "error: too old"),
    "speaks latin-1": ("printf 'erreur: \\351chec, error\\n' >&2; exit 1", "chec, error"),
    "hangs": ("exec sleep 60", "timed out after 0.2 seconds"),
    "writes nothing": ("exit 0", "cxx: exit code 0, and no library was made"),
    "writes no library": ('while [ "$1" != -o ]; do shift; done; echo text >"$2"', "TMPDIR"),
}


@pytest.mark.parametrize("compiler", ["none", "gone", "no command", *BROKEN])
def test_without_a_working_compiler_nothing_changes_and_the_way_out_is_named(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_is_built: None
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if compiler == "none":
        monkeypatch.setenv("PATH", str(tmp_path))
        reason = "no C\\+\\+ compiler"
    elif compiler in BROKEN:
        text, reason = BROKEN[compiler]
        monkeypatch.setenv("CXX", script(tmp_path / "cxx", text))
        monkeypatch.setattr(native, "_TIMEOUT_S", 0.2 if compiler == "hangs" else 60)
    else:
        named, reason = {"gone": (str(tmp_path / "gone"), "gone"), "no command": ("g++ '", "No closing quotation")}[
            compiler
        ]
        monkeypatch.setenv("CXX", named)
    params = make_params([(4, 6)])
    opt = rowmuon.PeriodicRowMuon(params, lr=0.02, period=None, compile=True)
    give_grads(params, 0)
    opt.step()
    give_grads(params, 1)
    before = copy.deepcopy((params, opt.state_dict()["state"]))
    with pytest.raises(RuntimeError, match=rf"(?s)float32.*{reason}.*compile=False"):
        opt.step()
    torch.testing.assert_close((params, opt.state_dict()["state"]), before, rtol=0, atol=0)
    opt.compile = False
    opt.step()
    assert not torch.equal(params[0], before[0][0])


def test_a_compiler_without_openmp_or_names_of_machines_will_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_is_built: None
) -> None:
    real = shutil.which("g++") or shutil.which("clang++")
    text = f'for a; do case "$a" in -fopenmp|-m*=native) exit 1;; esac; done; exec {real} "$@"'
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", text))
    monkeypatch.setattr(native, "_LEAST_NUMEL", 1)
    weight, momentum, grad = torch.randn(3, 40, 50).unbind()
    expected = weight.clone(), momentum.clone()
    compiled.row_step_([weight], [momentum], [grad], scales=[0.3], **STEP)
    update.row_step_([expected[0]], [expected[1]], [grad], scales=[0.3], **STEP)
    torch.testing.assert_close((weight, momentum), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("named", ["{}", "'{}' -O1 -DWORDS='a b'", " {} ", "  "])
def test_cxx_is_a_path_or_a_command_or_nothing(
    named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_is_built: None
) -> None:
    real = shutil.which("g++") or shutil.which("clang++")
    (tmp_path / "my tools").mkdir()
    seen = tmp_path / "seen"
    path = script(tmp_path / "my tools" / "cxx", f'echo "$@" >>{seen}; exec {real} "$@"')
    monkeypatch.setenv("CXX", named.format(path))
    monkeypatch.setattr(native, "_FLAGS", ("-std=c++17", "-shared", "-fPIC"))  # sooner built
    native.build(*FP32)
    assert seen.exists() == bool(named.strip())
    assert ("-O1 -DWORDS=a b" in seen.read_text() if seen.exists() else False) == ("-O1" in named)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_threads_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker of a DataLoader, or a run that is forked off a notebook.
    monkeypatch.setattr(native, "_LEAST_NUMEL", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    tensors = torch.randn(3, 40, 50)
    kept = tensors.clone()

    def step(values: Tensor) -> Tensor:
        weight, momentum, grad = values.unbind()
        compiled.row_step_([weight], [momentum], [grad], scales=[0.3], **STEP)
        return weight

    expected = step(tensors)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        found = step(kept)
        os._exit(0 if torch.equal(found, expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert native._num_threads(1 << 20) == 2  # here they still are


def test_one_build_for_each_combination_of_dtypes(nothing_is_built: None) -> None:
    params = make_params([(4, 6), (9, 3), (5, 5)])
    opt = rowmuon.PeriodicRowMuon(params, lr=torch.tensor(0.02), period=((0, 3), (4, 2)), compile=True, ns_steps=1)
    for step in range(7):
        opt.param_groups[0]["lr"] = 0.02 / (1 + step)
        opt.param_groups[0]["momentum"] = 0.9 + 0.01 * step
        give_grads(params, step)
        opt.step()
    assert native.build.cache_info().misses == 1
