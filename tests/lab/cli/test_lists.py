"""`recipes`, `methods`, `models`, and the help."""

import json
import tomllib
from pathlib import Path

import pytest

from softprune import __version__, models
from softprune.lab.cli import main
from softprune.lab.config.recipes import load_recipe, recipe_files, sweep_files
from softprune.methods import REGISTRY


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("methods", [*REGISTRY, "dense"]),
        ("models", list(models.REGISTRY)),
        ("recipes", [*recipe_files(), *sweep_files()]),
    ],
)
def test_a_list_names_everything_as_text_and_as_json(softprune, command: str, names: list[str]) -> None:
    result = softprune(command)
    assert result.exit_code == 0
    listed = {line.split()[0] for line in result.output.splitlines() if line and not line.startswith(" ")}
    assert set(names) <= listed
    rows = json.loads(softprune(command, "--json").output)
    key = "name" if command == "recipes" else command.rstrip("s")
    assert [row[key] for row in rows] == names


def test_the_help_names_every_command(softprune) -> None:
    from softprune.lab.cli.app import app

    output = softprune("--help").output
    names = [each.callback.__name__ for each in app.registered_commands]
    assert {"train", "resume", "recipes", "predict", "sweep", "compare"} <= set(names)
    for name in names:
        assert f"\n  {name} " in output
        shown = softprune(name, "--help")
        assert shown.exit_code == 0
        assert max(map(len, shown.output.splitlines())) <= 80


def test_the_version(softprune) -> None:
    assert softprune("--version").output == f"softprune {__version__}\n"


def test_a_recipe_is_printed_and_copied(softprune, tmp_path: Path) -> None:
    shown = softprune("recipes", "cifar10-vgg16-scp")
    assert shown.exit_code == 0
    assert tomllib.loads(shown.output)["model"]["name"] == "vgg16"
    copied = softprune("recipes", "cifar10-vgg16-scp", "--copy", "mine.toml")
    assert "softprune train mine.toml" in copied.output
    assert load_recipe("mine.toml").model.name == "vgg16"
    again = softprune("recipes", "cifar10-vgg16-scp", "--copy", "mine.toml")
    assert again.exit_code == 2
    assert "Got mine.toml" in again.stderr
    unknown = softprune("recipes", "cifar10-vgg16-spc")
    assert unknown.exit_code == 2
    assert "Did you mean" in unknown.stderr
    assert softprune("recipes", "--copy", "other.toml").exit_code == 2


def test_ctrl_c_while_commands_are_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("softprune.lab.cli.app.importlib.import_module", interrupted)
    with pytest.raises(SystemExit, match="130"):
        main()
