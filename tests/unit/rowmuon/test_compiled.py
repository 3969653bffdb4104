"""The compiled row step: the eager one's numbers, compiled once, a clear error where it can't be."""

from __future__ import annotations

import contextlib
import copy
import pickle
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

import rowmuon
from optimizer_cases import give_grads, make_params
from rowmuon import compiled, native, update

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler (g++ or clang++) on PATH"
)
SHAPES = [(0, 6), (1, 6), (5, 1), (2, 7), (33, 33), (130, 67), (520, 1030)]  # the last takes two blocks
STEP = {"lr": 0.02, "weight_decay": 0.1, "beta": 0.9, "nesterov": True, "eps": 1e-7, "maximize": False}
CHANGES = [
    {},
    {"nesterov": False},
    {"weight_decay": 0.0},
    {"maximize": True},
    {"lr": torch.tensor(0.02)},
    {"beta": 0.3, "nesterov": False, "maximize": True},
]
DTYPES = {  # weight, momentum, grad
    "fp32": (torch.float32, torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp32 weights, bf16 momentum": (torch.float32, torch.bfloat16, torch.float32),
}


def tensors(dtype: torch.dtype, seed: int, zero_rows: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]
    for tensor in made if zero_rows else ():
        tensor[2:4] = 0
    return made


@pytest.fixture(params=["native", "torch.compile"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a CPU `torch.compile` is left for what the kernel doesn't know; here it takes all."""
    if request.param != "native":
        without_the_kernel(monkeypatch)
    return request.param


def without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "takes", lambda *tensors: False)


@needs_compiler
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES.keys())
def test_numbers_are_those_of_the_eager_step(way: str, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]) -> None:
    step_eps = max(torch.finfo(dtype).eps for dtype in dtypes[1:])
    scales = [0.2 * (i + 1) for i in range(len(SHAPES))]
    for change in CHANGES:
        weights, momenta, grads = (tensors(dtype, seed, zero_rows=seed > 0) for seed, dtype in enumerate(dtypes))
        expected_weights, expected_momenta = ([t.clone() for t in ts] for ts in (weights, momenta))
        kept = [grad.clone() for grad in grads]
        settings = {**STEP, **change, "scales": scales}
        before = [(weight.double(), momentum.double()) for weight, momentum in zip(weights, momenta, strict=True)]
        compiled.row_step_(weights, momenta, grads, **settings)
        update.row_step_(expected_weights, expected_momenta, kept, **settings)
        for i, shape in enumerate(SHAPES):
            assert torch.equal(grads[i], kept[i])
            # a rounding to the momentum's dtype, and of G - M before it
            error = (momenta[i].double() - expected_momenta[i].double()).abs()
            size = 4 * torch.finfo(torch.float32).eps * (before[i][1].abs() + grads[i].double().abs())
            assert (error <= torch.finfo(dtypes[1]).eps * expected_momenta[i].double().abs() + size).all(), (
                shape,
                change,
            )
            # roundings of the weight, and of the step, whose largest entry is under lr * scale
            found, expected = weights[i].double(), expected_weights[i].double()
            bound = torch.finfo(dtypes[0]).eps * expected.abs() + 8 * step_eps * 0.02 * scales[i]
            assert ((found - expected).abs() <= bound).all(), (shape, change)
            if shape[0] > 4:
                decayed = before[i][0][2:4] * (1 - 0.02 * settings["weight_decay"])
                torch.testing.assert_close(found[2:4], decayed, rtol=torch.finfo(dtypes[0]).eps, atol=0)


TWENTY_SHAPES = [*((2 + 3 * i, 2 + i * i) for i in range(18)), (17, 17), (600, 1024)]


