"""`report`, `compare`, and the lists of what a recipe can name."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from softprune import __version__, models
from softprune.lab.cli.app import app
from softprune.lab.config.recipes import RECIPES, SWEEPS
from softprune.methods import REGISTRY


def test_report_of_a_finished_run(softprune, finished: Path) -> None:
    result = softprune("report", str(finished))
    assert result.exit_code == 0
    assert ", SCP</h1>" in (finished / "report.html").read_text()
    assert softprune("report", "nothing").exit_code == 2
    elsewhere = softprune("report", str(finished), "--out", "pages/run.html")  # the run may be on a read-only disk
    assert elsewhere.output == "Report: pages/run.html\n"
    assert Path("pages/run.html").read_text() == (finished / "report.html").read_text()


def test_compare_prints_a_row_per_method_and_writes_a_page(softprune, finished: Path, tmp_path: Path) -> None:
    result = softprune("compare", str(finished), str(finished / "dense"), "--out", "page.html")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "page.html").stat().st_size > 5_000
    title, header, *rows = result.output.splitlines()[:4]
    assert title == "tiny_networks:tiny on digits"
    assert "change" in header
    assert "paper" not in header
    assert [row.split()[0] for row in rows] == ["dense", "SCP"]


def test_unfinished_runs_are_left_out_with_a_line_each(softprune, finished: Path, tmp_path: Path) -> None:
    for name in ("a", "c"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    none = [softprune("compare", *given) for given in (["runs"], ["runs/a", "runs/c"])]
    for result in none:
        assert result.exit_code == 2
        assert "`softprune resume runs/a` finishes it" in " ".join(result.stderr.split())
    shutil.copytree(finished, tmp_path / "runs" / "b")
    (tmp_path / "runs" / "logs").mkdir()
    swept, listed = (
        softprune("compare", "runs"),
        softprune("compare", *(f"runs/{name}" for name in "abc"), "runs/logs"),
    )
    assert swept.exit_code == listed.exit_code == 0, listed.output
    assert swept.stdout == listed.stdout
    for result in (swept, listed):
        assert [line.split()[2] for line in result.stderr.splitlines() if "resume" in line] == ["runs/a", "runs/c"]
    assert "runs/logs contains no run" in listed.stderr


@pytest.mark.parametrize(
    ("command", "key", "names"),
    [
        ("methods", "method", [*REGISTRY, "dense"]),
        ("models", "model", list(models.REGISTRY)),
        ("recipes", "name", [*RECIPES, *SWEEPS]),
    ],
)
def test_a_list_names_everything_as_text_and_as_json(softprune, command: str, key: str, names: list[str]) -> None:
    result = softprune(command)
    assert result.exit_code == 0
    assert set(names) <= {line.split()[0] for line in result.output.splitlines() if line.strip()}
    assert [row[key] for row in json.loads(softprune(command, "--json").output)] == names


def test_a_recipe_is_printed(softprune) -> None:
    shown = softprune("recipes", "cifar10-vgg16-scp")
    assert tomllib.loads(shown.output)["model"]["name"] == "vgg16"
    unknown = softprune("recipes", "cifar10-vgg16-spc")
    assert unknown.exit_code == 2
    assert "Did you mean" in unknown.stderr


def test_the_help_names_every_command(softprune) -> None:
    output = softprune("--help").output
    names = [each.callback.__name__ for each in app.registered_commands]
    assert {"train", "resume", "recipes", "sweep", "compare"} <= set(names)
    for name in names:
        assert f"\n  {name} " in output
        shown = softprune(name, "--help")
        assert shown.exit_code == 0
        assert max(map(len, shown.output.splitlines())) <= 80
    assert softprune("--version").output == f"softprune {__version__}\n"
