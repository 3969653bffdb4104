"""Shapes by name, one row each.

S/2 to XL/8 are the published DiT shapes (arXiv:2212.09748, table 1; after the slash the patch size), learned sigma
included, for latents of 256x256 images. The rows from 1.3B on are this project's own choice of depth and width (head
dim 128). ``toy`` is for two CPU cores: half a million parameters, 49 tokens, 28x28 grey images.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rowdit.models.dit import DiTConfig

# fmt: off
_ROWS = (
    # name   image  channels patch  width depth heads classes mlp  sigma
    ("toy",    28,  1,       4,       96,  3,    3,    10,    4.0, False),
    ("S/2",    32,  4,       2,      384, 12,    6,  1000,    4.0, True),
    ("S/4",    32,  4,       4,      384, 12,    6,  1000,    4.0, True),
    ("S/8",    32,  4,       8,      384, 12,    6,  1000,    4.0, True),
    ("B/2",    32,  4,       2,      768, 12,   12,  1000,    4.0, True),
    ("B/4",    32,  4,       4,      768, 12,   12,  1000,    4.0, True),
    ("B/8",    32,  4,       8,      768, 12,   12,  1000,    4.0, True),
    ("L/2",    32,  4,       2,     1024, 24,   16,  1000,    4.0, True),
    ("L/4",    32,  4,       4,     1024, 24,   16,  1000,    4.0, True),
    ("L/8",    32,  4,       8,     1024, 24,   16,  1000,    4.0, True),
    ("XL/2",   32,  4,       2,     1152, 28,   16,  1000,    4.0, True),
    ("XL/4",   32,  4,       4,     1152, 28,   16,  1000,    4.0, True),
    ("XL/8",   32,  4,       8,     1152, 28,   16,  1000,    4.0, True),
    ("1.3B",   32,  4,       2,     1536, 30,   12,  1000,    4.0, False),
    ("2B",     32,  4,       2,     2048, 26,   16,  1000,    4.0, False),
    ("4B",     32,  4,       2,     2560, 34,   20,  1000,    4.0, False),
    ("9B",     32,  4,       2,     4096, 30,   32,  1000,    4.0, False),
    ("15B",    32,  4,       2,     5120, 32,   40,  1000,    4.0, False),
)
# fmt: on

PRESETS: Mapping[str, DiTConfig] = MappingProxyType({row[0]: DiTConfig(*row[1:]) for row in _ROWS})


def preset(name: str, **changes: Any) -> DiTConfig:
    """The configuration of that name, with fields replaced.

    Args:
        name: a key of :data:`PRESETS`.
        **changes: fields of :class:`DiTConfig`.

    Raises:
        ValueError: an unknown name or field, with the nearest known one.

    Example:
        >>> preset("B/2", patch_size=4, num_classes=10).num_tokens
        64
    """
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}{_did_you_mean(name, PRESETS)}; presets are {', '.join(PRESETS)}")
    fields = [field.name for field in dataclasses.fields(DiTConfig)]
    for key in changes:
        if key not in fields:
            raise ValueError(f"a DiT has no field {key!r}{_did_you_mean(key, fields)}; fields are {', '.join(fields)}")
    return dataclasses.replace(PRESETS[name], **changes)


def _did_you_mean(word: str, known: Any) -> str:
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
