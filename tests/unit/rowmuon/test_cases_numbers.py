"""Faults in the numbers that users of other Muon implementations met. Each test is named after its row of the project's
list."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rowmuon
from optimizer_cases import (
    assert_equal,
    copies,
    give_grads,
    make_params,
    mixed_optimizer,
    momentum_of,
    relative_difference,
    train,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def one_step(parameter: Tensor, grad: Tensor, optimizer: rowmuon.PeriodicRowMuon) -> Tensor:
    """The update, start minus end."""
    start = parameter.detach().clone()
    parameter.grad = grad
    optimizer.step()
    return start - parameter.detach()


@pytest.mark.parametrize("norm", [1e-9, 1e-10, 1e10])
@pytest.mark.parametrize("period", [1, None], ids=["refresh", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_N1_the_gradients_scale_changes_nothing(norm: float, period: int | None, dtype: torch.dtype) -> None:
    updates = []
    for factor in (1.0, norm):
        (parameter,) = make_params([(64, 64)])
        parameter.data = torch.zeros_like(parameter, dtype=dtype)  # nothing is lost to rounding of the weights
        optimizer = rowmuon.PeriodicRowMuon([parameter], lr=1.0, weight_decay=0.0, period=period)
        if period is None:
            optimizer.state[parameter]["step"] = 1  # past its only refresh
        grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        updates.append(one_step(parameter, (grad / grad.norm() * factor).to(dtype), optimizer).double())
    # Rounded gradients differ in bf16 by up to 2^-9 an entry, which the iteration may amplify.
    torch.testing.assert_close(
        updates[1].norm() / updates[0].norm(), torch.ones((), dtype=torch.double), rtol=0.01, atol=0
    )
    assert relative_difference([updates[1]], [updates[0]], [torch.zeros(64, 64)]) < 0.03


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nesterov", [True, False])
def test_N2_a_zero_gradient_moves_nothing(dtype: torch.dtype, nesterov: bool) -> None:
    params = make_params([(8, 8), (16, 4), (2, 4, 4)], dtype=dtype)
    optimizer = rowmuon.PeriodicRowMuon(params, lr=0.02, weight_decay=0.0, nesterov=nesterov, period=2)
    start = copies(params)
    for _ in range(4):
        for parameter in params:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert_equal(params, start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)], ids=str)
def test_N2_a_zero_row_stays(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    (parameter,) = make_params([shape], dtype=dtype)
    optimizer = rowmuon.PeriodicRowMuon([parameter], lr=0.02, weight_decay=0.0, period=2)
    for step in range(4):
        give_grads([parameter], step)
        parameter.grad[3] = 0.0
        update = one_step(parameter, parameter.grad, optimizer)
        assert bool((update[3] == 0).all())
        assert bool(torch.isfinite(parameter).all())
        assert bool((update.abs().sum(dim=1) > 0).logical_or(torch.arange(shape[0]) == 3).all())


class Poisoned:
    """Trains the same parameters by good steps, with a bad gradient where a refresh is due."""

    def __init__(self, **settings: object) -> None:
        self.params = make_params([(8, 8), (16, 4), (5,)])
        self.optimizer = mixed_optimizer(self.params, **settings)

    def give(self, step: int, scale: float = 1.0, bad: bool = False) -> None:
        give_grads(self.params, step, scale)
        if bad:
            self.params[1].grad[2, 1] = float("inf")

    def snapshot(self) -> list[Tensor]:
        state = self.optimizer.state
        return copies([*self.params, *(v for p in self.params for v in state[p].values() if isinstance(v, Tensor))]) + [
            torch.tensor(state[p]["step"]) for p in self.params[:2]
        ]


def test_N3_skip_nonfinite_leaves_everything_as_it_is() -> None:
    clean, poisoned = Poisoned(), Poisoned(skip_nonfinite=True)
    for step in range(3):
        for run in (clean, poisoned):
            run.give(step)
            run.optimizer.step()
    before = poisoned.snapshot()
    for bad in (float("inf"), float("-inf"), float("nan")):
        poisoned.give(3)
        poisoned.params[2].grad[0] = bad  # in the AdamW group: one decision for all
        assert poisoned.optimizer.next_step_kind == "refresh"
        assert poisoned.optimizer.step(lambda: 5.0) == 5.0
        assert_equal(poisoned.snapshot(), before)
    assert poisoned.optimizer.num_skipped_steps == 3
    assert poisoned.optimizer.next_step_kind == "refresh"
    for step in range(3, 7):
        for run in (clean, poisoned):
            run.give(step)
            run.optimizer.step()
    assert_equal(poisoned.snapshot(), clean.snapshot())
    assert poisoned.optimizer.traffic == clean.optimizer.traffic
    assert poisoned.optimizer.num_skipped_steps == 3


def test_N3_under_a_grad_scaler() -> None:
    clean, poisoned = Poisoned(), Poisoned()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1_000)
    step = 0
    for bad in (False, False, False, True, False, False, False, False):
        scaler.scale(torch.ones(()))  # the scaler wants to have scaled a loss; the gradients are made by hand
        poisoned.give(step, scaler.get_scale(), bad)
        before = poisoned.snapshot()
        kind = poisoned.optimizer.next_step_kind
        scaler.step(poisoned.optimizer)
        scaler.update()
        if bad:
            assert kind == poisoned.optimizer.next_step_kind == "refresh"
            assert_equal(poisoned.snapshot(), before)
            assert scaler.get_scale() == 2.0**9
            continue
        clean.give(step)
        clean.optimizer.step()
        step += 1
    assert_equal(poisoned.snapshot(), clean.snapshot())
    assert poisoned.optimizer.traffic == clean.optimizer.traffic


def test_N3_without_either_an_infinite_gradient_is_seen() -> None:
    # The two tests above would pass if bad gradients did no harm.
    poisoned = Poisoned()
    poisoned.give(0, bad=True)
    poisoned.optimizer.step()
    assert not all(bool(torch.isfinite(tensor).all()) for tensor in poisoned.snapshot())


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (96, 16), (64, 64)], ids=str)
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_N4_row_steps_and_refreshes_have_one_rms(shape: tuple[int, int], adjust_lr_fn: str, chunks: int) -> None:
    rms = []
    for num_steps, row_scale in ((0, 1.0), (1, 1.0), (1, 0.25)):
        parameter = nn.Parameter(torch.zeros(shape))
        group = {"params": [parameter], "chunks": chunks}
        settings = {"adjust_lr_fn": adjust_lr_fn, "row_scale": row_scale, "ns_dtype": torch.float32}
        optimizer = rowmuon.PeriodicRowMuon([group], lr=1.0, weight_decay=0.0, period=2, **settings)
        optimizer.state[parameter]["step"] = num_steps
        update = one_step(parameter, torch.randn(shape, generator=torch.Generator().manual_seed(0)), optimizer)
        rms.append(float(update.square().mean().sqrt()))
    refresh, row, quarter = rms
    # Five quintic steps leave the singular values between 0.68 and 1.13, their RMS between 0.8 and 1.05.
    assert 0.8 <= refresh / row <= 1.05
    assert quarter == pytest.approx(0.25 * row, rel=1e-5)
    if adjust_lr_fn == "match_rms_adamw":
        assert row == pytest.approx(0.2, rel=1e-4)


class NoHostRead(TorchDispatchMode):
    """Raises where a tensor's value is read by the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("the host read a tensor")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_N5_lr_as_a_tensor_is_followed_and_never_read(dtype: torch.dtype) -> None:
    values = [0.02, 0.01, 0.04, 0.005, 0.03, 0.02]
    floats, tensors = make_params([(16, 8), (8, 24)], dtype=dtype), make_params([(16, 8), (8, 24)], dtype=dtype)
    start = copies(floats)
    by_float = rowmuon.PeriodicRowMuon(floats, lr=values[0], period=2)
    lr = torch.tensor(values[0])
    by_tensor = rowmuon.PeriodicRowMuon(tensors, lr=lr, period=2)
    for step, value in enumerate(values):
        by_float.param_groups[0]["lr"] = value
        lr.fill_(value)
        give_grads(floats, step)
        give_grads(tensors, step)
        by_float.step()
        with NoHostRead():
            by_tensor.step()
        # an fp32 lr instead of a double; in bf16 a last place of an entry may go the other way
        assert relative_difference(tensors, floats, start) < (1e-5 if dtype == torch.float32 else 0.02)
    constant = make_params([(16, 8), (8, 24)], dtype=dtype)
    train(rowmuon.PeriodicRowMuon(constant, lr=values[0], period=2), constant, len(values))
    assert relative_difference(constant, floats, start) > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_N5_no_step_reads_any_value(dtype: torch.dtype) -> None:
    # A fake tensor has no value: `tolist` and `numpy`, which no dispatch mode sees on a CPU, raise as `item` does.
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    with FakeTensorMode():
        params = make_params([(16, 8), (8, 24), (2, 4, 4), (5,)], dtype=dtype)
        optimizer = mixed_optimizer(params, lr=torch.ones(()), period=3)
        optimizer.param_groups[1]["lr"] = torch.ones(())
        for step in range(4):
            give_grads(params, step)
            optimizer.step()
        with pytest.raises(DataDependentOutputException):  # the test would see it
            optimizer.param_groups[0]["lr"].tolist()
    assert (optimizer.traffic["refresh"].num_steps, optimizer.traffic["row"].num_steps) == (2, 2)