@pytest.fixture
def no_recompilation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled by torch.compile yet, which does all, and a recompilation is an error."""
    without_the_kernel(monkeypatch)
    torch._dynamo.reset()
    compiled._build.cache_clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@needs_compiler
def test_P4_nothing_is_compiled_after_the_first_row_step(no_recompilation: None) -> None:
    # Twenty shapes, squares among them; lr, momentum and decay change in every step, the period after two of it.
    params = make_params(TWENTY_SHAPES)
    opt = rowmuon.PeriodicRowMuon(params, lr=0.02, period=((0, 3), (6, 2)), compile=True, ns_steps=1)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    seen = []
    for step in range(9):
        opt.param_groups[0]["momentum"] = 0.9 + 0.01 * step
        opt.param_groups[0]["weight_decay"] = 0.1 * step
        give_grads(params, step)
        opt.step()
        schedule.step()
        if step == 0:
            first = counters["stats"]["unique_graphs"]
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[0] == first
    assert seen[1] - first == 1  # twenty matrices are five calls of four
    assert seen[1:] == [seen[1]] * 8
    assert opt.traffic["refresh"].num_steps == 4  # 0, 3, 6, 8


@needs_compiler
@pytest.mark.slow
def test_P4_staggered_periods_are_compiled_once_for_each_number_of_matrices(no_recompilation: None) -> None:
    # The number of row steps changes from step to step; calls take four matrices, so there are four kinds of call.
    params = make_params(TWENTY_SHAPES)
    opt = rowmuon.PeriodicRowMuon(params, lr=0.02, period=((0, 3), (9, 2)), stagger=True, compile=True, ns_steps=1)
    first, seen = counters["stats"]["unique_graphs"], []
    for step in range(15):
        give_grads(params, step)
        opt.step()
        seen.append(counters["stats"]["unique_graphs"] - first)
    assert opt.traffic["mixed"].num_steps == 13
    assert 1 <= seen[-1] <= 4
    assert seen[4:9] == [seen[4]] * 5  # one period has seen them all; another K may bring other numbers
    assert seen[12:] == [seen[12]] * 3


@needs_compiler
@pytest.mark.parametrize("change", CHANGES)
def test_split_rows_are_those_of_the_eager_step(change: dict[str, Any]) -> None:
    settings = {**STEP, **change}
    of_sums = {key: settings[key] for key in ("beta", "nesterov", "maximize")}
    for shape in ((1, 6), (5, 1), (130, 67)):
        weight, momentum, grad = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(3))
        other = weight.clone(), momentum.clone()
        sums = compiled.split_row_sums_(momentum, grad, **of_sums)
        expected = update.split_row_sums_(other[1], grad, **of_sums)
        torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(momentum, other[1], rtol=1e-6, atol=1e-6)
        compiled.apply_split_row_step_(weight, momentum, grad, 2 * sums, scale=0.3, **settings)
        update.apply_split_row_step_(other[0], other[1], grad, 2 * expected, scale=0.3, **settings)
        # a few roundings of the weight; of the step, which is at most lr * scale
        torch.testing.assert_close(weight, other[0], rtol=4e-7, atol=1e-6 * 0.02 * 0.3)


@needs_compiler
def test_optimizer_follows_the_eager_one_and_keeps_the_option(way: str) -> None:
    opts, all_params = [], []
    for flag in (False, True):
        params = make_params([(40, 24), (3, 8, 8)])
        opts.append(rowmuon.PeriodicRowMuon(params, lr=0.02, period=3, compile=flag, ns_dtype=torch.float32))
        all_params.append(params)
        for step in range(5):
            give_grads(params, step)
            opts[-1].step()
    for eager, fast in zip(*all_params, strict=True):
        torch.testing.assert_close(fast, eager, rtol=1e-5, atol=1e-6)
    assert not any("compile" in group for group in opts[1].param_groups)
    for copied in (copy.deepcopy(opts[1]), pickle.loads(pickle.dumps(opts[1]))):
        assert copied.compile is True and copied._runtime.compile is True


def strided(kind: str, seed: int, shape: tuple[int, int] = (30, 20)) -> Tensor:
    """The same numbers for a seed and shape, laid out in one of `STRIDES`."""
    m, n = shape
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    room = {"transposed": (m, n), "slice": (m + 3, n + 5), "every other": (m, 2 * n)}.get(kind, shape)
    views = {"transposed": lambda t: t.view(n, m).t(), "slice": lambda t: t[1 : m + 1, 2 : n + 2]}
    view = {**views, "every other": lambda t: t[:, ::2]}.get(kind, lambda t: t)(torch.zeros(room))
    return view.copy_(values)


STRIDES = ["plain", "transposed", "slice", "every other"]


@needs_compiler
def test_any_strides_step_as_the_eager_ones_and_compile_nothing(no_recompilation: None) -> None:
    # One after another, as a model's parameters come: what torch.compile holds for one must not reach the next.
    compiled.row_step_([strided("plain", 0)], [strided("plain", 1)], [strided("plain", 2)], scales=[1.0], **STEP)
    graphs = counters["stats"]["unique_graphs"]
    for shape in ((30, 20), (16, 16)):
        for weight_kind in STRIDES:
            for momentum_kind in {"plain", weight_kind}:
                for grad_kind in (*STRIDES, "expanded"):
                    w, m = strided(weight_kind, 3, shape), strided(momentum_kind, 4, shape)
                    g = strided("plain", 5, shape)[:1].expand(shape) if grad_kind == "expanded" else None
                    g = strided(grad_kind, 5, shape) if g is None else g
                    expected = w.clone(), m.clone()
                    compiled.row_step_([w], [m], [g], scales=[0.3], **STEP)
                    update.row_step_([expected[0]], [expected[1]], [g.clone()], scales=[0.3], **STEP)
                    kinds = (weight_kind, momentum_kind, grad_kind)
                    assert torch.allclose(w, expected[0], rtol=4e-7, atol=1e-6 * 0.02 * 0.3), kinds
                    assert torch.allclose(m, expected[1], rtol=1e-6, atol=1e-6), kinds
                    sums = compiled.split_row_sums_(m, g, beta=0.9, nesterov=True)
                    right = update.split_row_sums_(expected[1], g.clone(), beta=0.9, nesterov=True)
                    assert torch.allclose(sums, right, rtol=1e-5), kinds
    assert counters["stats"]["unique_graphs"] <= graphs + 1  # the sums of plain strides


@needs_compiler
def test_parameters_and_gradients_that_share_their_memory(no_recompilation: None) -> None:
    # DDP's gradients are views of its buckets, and some keep all weights in one buffer; a batch is four matrices.
    shapes = [(20, 20), (30, 20), (20, 30), (8, 9), (20, 20)]
    flat = [torch.randn(sum(m * n for m, n in shapes), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    sizes = [m * n for m, n in shapes]
    views = [[part.view(shape) for part, shape in zip(t.split(sizes), shapes, strict=True)] for t in flat]
    expected = [[t.clone() for t in part] for part in views]
    compiled.row_step_(*views, scales=[0.3] * 5, **STEP)
    update.row_step_(*expected, scales=[0.3] * 5, **STEP)
    for found, right in zip(views[0] + views[1], expected[0] + expected[1], strict=True):
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


def failing(monkeypatch: pytest.MonkeyPatch, when: Callable[[str, tuple[Any, ...]], bool]) -> None:
    """Compiled functions of which some can't be made, as where there is no compiler, and the others do nothing."""
    without_the_kernel(monkeypatch)

    def made(name: str, *_: object) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if when(name, arguments):
                raise OSError("no such compiler")

        return call

    monkeypatch.setattr(compiled, "_compiled", made)
    compiled._build.cache_clear()


