"""One except clause catches everything that softprune refuses."""

import ast
import inspect
from pathlib import Path

import pytest

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
