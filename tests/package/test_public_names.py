"""A public name means one thing: no two modules define it, and each says what it is."""

import ast
from collections import defaultdict
from pathlib import Path

import torch

import softprune

ROOT = Path(softprune.__file__).parent


def _definitions() -> list[tuple[Path, ast.FunctionDef | ast.ClassDef]]:
    """Public functions and classes at the top of a module. Commands share the name of what they call."""
    found = []
    for file in ROOT.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not any(isinstance(each, ast.Name) and each.id == "command" for each in node.decorator_list):
                found.append((file, node))
    return found


def test_no_name_is_defined_twice() -> None:
    places = defaultdict(list)
    for file, node in _definitions():
        places[node.name].append(str(file.relative_to(ROOT)))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice


def test_every_public_name_has_a_docstring() -> None:
    missing = [
        f"{file.relative_to(ROOT)}: {node.name}"
        for file, node in _definitions()
        if ast.get_docstring(node) is None and not node.decorator_list  # the rules of operators
    ]
    assert not missing


def test_every_module_has_a_docstring() -> None:
    texts = {file: file.read_text() for file in ROOT.rglob("*.py")}
    missing = [str(file) for file, text in texts.items() if text and ast.get_docstring(ast.parse(text)) is None]
    assert not missing


def test_tables_show_as_the_value_of_a_notebook_cell() -> None:
    model, example = softprune.models.build("digits_net", 10), torch.zeros(2, 1, 8, 8)
    for value in (softprune.inspect(model, example), softprune.cost(model, example)):
        assert repr(value) == str(value)
        assert "\n" in repr(value)