def test_failure_names_the_way_out_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is only the second group's dtype that can't be built, and AdamW stands beside."""
    failing(monkeypatch, lambda name, arguments: arguments[0][0][0].dtype == torch.bfloat16)
    params = [*make_params([(4, 6), (6, 4)]), *make_params([(4, 6)], dtype=torch.bfloat16), *make_params([(5,)])]
    groups = [{"params": params[:2]}, {"params": params[2:3]}, {"params": params[3:], "algorithm": "adamw"}]
    opt = rowmuon.PeriodicRowMuon(groups, lr=0.02, period=3, compile=True)
    give_grads(params, 0)
    opt.step()
    give_grads(params, 1)
    before, traffic = copy.deepcopy((params, opt.state_dict()["state"])), copy.deepcopy(opt.traffic)
    for _ in range(2):  # the second try says so too
        with pytest.raises(RuntimeError, match=r"(?s)bfloat16.*no such compiler.*compile=False"):
            opt.step()
    torch.testing.assert_close((params, opt.state_dict()["state"]), before, rtol=0, atol=0)
    assert opt.traffic == traffic
    opt.compile = False  # the way out, without another optimizer
    opt.step()
    assert opt.state[params[2]]["step"] == 2 and not torch.equal(params[2], before[0][2])
    opt.compile = True
    with pytest.raises(RuntimeError, match="no such compiler"):
        opt.step()
    compiled._build.cache_clear()


def test_a_split_row_step_is_built_whole_before_its_first_half(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, lambda name, arguments: name == "apply")
    weight, momentum, grad = (torch.ones(4, 6) for _ in range(3))
    with pytest.raises(RuntimeError, match="no such compiler"):
        compiled.build_split_row_step(weight, momentum, grad)
    assert bool((weight == 1).all()) and bool((momentum == 1).all())
    compiled._build.cache_clear()


@needs_compiler
def test_under_a_dispatch_mode_it_steps_eagerly() -> None:
    # torch.compile refuses there; some count FLOPs or collectives in every hundredth step, say.
    params, others = make_params([(40, 24)]), make_params([(40, 24)])
    opt, eager = (rowmuon.PeriodicRowMuon(p, lr=0.02, period=None, compile=p is params) for p in (params, others))
    compiled._build.cache_clear()
    for step in range(4):
        give_grads(params, step)
        give_grads(others, step)
        with FlopCounterMode(display=False) if step % 2 else contextlib.nullcontext():
            opt.step()
        eager.step()
    torch.testing.assert_close(params, others, rtol=1e-5, atol=1e-6)


def test_fake_tensors_take_the_eager_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(compiled, "_compiled", lambda *_: pytest.fail("compiled under a fake mode"))
    monkeypatch.setattr(native, "row_step_", lambda *_: pytest.fail("the kernel was called under a fake mode"))
    with FakeTensorMode():
        params = make_params([(4, 6)])
        opt = rowmuon.PeriodicRowMuon(params, lr=0.02, period=3, compile=True)
        for step in range(2):
            give_grads(params, step)
            opt.step()
