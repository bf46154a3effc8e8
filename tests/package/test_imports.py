"""Imports go one way: a package may import those before it in ORDER, and no two modules import each other."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import softprune

ROOT = Path(softprune.__file__).parent

# Packages of one line do not import each other.
ORDER = [
    {"devices", "errors", "log", "module_state"},
    {"io", "mask_config", "rng", "target"},
    {"graph"},
    {"costs"},
    {"masks"},
    {"cut"},
    {"export"},
    {"bench"},
    # Before the methods: a pruner with a target has a budget, which needs no more of it than graph, masks and cut.
    {"budget"},
    {"methods"},
    {"models"},
    {"integrations"},
    {"lab"},
]
LEVEL = {package: level for level, packages in enumerate(ORDER) for package in packages}


def _module(file: Path) -> str:
    parts = ("softprune", *file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(file): file for file in ROOT.rglob("*.py")}


def _imported(file: Path) -> set[str]:
    """Modules of softprune that a file imports, also in functions and for type checkers alone."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else node.module)
    return (found & MODULES.keys()) - {_module(file)}


@functools.cache
def _imports() -> dict[str, set[str]]:
    """What each module imports, without the package itself, whose names are imported on first use."""
    return {name: _imported(file) for name, file in MODULES.items() if name != "softprune"}


def _package(module: str) -> str:
    return module.split(".")[1]


def test_every_package_has_a_place_in_the_order() -> None:
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and list(path.glob("*.py"))}
    packages |= {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"}
    assert packages <= LEVEL.keys()


def test_the_map_names_every_package_in_order() -> None:
    text = (ROOT.parents[1] / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert set(named) == LEVEL.keys()
    levels = [LEVEL[name] for name in named]
    assert levels == sorted(levels)


def test_imports_go_one_way() -> None:
    wrong = []
    for module, imported in _imports().items():
        for other in imported - {"softprune"}:
            ours, theirs = _package(module), _package(other)
            if ours in LEVEL and ours != theirs and LEVEL[theirs] >= LEVEL[ours]:
                wrong.append(f"{module} imports {other}")
    assert not wrong


def test_no_modules_import_each_other() -> None:
    graph = {name: imported - {"softprune"} for name, imported in _imports().items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None