def test_N5_a_momentum_schedule_is_followed() -> None:
    (parameter,) = make_params([(8, 8)])
    optimizer = rowmuon.PeriodicRowMuon([parameter], lr=0.02, period=2)
    expected = torch.zeros(8, 8)
    for step, momentum in enumerate([0.85, 0.9, 0.95, 0.5]):
        optimizer.param_groups[0]["momentum"] = momentum
        give_grads([parameter], step)
        optimizer.step()
        expected = momentum * expected + (1 - momentum) * parameter.grad
        torch.testing.assert_close(momentum_of(optimizer, parameter), expected)


def test_N5_nothing_is_compiled_anew_after_the_first_period() -> None:
    params = make_params([(8, 8), (16, 8), (5,)])
    optimizer = mixed_optimizer(params, lr=torch.tensor(0.02))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    compiled = torch._dynamo.utils.counters
    graphs = []
    for step in range(12):
        give_grads(params, step)
        optimizer.step()
        scheduler.step()
        graphs.append((compiled["stats"]["unique_graphs"], compiled["stats"]["calls_captured"]))
    assert len(set(graphs[3:])) == 1


@pytest.mark.parametrize("width", [128, 512])
@pytest.mark.parametrize("period", [1, None], ids=["refresh", "row"])
def test_N6_clipping_is_of_raw_gradients(width: int, period: int | None) -> None:
    updates = []
    for max_norm in (None, 1.0):
        parameter = nn.Parameter(torch.zeros(width, width))
        optimizer = rowmuon.PeriodicRowMuon([parameter], lr=1.0, weight_decay=0.0, momentum=0.9, period=period)
        optimizer.state[parameter]["step"] = 0 if period else 1
        parameter.grad = torch.randn(width, width, generator=torch.Generator().manual_seed(0))
        if max_norm is not None:
            before = rowmuon.clip_grad_norm_([parameter], max_norm)
            assert float(before) == pytest.approx(width, rel=0.05)
            assert float(parameter.grad.norm()) == pytest.approx(1.0, rel=1e-5)
        updates.append(one_step(parameter, parameter.grad, optimizer))
        torch.testing.assert_close(momentum_of(optimizer, parameter), 0.1 * parameter.grad)
    # The update's norm is about sqrt(width), clipped or not: it was the gradient that was clipped.
    assert float(updates[1].norm()) == pytest.approx(math.sqrt(width), rel=0.2)
    assert relative_difference([updates[1]], [updates[0]], [torch.zeros(width, width)]) < 0.02


