"""``overlap="backward"``: a refresh's first buckets are sent out while backward still goes on.

A hook on each sharded Muon parameter hears of its gradient. When all gradients of a bucket have come, and the buckets
before it in the plan have gone, the direction is written to the bucket's send buffer and the collective starts. What
has not gone when `step` comes goes then, before anything else: so every rank sends the same buckets in the same order,
whatever order backward has and whatever gradients a rank lacks.

Nothing but buffers changes before `step`. The direction is computed as if the momentum had taken the gradient in; the
momentum itself does so in `step`, from the same gradient. So a state dict that is taken in between is a good one, and
a step that is skipped has changed nothing. Weights are touched by `step` alone as well: row steps, which send nothing
that could start early, wait for it, and so do the partial sums of split rows, one all-reduce for all of them.

The collectives run in groups of the optimizer's own (`ProcessGroups.separate`), since the model's run meanwhile.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rowmuon.device import compute_device
from rowmuon.groups import name_of
from rowmuon.layout import local_tensor
from rowmuon.period import kind_of_step
from rowmuon.plan import StepPlan
from rowmuon.runtime import Flight
from rowmuon.shards import Shard, take_gradient
from rowmuon.traffic import StepTraffic

if TYPE_CHECKING:
    from rowmuon.optimizer import PeriodicRowMuon

__all__ = ["AHEAD_BYTES", "BackwardOverlap"]

AHEAD_BYTES = 256 << 20
"""What is sent out during backward holds at most about this much on a rank, or two buckets: `PlanOptions.ahead_bytes`.
In bytes, and not in buckets, for small buckets are what makes backward worth overlapping with."""

_CHANGED = (
    'the gradient of parameter {!r} was changed after it had been sent out during backward (overlap="backward"). '
    "Clipping, GradScaler and whatever else changes gradients between backward and step() take overlap=None."
)

MuonParams = Sequence[tuple[Tensor, dict[str, Any], bool]]
"""(parameter, group, whether it refreshes in this step), as the plan's entries."""


_living: weakref.WeakSet[BackwardOverlap] = weakref.WeakSet()


