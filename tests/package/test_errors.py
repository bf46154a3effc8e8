"""One except clause catches everything that softprune refuses."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import softprune as sp
from softprune import errors


def test_every_error_is_a_softprune_error_and_a_value_error() -> None:
    classes = [
        value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__
    ]
    for cls in classes:
        assert issubclass(cls, errors.SoftpruneError)
        assert issubclass(cls, ValueError)
        assert cls.__doc__


def test_every_warning_begins_with_softprune() -> None:
    without = []
    for file in sorted(Path(errors.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                text = ast.unparse(node.args[0]).strip("f'\"") if node.args else ""
                if node.func.attr in ("warning", "warn") and not text.startswith("softprune: "):
                    without.append(f"{file.name}:{node.lineno}: {text}")
    assert not without, "\n".join(without)


def test_control_characters_are_shown_not_sent_to_the_terminal() -> None:
    assert errors.printable("a\x1b[31m\n\u202e") == "a\\x1b[31m\\n\\u202e"
    assert errors.printable("\N{GREEK SMALL LETTER DELTA} plain name") == "\N{GREEK SMALL LETTER DELTA} plain name"
    assert errors.printable("a\nb\r", "\n\t") == "a\nb\\r"


NET, ROW = nn.Linear(2, 2), torch.zeros(1, 2)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: sp.export.to_onnx(nn.Linear, ROW, "x.onnx"), "class Linear"),
        (lambda: sp.bench.compare_latency(NET, None, ROW), "compact"),
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[], Any], word: str) -> None:
    with pytest.raises(errors.SoftpruneError, match=word):
        call()


@pytest.mark.parametrize(
    ("line", "remedy"), [("import none_such", "pip install"), ("raise OSError", "fits your torch")]
)
def test_a_package_that_cannot_be_imported_has_a_remedy(
    line: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unusable.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.ConfigError, match=remedy):
        errors.import_optional("unusable", "this test")
