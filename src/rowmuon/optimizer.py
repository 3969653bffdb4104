"""Periodic Row-wise Muon as a ``torch.optim.Optimizer``. A thin shell: it keeps groups and state, asks `period.py`
which parameters refresh, `plan.py` what to do, and lets `runtime.py` do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rowmuon import adamw
from rowmuon.agreement import check_some_parameters, compare_ranks, gradients_are_finite
from rowmuon.backward import AHEAD_BYTES, BackwardOverlap
from rowmuon.coefficients import Triple, resolve_coefficients
from rowmuon.copies import Copies
from rowmuon.entries import Plans, make_entry
from rowmuon.factors import check_gram_period, gram_shape, gram_state
from rowmuon.gram import GramShape
from rowmuon.groups import (
    AdjustLr,
    check_dtype,
    check_hyper,
    check_params,
    complete_group,
    muon_layout,
    prune_group,
)
from rowmuon.layout import Layout
from rowmuon.period import Period, StepKind, check_period, is_refresh, kind_of_step
from rowmuon.plan import FLOPS_PER_BYTE, CheapStep, Entry, PlanOptions, StepPlan
from rowmuon.process_groups import UNPICKLED, ProcessGroups, check_process_group
from rowmuon.runtime import Phase, Runtime
from rowmuon.shards import Hyper, Shard, make_shard
from rowmuon.state import adapt_state_dict, init_state, stagger_phases
from rowmuon.symmetric import Kernels, check_kernels
from rowmuon.traffic import Traffic
from rowmuon.watch import Watch

__all__ = ["PeriodicRowMuon"]


class PeriodicRowMuon(Copies):
    r"""Muon whose Newton-Schulz iteration runs once in ``period`` steps, with row-normalised steps between.

    In every step the momentum takes the gradient in, M <- momentum M + (1 - momentum) G, U is M or with Nesterov
    (1 - momentum) G + momentum M, and the weights decay by lr weight_decay. A refresh then subtracts
    lr s_spectral(m, n) NewtonSchulz(U), a row step lr row_scale s_row(m, n) U_i / ||U_i|| from each row i. A row step
    works on the local shard alone and sends nothing. Sources: arXiv:2608.20818 (periodic row-wise steps),
    Keller Jordan's Muon; the scales of the row step are our choice (see `rowmuon.update`).

    Args:
        params: tensors, named tensors or groups. A group may say ``algorithm`` ("muon", the default, or "adamw"),
            ``chunks``, ``stack_dims``, and its own value of anything below up to ``row_scale``; AdamW groups also
            ``betas`` (0.9, 0.95), ``eps`` 1e-8, ``amsgrad``, ``foreach``, ``fused``, ``capturable``.
        lr: learning rate, float or 1-element tensor, >= 0.
        weight_decay: decoupled decay, multiplied by the group's lr, >= 0.
        momentum: in [0, 1).
        nesterov: see above.
        ns_coefficients: one (a, b, c) for all iterations, one per iteration, or a name in ``rowmuon.COEFFICIENTS``.
        eps: > 0; takes the place of a norm that is exactly zero and touches nothing else.
        ns_steps: iterations; None is 5, or the number of triples given.
        adjust_lr_fn: "original" (None means the same) or "match_rms_adamw", as in ``torch.optim.Muon``.
        maximize: climb instead of descend.
        period: K >= 1; 1 is Muon; None never refreshes after the first step; or a schedule such as
            ``((0, 3), (8000, 1))``, whose every entry starts with a refresh.
        row_scale: RMS of a row step over that of a refresh, >= 0.
        cheap_step: between refreshes; "row" as above, or "gram_row": the rows of U Q, where Q undoes what the last
            refreshes knew of U^T U (`rowmuon.gram`). Nearer to a refresh; sends no more where rows are whole, costs a
            matrix product, and memory. Ours, not the paper's.
        gram_decay: of the mean of the refreshes' Gram matrices, in [0, 1).
        gram_damping: relative to that mean's largest eigenvalue, >= 1e-5.
        refresh: "exchange" orthogonalises each matrix once in its shard group; "gather" all-gathers and everyone
            orthogonalises everything, as in the paper.
        stagger: each parameter refreshes in its own phase of the period.
        ns_dtype: arithmetic of Newton-Schulz.
        ns_kernels: on CUDA, "triton" computes half of each large symmetric product, by a kernel of our own that no GPU
            has timed yet; "torch" leaves them to the vendor's library. See `newton_schulz`.
        state_dtype: of the momentum; None is the parameter's.
        comm_dtype: what is sent in a refresh.
        bucket_bytes: bound on one stack of matrices in a refresh.
        process_group: over which plain tensors are replicated (DDP); also agrees on skipping.
        skip_nonfinite: skip a step on all ranks alike if any gradient isn't finite; one scalar all-reduce and one host
            read a step. A skipped step changes nothing and doesn't count.
        overlap: "backward" sends a refresh's first buckets out while backward still goes on, with the same result; see
            `accumulate`. Not with clipping, GradScaler or anything else that changes gradients after backward.
        compile: row steps by a compiled kernel, in about half the time. On a CPU it needs a C++ compiler, and a second
            for the first step; on other devices it is ``torch.compile``, for Newton-Schulz's normalisation too.

    Raises:
        ValueError: a setting out of range, a layout or parameter that can't be worked on; the parameter is named. No
            parameter at all on one rank of several.

    Example:
        >>> import torch, rowmuon
        >>> layer = torch.nn.Linear(4, 8, bias=False)
        >>> opt = rowmuon.PeriodicRowMuon(layer.parameters(), lr=0.02, period=3)
        >>> kinds = []
        >>> for _ in range(4):
        ...     layer(torch.ones(1, 4)).sum().backward()
        ...     kinds.append(opt.next_step_kind)
        ...     opt.step()
        >>> kinds
        ['refresh', 'row', 'row', 'refresh']
    """

    phase: Phase = nullcontext  # may be set to what times or traces the parts of a step, see `rowmuon.runtime.Phase`
    _is_set_up = False
    _needs_process_group = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Triple | Sequence[Triple] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int | None = None,
        adjust_lr_fn: AdjustLr = None,
        *,
        maximize: bool = False,
        period: Period = 3,
        row_scale: float = 1.0,
        cheap_step: CheapStep = "row",
        gram_decay: float = 0.8,
        gram_damping: float = 1e-3,
        refresh: Literal["exchange", "gather"] = "exchange",
        stagger: bool = False,
        ns_dtype: torch.dtype = torch.bfloat16,
        ns_kernels: Kernels = "torch",
        state_dtype: torch.dtype | None = None,
        comm_dtype: torch.dtype = torch.bfloat16,
        bucket_bytes: int = 64 << 20,
        process_group: dist.ProcessGroup | None = None,
        skip_nonfinite: bool = False,
        overlap: Literal["backward"] | None = None,
        compile: bool = False,
    ) -> None:
        if overlap not in (None, "backward"):
            raise ValueError(f"overlap={overlap!r} is neither None nor 'backward'")
        self.overlap = overlap
        how = (cheap_step, gram_decay, gram_damping, ns_kernels)
        self.options = PlanOptions(refresh, comm_dtype, bucket_bytes, FLOPS_PER_BYTE, AHEAD_BYTES * bool(overlap), *how)
        for name, dtype in (("ns_dtype", ns_dtype), ("state_dtype", state_dtype or ns_dtype)):
            check_dtype(name, dtype)
        check_kernels(ns_kernels, ns_dtype, "ns_kernels")
        coefficients = resolve_coefficients(ns_coefficients, ns_steps)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": len(coefficients),
            "adjust_lr_fn": adjust_lr_fn,
            "maximize": maximize,
            "period": check_period(period),
            "row_scale": row_scale,
        }
        check_hyper(defaults, "the constructor")
        self.stagger, self.ns_dtype, self.state_dtype = stagger, ns_dtype, state_dtype
        check_process_group(process_group)
        self._process_group, self.skip_nonfinite, self.compile = process_group, skip_nonfinite, compile
        self.num_skipped_steps = 0
        self.traffic = Traffic()
        self._reset_caches()
        super().__init__(params, defaults)
        check_some_parameters(self.param_groups)
        self._set_up()
        self._is_set_up = True

    # ------------------------------------------------------------------------------------------ groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; under a mesh or process group all ranks must add the same one at the same time.

        The new parameters start with a refresh and count their own steps.
        """
        self._backward.discard()
        group = complete_group(param_group, self.defaults)
        super().add_param_group(group)
        prune_group(group)
        try:
            layouts = self._check_group(group)
        except BaseException:
            self.param_groups.pop()
            raise
        self._layouts.update(layouts)
        for parameter in group["params"]:
            self.state[parameter] = init_state(parameter, group, self)
        if self._is_set_up:  # in the constructor all process groups are made in one go, at its end
            self._set_up()

    def _check_group(self, group: dict[str, Any]) -> dict[Tensor, Layout]:
        check_params(group)
        if group["algorithm"] == "adamw":
            return {}
        check_gram_period(group, self.options, "a group")
        return {parameter: muon_layout(parameter, group, self.process_group) for parameter in group["params"]}

    def _gram_shape(self, parameter: Tensor) -> GramShape | None:
        layout = self._layouts.get(parameter)
        return None if layout is None else gram_shape(layout, self.options, self.ns_dtype)

    def _set_up(self) -> None:
        """After a change of the groups: phases, process groups, and plans to be made anew and compared again."""
        self._plans.clear()
        self._compared = False
        if self.stagger:
            stagger_phases(self)
        self._process_groups.prepare(self._layouts.items())
        self._backward.attach()

    def _reset_caches(self) -> None:
        self._backward = BackwardOverlap(self)
        self._layouts: dict[Tensor, Layout] = {}
        self._plans = Plans()
        self._compared = False
        self._process_groups = ProcessGroups(self.process_group)
        self._watch = Watch()
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._runtime = Runtime(rank, self._process_groups.group_of, compile=self.compile)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Over which plain tensors are replicated. It isn't pickled: set it again on what was unpickled."""
        return self._process_group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        check_process_group(group)
        self._process_group, self._needs_process_group = group, False
        self._backward.close()
        self._rebuild()

    def _rebuild(self) -> None:
        """Everything that isn't in the state, from the groups."""
        self._reset_caches()
        for group in self.param_groups:
            self._layouts.update(self._check_group(group))
        self._process_groups.prepare(self._layouts.items())
        self._backward.attach()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this optimizer or, where names allow, of ``torch.optim.Muon`` or microsoft/dion's Muon.

        What torch keeps in groups (lr, weight_decay, momentum, nesterov, row_scale, period, ...) comes from the
        checkpoint; how it is computed (refresh, stagger, ns_dtype, state_dtype, comm_dtype, bucket_bytes) stays as
        constructed. The state dict's tensors are copied, whole ones to this rank's part of a sharded parameter.

        Raises:
            ValueError: the checkpoint routes parameters to other algorithms or chunks, or its settings are out of
                range; parameters are named. Nothing is changed then.
        """
        self._backward.discard()
        # A hook, so that it runs after the caller's own, which may bring the state dict into a form that fits.
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: adapt_state_dict(loaded, self))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self._plans.clear()
        self._compared = False
        if self.stagger:
            stagger_phases(self, keep=True)

    # ------------------------------------------------------------------------------------------------- the step

    @property
    def next_step_kind(self) -> StepKind:
        """What the next step will be: "refresh", "row", or "mixed" if some parameters refresh and others don't."""
        return kind_of_step([due for *_, due in self._muon_params()])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. With ``overlap``, all ranks give up what backward has sent for a step that didn't come."""
        self._backward.discard()
        super().zero_grad(set_to_none)

    def accumulate(self) -> AbstractContextManager[None]:
        """A context for every backward but the last before a step, where gradients are accumulated.

        With ``overlap="backward"`` nothing is sent out in it; without, and for gradients that FSDP2's
        ``set_requires_gradient_sync(False)`` holds back, it isn't needed.
        """
        return self._backward.accumulate()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step. Called from compiled code it is left out of the graph.

        Args:
            closure: recomputes the loss; called once, with gradients enabled.

        Returns:
            What the closure returns, or None.
        """
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(self._step)(closure)
        return self._step(closure)

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        if self._needs_process_group:
            raise RuntimeError(UNPICKLED)
        self._watch.gradients.look(self.param_groups)
        muon = self._muon_params()
        compared = self._compared
        if not compared:
            self._compare(muon)
        if self.skip_nonfinite and not gradients_are_finite(self.param_groups, self.process_group):
            self.num_skipped_steps += 1
            self._backward.discard(in_step=compared)
            return loss
        shards = self._shards(muon)
        plan = self._plan(muon)
        self._runtime.compile = self.compile  # may be set after a compiler has failed
        self._runtime.prepare(plan, shards)
        counts = self.traffic[kind_of_step([due for *_, due in muon])]
        sent = self._backward.finish(muon, shards, counts, compared=compared)
        counts.num_steps += 1
        self._runtime.execute(plan, shards, counts, fill=self._step_adamw, phase=self.phase, sent=sent)
        for shard in shards:
            shard.write_back()
        for parameter, _, _ in muon:
            self.state[parameter]["step"] += 1
        for index in plan.renewed:
            self.state[muon[index][0]]["num_grams"] += 1
        return loss

    def _muon_params(self) -> list[tuple[Tensor, dict[str, Any], bool]]:
        """(parameter, group, whether it refreshes in this step) of all Muon parameters but frozen and empty ones."""
        self._watch.groups.look(self.param_groups, self.state)
        out = []
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                check_gram_period(group, self.options, "a group")
                for parameter in group["params"]:
                    if parameter.requires_grad and parameter.numel() > 0:
                        state = self.state[parameter]
                        due = is_refresh(group["period"], state["step"], state["phase"])
                        # a checkpoint without what Gram row steps go by: a refresh finds it
                        out.append((parameter, group, due or state.get("num_grams") == 0))
        return out

    def _plan(self, muon: list[tuple[Tensor, dict[str, Any], bool]]) -> StepPlan:
        """The plan of this step; made once for each set of refreshing parameters."""
        return self._plans.of(muon, lambda: self._entries(muon), self.options)

    def _entries(self, muon: Iterable[tuple[Tensor, dict[str, Any], bool]]) -> list[Entry]:
        return [
            make_entry(p, group, self._layouts[p], self.state[p]["momentum_buffer"].dtype, self.ns_dtype, self.options)
            for p, group, _ in muon
        ]

    def _shards(self, muon: list[tuple[Tensor, dict[str, Any], bool]]) -> list[Shard]:
        hypers = {id(group): Hyper.of(group) for group in self.param_groups if group["algorithm"] == "muon"}
        shards = []
        for parameter, group, _ in muon:
            hyper = hypers[id(group)]
            momentum, layout = self.state[parameter]["momentum_buffer"], self._layouts[parameter]
            shards.append(make_shard(parameter, momentum, layout, self._runtime.rank, group, hyper))
            shards[-1].gram = gram_state(self.state[parameter])
        return shards

    def _step_adamw(self) -> None:
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                adamw.step(group, self.state)

    def _compare(self, muon: list[tuple[Tensor, dict[str, Any], bool]]) -> None:
        """Raises RuntimeError, on all ranks of a mesh, if one of them would do something else; it is named."""
        everything = [(p, g) for g in self.param_groups for p in g["params"]]
        adamw_params = [(p, g) for p, g in everything if g["algorithm"] == "adamw" and p.requires_grad]
        entries = zip(muon, self._entries(muon), strict=True)
        muon_params = [(p, group, self.state[p], self._layouts[p], entry) for (p, group, _), entry in entries]
        moving = {p for p, *_ in (*muon_params, *adamw_params)}
        idle = [(p, self._layouts.get(p)) for p, _ in everything if p not in moving]
        how = (self.options, self.skip_nonfinite)
        compare_ranks(muon_params, adamw_params, idle, how, self._process_groups, self._runtime)
        if self.overlap:
            self._process_groups.separate(self._layouts.values())
        self._compared = True

    # -------------------------------------------------------------------------------------------------- reports

    def plan(self, kind: Literal["refresh", "row"]) -> StepPlan:
        """The plan of a step in which all parameters refresh, or none does."""
        return self._plan([(parameter, group, kind == "refresh") for parameter, group, _ in self._muon_params()])

    def describe(self) -> str:
        """Routing, layout and buckets as text, and what this rank computes and sends in each kind of step."""
        from rowmuon.report import describe

        return describe(self)