@dataclass
class _Round:
    """What has been sent for the next step.

    queue: buckets that are still to be sent, in this order.
    missing: for each bucket that may be sent, the entries whose gradients haven't come.
    used: the gradients that have gone into buffers, by entry, with their version counters.
    samples: a few elements of those of each bucket that was sent during backward.
    """

    plan: StepPlan
    settings: object
    muon: MuonParams
    queue: list[int]
    missing: dict[int, set[int]]
    sent: dict[int, Flight] = field(default_factory=dict)
    used: dict[int, tuple[Tensor | None, int]] = field(default_factory=dict)
    samples: dict[int, Tensor] = field(default_factory=dict)
    counts: StepTraffic = field(default_factory=StepTraffic)

    def __post_init__(self) -> None:
        waiting = set().union(*self.missing.values())
        self.entries = {self.muon[entry][0]: entry for entry in waiting}

    def sample(self, index: int) -> list[Tensor]:
        """Of each gradient in the bucket at ``index``, up to four elements along each dimension."""
        grads = [local_tensor(cast(Tensor, self.used[entry][0])) for entry in self.plan.buckets[index].layouts]
        return [grad[tuple(slice(None, None, -(-size // 4) or 1) for size in grad.shape)].flatten() for grad in grads]

    def name(self, entry: int) -> str:
        parameter, group, _ = self.muon[entry]
        return name_of(group, parameter)


class BackwardOverlap:
    """Hooks on the parameters of an optimizer, and what they have sent. Not copied or pickled with it."""

    def __init__(self, optimizer: PeriodicRowMuon) -> None:
        self._optimizer_ref = weakref.ref(optimizer)  # parameters outlive optimizers, and mustn't keep them alive
        self._handles: dict[Tensor, Any] = {}
        self._round: _Round | None = None
        self._num_holds = 0
        self._changed: dict[torch.device, tuple[Tensor, Tensor]] = {}  # on a device, and what is known of it here
        self._lock = threading.RLock()  # autograd has a thread for each device
        weakref.finalize(self, _remove, self._handles)
        _living.add(self)

    @property
    def _optimizer(self) -> PeriodicRowMuon:
        optimizer = self._optimizer_ref()
        assert optimizer is not None
        return optimizer

    def attach(self) -> None:
        """Hooks on the parameters that have a way to go before they are orthogonalised; frozen ones can have none.

        The optimizer that was built last has them: one that is stepped no more may live on in a reference cycle, until
        another moment on each rank, and would still send.
        """
        if not self._optimizer.overlap:
            return
        hook, others = _hook_for(weakref.ref(self)), [other for other in _living if other is not self]
        for parameter, layout in self._optimizer._layouts.items():
            if parameter.requires_grad and not layout.matrices_are_whole and parameter not in self._handles:
                for other in others:
                    if parameter in other._handles:
                        other._handles[parameter].remove()  # and stays there, so that it isn't taken back
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)

    def close(self) -> None:
        """Gives up what was sent, and takes the hooks away."""
        self.discard()
        _remove(self._handles)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """See `PeriodicRowMuon.accumulate`."""
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1

    # ------------------------------------------------------------------------------------------- during backward

    @torch.no_grad()
    def arrived(self, parameter: Tensor) -> None:
        """The gradient of a parameter is there.

        Raises:
            RuntimeError: an earlier one has been sent.
        """
        optimizer = self._optimizer
        if not optimizer.overlap:  # turned off; `finish` gives up what was sent before
            return
        with self._lock:
            here = self._round
            if here is not None and here.entries.get(parameter) in here.used:
                raise RuntimeError(
                    f"another gradient of parameter {here.name(here.entries[parameter])!r} came after the first had "
                    'been sent out (overlap="backward") and before step(). Put every backward but the last before a '
                    "step into `with optimizer.accumulate():`. To give up gradients without a step, as GradScaler does "
                    "(which overlap can't work with), call optimizer.zero_grad() on all ranks."
                )
            if self._num_holds or not optimizer._compared or optimizer._needs_process_group:
                return
            if here is None:
                here = self._round = self._open()
            entry = here.entries.get(parameter)
            if entry is None:
                return
            for entries in here.missing.values():
                entries.discard(entry)
            while here.queue and not here.missing[here.queue[0]]:
                index = here.queue.pop(0)
                self._send(here, index)
                here.samples[index] = torch.cat(here.sample(index))

    def _open(self) -> _Round:
        optimizer = self._optimizer
        muon = optimizer._muon_params()
        plan = optimizer._plan(muon)
        missing = {i: set(plan.buckets[i].layouts) for i in plan.ahead}
        return _Round(plan, _settings(optimizer, muon), muon, list(plan.ahead), missing)

    def _send(self, here: _Round, index: int) -> None:
        optimizer = self._optimizer
        bucket = here.plan.buckets[index]
        members = [here.muon[entry] for entry in bucket.layouts]
        shards = dict(zip(bucket.layouts, optimizer._shards(members), strict=True))
        here.sent[index] = optimizer._runtime.send(bucket, shards, here.counts)
        for entry, (parameter, *_) in zip(bucket.layouts, members, strict=True):
            here.used.setdefault(entry, (parameter.grad, _version(parameter.grad)))

    # ------------------------------------------------------------------------------------------------- afterwards

    def finish(
        self, muon: MuonParams, shards: Sequence[Shard], counts: StepTraffic, *, compared: bool
    ) -> dict[int, Flight]:
        """At the begin of a step: sends what hasn't gone, and takes the gradients that have into the momentum.

        Args:
            muon, shards: of the plan's entries.
            counts: of this kind of step.
            compared: whether ranks had compared their plans when backward ran; else none has sent anything.

        Returns:
            What is under way, for `Runtime.execute`.

        Raises:
            RuntimeError: a gradient or a setting isn't what it was when it was used.
        """
        if not self._optimizer.overlap:
            if self._handles:  # it was turned off since the last step
                self.discard(in_step=compared)
                _remove(self._handles)
            return {}
        self.attach()  # to what isn't frozen any more
        if not compared:
            return {}
        if self._round is not None:
            self._check(self._round, muon)
        here = self._take()
        with self._optimizer.phase("gather"):
            for index in here.queue:
                self._send(here, index)
            for entry in here.used:
                take_gradient(shards[entry])
        _add(here.counts, counts)
        for flight in here.sent.values():
            _hand_over(flight)
        return here.sent

    def discard(self, *, in_step: bool = False) -> None:
        """Gives up what was sent: waits for it, as all ranks must, and lets go.

        Args:
            in_step: where all ranks are, this one takes part even if none of its gradients has come.
        """
        if self._round is None and not (in_step and (self._optimizer.overlap or self._handles)):
            return
        here = self._take()
        for index in here.queue:
            self._send(here, index)
        for flight in here.sent.values():
            flight.give_up()
        _add(here.counts, self._optimizer.traffic[kind_of_step([due for *_, due in here.muon])])

    def _take(self) -> _Round:
        """What has been sent for this step; where nothing has, what has to be."""
        here, self._round = self._round, None
        return here or self._open()

    def _check(self, here: _Round, muon: MuonParams) -> None:
        if here.plan.ahead and here.settings != _settings(self._optimizer, muon):
            raise RuntimeError(
                "settings, or which parameters are frozen, have changed between backward and step(): "
                'overlap="backward" has computed with the old ones. lr, weight_decay and row_scale may change there.'
            )
        for entry, (grad, version) in here.used.items():
            now = here.muon[entry][0].grad
            # A gradient that has been taken away is one that is missing; this rank's part of the matrix stays.
            if now is not None and (now is not grad or _version(now) != version):
                raise RuntimeError(_CHANGED.format(here.name(entry)))
        # torch._foreach_mul_, which torch's clipping calls, and GradScaler count no version of a DTensor.
        for index, before in here.samples.items():
            entries = here.plan.buckets[index].layouts
            if any(here.muon[entry][0].grad is None for entry in entries):
                continue
            samples = here.sample(index)
            differs = (torch.cat(samples) != before) & ~before.isnan()
            device = compute_device(differs)
            if device == "cpu" and differs.any():
                parts = differs.split([len(sample) for sample in samples])
                raise RuntimeError(
                    _CHANGED.format(next(here.name(e) for e, p in zip(entries, parts, strict=True) if p.any()))
                )
            if device not in ("cpu", "fake"):
                self._note(differs)

    def _note(self, changed: Tensor) -> None:
        """Where a look would hold up the host, what is seen is told a step later.

        Raises:
            RuntimeError: it was seen in an earlier step.
        """
        if changed.device not in self._changed:
            known = torch.zeros((), dtype=torch.bool, pin_memory=changed.is_cuda)
            self._changed[changed.device] = (changed.new_zeros(()), known)
        on_device, known = self._changed[changed.device]
        if known:
            raise RuntimeError(_CHANGED.format("one whose name isn't known any more; it was in an earlier step"))
        on_device.logical_or_(changed.any())
        known.copy_(on_device, non_blocking=True)


def _settings(optimizer: PeriodicRowMuon, muon: MuonParams) -> object:
    """What the directions and their way depend on."""
    groups = {id(group): group for _, group, _ in muon}.values()
    return optimizer._plans.key(muon), [(g["momentum"], g["nesterov"], g["maximize"]) for g in groups]


def _version(grad: Tensor | None) -> int:
    return -1 if grad is None else grad._version


def _add(counts: StepTraffic, total: StepTraffic) -> None:
    total.num_collectives += counts.num_collectives
    total.bytes_sent += counts.bytes_sent


def _hand_over(flight: Flight) -> None:
    """FSDP2 calls hooks on a stream of its own: memory from there mustn't be reused while this one works on it."""
    for tensor in (*flight.buffers, flight.received, flight.home):
        if tensor is not None and compute_device(tensor) == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _hook_for(overlap: weakref.ref[BackwardOverlap]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        alive = None if torch.compiler.is_dynamo_compiling() else overlap()
        if alive is not None:
            alive.arrived(parameter)

    return hook


def _remove(handles: dict[Tensor, Any]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()
