"""Rooms import one way: a room may use the rooms before it, never one after or beside it."""

import ast
from pathlib import Path

import softprune

ROOT = Path(softprune.__file__).parent

# Packages of one line do not import each other.
ORDER = [
    {"errors", "hardware", "module_state"},
    {"distributed", "io", "rng"},
    {"config"},
    {"graph"},
    {"costs"},
    {"masks"},
    {"plan"},
    {"surgery"},
    {"selection"},
    {"inspection"},
    # Before the methods: a pruner with a target has a budget, which needs no more of it than graph, masks and plan.
    {"budget"},
    {"methods"},
    {"models", "data"},
    {"runs"},
    {"export"},
    {"fused"},
    {"train"},
    {"sweep"},
    {"report", "integrations"},
    {"bench"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}


def _imported_rooms(file: Path) -> set[str]:
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            # `from softprune import models` names a room; `from softprune.models import vgg16` is in one.
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "softprune" and len(part) > 1 and part[1] in LEVEL}


def test_every_room_has_a_place_in_the_order() -> None:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and list(path.glob("*.py"))}
    rooms |= {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"}
    assert rooms <= LEVEL.keys()


def test_imports_go_one_way() -> None:
    wrong = []
    for file in ROOT.rglob("*.py"):
        room = file.relative_to(ROOT).parts[0].removesuffix(".py")
        for imported in _imported_rooms(file) - {room} if room in LEVEL else set():
            if LEVEL[imported] >= LEVEL[room]:
                wrong.append(f"{file.relative_to(ROOT)} imports {imported}")
    assert not wrong
