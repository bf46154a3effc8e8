"""The lists name everything that their registries hold, and the help names every command."""

import pytest

from softprune import models
from softprune.config.shipped import recipe_names
from softprune.data import DATASETS
from softprune.methods import REGISTRY


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("methods", [*REGISTRY, "dense"]),
        ("models", list(models.REGISTRY)),
        ("data", list(DATASETS)),
        ("recipes", recipe_names()),
    ],
)
def test_lists(softprune, command: str, names: list[str]) -> None:
    result = softprune(command)
    assert result.exit_code == 0
    listed = {line.split()[0] for line in result.output.splitlines() if line and not line.startswith(" ")}
    assert set(names) <= listed


def test_help_names_every_command(softprune) -> None:
    result = softprune("--help")
    for command in (
        "train",
        "resume",
        "inspect",
        "compact",
        "evaluate",
        "report",
        "compare",
        "methods",
        "models",
        "data",
    ):
        assert f"\n  {command}" in result.output or f" {command} " in result.output
        assert softprune(command, "--help").exit_code == 0
