"""`import rowmuon` costs what `import torch` costs, and the optimizer works where torch is the only package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"

LIST_MODULES = """
import json, sys
{statement}
print(json.dumps(sorted({{name.split(".")[0] for name in sys.modules}})))
"""

# Every installed package but torch and what torch requires is made unimportable.
TRAIN_WITH_TORCH_ALONE = """
import sys
hidden = set({hidden!r})
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if path is None and name in hidden:
            raise ModuleNotFoundError(f"No module named {{name!r}} (hidden by the test)", name=name)
sys.meta_path.insert(0, Refuse())
try:
    import numpy
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("numpy was to be hidden")

import torch, rowmuon
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
hidden = [p for p in model.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if p.ndim != 2]
groups = [dict(params=hidden, algorithm="muon"), dict(params=others, algorithm="adamw", lr=1e-3)]
optimizer = rowmuon.PeriodicRowMuon(groups, lr=0.02, weight_decay=0.0, period=3)
x, y = torch.randn(64, 8), torch.randn(64, 4)
losses = []
for _ in range(30):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()))
assert losses[-1] < 0.8 * losses[0], losses
"""


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(statement: str) -> set[str]:
    return set(json.loads(run(LIST_MODULES.format(statement=statement))))


def import_names_of_torch() -> set[str]:
    """The top-level modules of torch and of everything that it requires."""
    wanted, todo = set(), ["torch"]
    while todo:
        name = todo.pop()
        if name in wanted:
            continue
        wanted.add(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # required elsewhere: on another system, by an extra
            continue
        todo += [
            requirement.split(";")[0].split("[")[0].split(" ")[0].rstrip("<>=!~.0123456789,").lower().replace("_", "-")
            for requirement in requirements
            if "extra ==" not in requirement
        ]
    return {
        module
        for module, distributions in metadata.packages_distributions().items()
        if wanted & {distribution.lower().replace("_", "-") for distribution in distributions}
    }


def test_import_loads_torch_and_nothing_else() -> None:
    own = import_names_of_torch()
    assert {"torch", "sympy", "typing_extensions"} <= own and "pytest" not in own
    before = loaded_by("import torch")
    after = loaded_by("import rowmuon")
    assert "rowmuon" in after and "torch" in after
    assert after - before - own - sys.stdlib_module_names - {"rowmuon"} == set()
    assert "rowdit" not in after


def test_import_of_rowdit_loads_nothing() -> None:
    bare = loaded_by("pass")
    assert loaded_by("import rowdit") - bare == {"rowdit"}


def test_it_trains_where_torch_is_the_only_package() -> None:
    hidden = set(metadata.packages_distributions()) - import_names_of_torch() - {"rowmuon"}
    assert {"numpy", "pytest", "rowdit"} <= hidden
    run(TRAIN_WITH_TORCH_ALONE.format(hidden=sorted(hidden)))
