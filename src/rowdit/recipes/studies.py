"""The studies that `rowdit study` runs, by name. Each is made from the data sources that the user names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rowdit.train.config import ConfigError, nearest

if TYPE_CHECKING:
    from rowdit.study.cases import Study

STUDIES = ("small",)


def load_study(name: str, data: Mapping[str, str]) -> Study:
    """The study of this name.

    Args:
        name: one of `STUDIES`.
        data: data set's name -> source, as `rowdit.data.open_dataset` takes it, for data that isn't in the package.

    Raises:
        ConfigError: there is no such study, or it takes no such data set; the nearest is named.
    """
    if name not in STUDIES:
        raise ConfigError(f"there is no study {name!r}{nearest(name, STUDIES)}")
    module = importlib.import_module(f"rowdit.recipes.study_{name}")
    for key in data:
        if key not in module.DATA:
            raise ConfigError(f"the study {name!r} takes no data set {key!r}{nearest(key, module.DATA)}")
    return module.study(data)
