"""`import softprune` is quick: names are there as soon as they are asked for, and listing commands need no PyTorch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import softprune


def _alone(code: str) -> str:
    """What a process of its own prints, warnings being errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["recipes"]])
def test_help_and_recipes_do_not_wait_for_torch(arguments: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["softprune", *{arguments!r}]
from softprune.lab.cli import main
try:
    main()
except SystemExit as done:
    assert done.code == 0, done.code
assert "torch" not in sys.modules
"""
    assert _alone(code)


def test_reports_and_recipes_need_no_torch() -> None:
    code = "import sys, softprune.lab.report, softprune.lab.config.recipes; print('torch' in sys.modules)"
    assert _alone(code).split() == ["False"]


def test_every_public_name_is_there_and_listed() -> None:
    assert set(softprune.__all__) <= set(dir(softprune))
    kinds = {name: type(getattr(softprune, name)).__name__ for name in softprune.__all__}
    assert [name for name, kind in kinds.items() if kind == "module"] == ["bench", "export", "models"]


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse(Path(softprune.__file__).read_text())
    seen = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(softprune.__all__) - {"__version__"} <= seen


def test_an_unknown_name_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'softprune' has no attribute 'SoftPrune'"):
        _ = softprune.SoftPrune