def test_N6_clipping_is_torchs() -> None:
    ours, theirs = make_params([(8, 8), (5,)]), make_params([(8, 8), (5,)])
    give_grads(ours, 0)
    give_grads(theirs, 0)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(rowmuon.clip_grad_norm_(ours, 1.0), expected)
    torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs])


def test_N7_bf16_parameters_keep_the_phase_for_300_steps() -> None:
    params = make_params([(4, 4), (6,)], dtype=torch.bfloat16)
    optimizer = mixed_optimizer(params, period=7)
    kinds = train(optimizer, params, 300)
    assert kinds == ["refresh" if step % 7 == 0 else "row" for step in range(300)]
    assert optimizer.state[params[0]]["step"] == 300
    assert optimizer.state[params[1]]["step"].item() == 300
    assert optimizer.state[params[1]]["step"].dtype == torch.float32
    assert optimizer.traffic["refresh"].num_orthogonalizations == len(range(0, 300, 7))


def test_N8_accumulation_takes_one_decision_per_step() -> None:
    model, whole = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
    whole.load_state_dict(model.state_dict())
    optimizer = rowmuon.PeriodicRowMuon(model.parameters(), lr=0.02, period=1)
    reference = rowmuon.PeriodicRowMuon(whole.parameters(), lr=0.02, period=1)
    batches = torch.randn(16, 5, 6, generator=torch.Generator().manual_seed(0))
    for i, batch in enumerate(batches):
        (model(batch).square().mean() / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            sum(whole(part).square().mean() / 4 for part in batches[i - 3 : i + 1]).backward()
            reference.step()
            reference.zero_grad()
    assert optimizer.traffic["refresh"].num_orthogonalizations == 4
    assert optimizer.traffic["refresh"].num_steps == 4
    # the same sum in another order: rounding of the gradient, seen through NS5
    assert float((model.weight - whole.weight).detach().norm()) < 1e-3 * float(whole.weight.detach().norm())


@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize(
    ("period", "num_refreshes"), [(1, 12), (3, 4), (5, 3), (None, 1), (((0, 4), (6, 1)), 8), (((0, None), (7, 3)), 3)]
)
def test_N9_orthogonalizations_are_those_of_the_period(
    period: object, num_refreshes: int, stagger: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = rowmuon.newton_schulz

    def counted(matrices: Tensor, *args: object, **kwargs: object) -> Tensor:
        calls.append(matrices.shape[0])
        return original(matrices, *args, **kwargs)

    monkeypatch.setattr("rowmuon.runtime.newton_schulz", counted)
    model = torch.compile(nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6)), backend="eager")
    groups = rowmuon.param_groups(
        model, [rowmuon.Rule("0.weight", "muon", chunks=3), rowmuon.Rule("bias", "adamw"), rowmuon.Rule(".*", "muon")]
    )
    optimizer = rowmuon.PeriodicRowMuon(groups, lr=0.02, period=period, stagger=stagger)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.ones(1, 6)).square().sum().backward()
        optimizer.step()
    counted_here = sum(counts.num_orthogonalizations for counts in optimizer.traffic.values())
    assert counted_here == sum(calls)
    if not stagger:
        assert counted_here == num_refreshes * 4  # three chunks and one whole matrix
        assert optimizer.traffic["refresh"].num_steps == num_refreshes
    else:
        phases = {p: optimizer.state[p]["phase"] for group in optimizer.param_groups[:2] for p in group["params"]}
        num_matrices = [3, 1]
        assert counted_here == sum(
            n * sum(rowmuon.period.is_refresh(period, step, phase) for step in range(12))
            for n, phase in zip(num_matrices, phases.values(), strict=True)
        )


def test_N10_momentum_is_momentum_in_bf16_without_nesterov() -> None:
    (parameter,) = make_params([(24, 16)], dtype=torch.bfloat16)
    optimizer = rowmuon.PeriodicRowMuon([parameter], lr=0.02, weight_decay=0.0, nesterov=False, period=1)
    expected = torch.zeros(24, 16, dtype=torch.bfloat16)
    for step in range(5):
        give_grads([parameter], step)
        start = parameter.detach().clone()
        optimizer.step()
        expected.lerp_(parameter.grad, 1 - 0.95)
        assert torch.equal(momentum_of(optimizer, parameter), expected)
        direction = rowmuon.newton_schulz(expected, "keller_jordan")
        moved = start.add(direction, alpha=-0.02 * rowmuon.spectral_scale(24, 16, None))
        assert torch.equal(parameter, moved)
