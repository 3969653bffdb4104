"""Coefficients of the Newton-Schulz iteration: one triple (a, b, c) of p(s) = a s + b s^3 + c s^5 per iteration."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import cast

__all__ = ["COEFFICIENTS", "Triple", "resolve_coefficients"]

Triple = tuple[float, float, float]

_DEFAULT_NUM_STEPS = 5
_MAX_NUM_STEPS = 100

# Optimal quintics for singular values in [1e-3, 1] as the paper prints them, before its safety factor.
_POLAR_EXPRESS_RAW: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# Rounding may push a singular value above 1, where the next polynomial falls steeply: p(s / 1.01) instead of p(s)
# leaves room. The last one is where everything has arrived, and stays exact.
_POLAR_EXPRESS_SAFETY = 1.01


def _with_safety(triples: Sequence[Triple], factor: float) -> tuple[Triple, ...]:
    return (*((a / factor, b / factor**3, c / factor**5) for a, b, c in triples[:-1]), triples[-1])


COEFFICIENTS: Mapping[str, tuple[Triple, ...]] = MappingProxyType(
    {
        # One polynomial, steep at zero (3.4445^5 = 485), which sends (0.003, 1] to about [0.68, 1.13] in five steps and
        # doesn't converge. https://kellerjordan.github.io/posts/muon/, the default of torch.optim.Muon.
        "keller_jordan": ((3.4445, -4.7750, 2.0315),) * _DEFAULT_NUM_STEPS,
        # Converges; safety factor 1.01 on all but the last. arXiv:2505.16932, section 3.4 and its listing.
        "polar_express": _with_safety(_POLAR_EXPRESS_RAW, _POLAR_EXPRESS_SAFETY),
    }
)


def resolve_coefficients(ns_coefficients: str | Triple | Sequence[Triple], ns_steps: int | None) -> tuple[Triple, ...]:
    """Return one triple (a, b, c) for each Newton-Schulz iteration.

    Args:
        ns_coefficients: A name in `COEFFICIENTS`, one triple used in every iteration, or one triple per iteration.
        ns_steps: Number of iterations, 1 to 99. None: 5 for a name or a single triple, the length of a sequence.
            A named set that is shorter repeats its last triple; one that is longer is cut.

    Raises:
        ValueError: unknown name, a triple that isn't three finite numbers, `ns_steps` out of range, or a sequence
            whose length isn't `ns_steps`.

    Example:
        >>> resolve_coefficients((2.0, -1.5, 0.5), 2)
        ((2.0, -1.5, 0.5), (2.0, -1.5, 0.5))
        >>> len(resolve_coefficients("polar_express", None))
        5
    """
    if ns_steps is not None:
        _check_num_steps(ns_steps)
    if isinstance(ns_coefficients, str):
        named = COEFFICIENTS.get(ns_coefficients)
        if named is None:
            raise ValueError(_unknown_name("ns_coefficients", ns_coefficients, COEFFICIENTS))
        num_steps = _DEFAULT_NUM_STEPS if ns_steps is None else ns_steps
        return named[:num_steps] + named[-1:] * (num_steps - len(named))
    items = tuple(ns_coefficients)
    if items and not isinstance(items[0], Sequence):
        num_steps = _DEFAULT_NUM_STEPS if ns_steps is None else ns_steps
        return (_checked_triple(items),) * num_steps
    triples = tuple(_checked_triple(item) for item in items)
    if not triples:
        raise ValueError("ns_coefficients is empty: give at least one triple (a, b, c), or one of " + _names())
    if ns_steps is not None and ns_steps != len(triples):
        raise ValueError(
            f"ns_steps={ns_steps}, but ns_coefficients gives {len(triples)} iterations one triple each: "
            "make them agree or leave ns_steps out (None)"
        )
    _check_num_steps(len(triples))
    return triples


def _check_num_steps(ns_steps: int) -> None:
    if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or not 1 <= ns_steps < _MAX_NUM_STEPS:
        raise ValueError(f"ns_steps={ns_steps!r} must be an int of 1 to {_MAX_NUM_STEPS - 1}")


def _checked_triple(values: object) -> Triple:
    try:
        triple = tuple(float(value) for value in cast(Sequence[float], values))
    except (TypeError, ValueError):
        triple = ()
    if len(triple) != 3 or not all(map(math.isfinite, triple)):
        raise ValueError(f"ns_coefficients: {values!r} isn't a triple (a, b, c) of finite numbers")
    return triple


def _names() -> str:
    return ", ".join(map(repr, COEFFICIENTS))


def _unknown_name(what: str, name: str, known: Mapping[str, object]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"{what}={name!r} is unknown: take one of {', '.join(map(repr, known))}{hint}"
