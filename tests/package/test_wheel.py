"""The wheel, made from the source archive, has every file of the package and works without the repository."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from softprune import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel is installed, without its dependencies."""
    pytest.importorskip("build")
    made, target = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("installed")
    python = [sys.executable, "-m"]
    # Without isolation the build uses the installed setuptools, and needs no index.
    build = [*python, "build", "--no-isolation", "--outdir", str(made), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    assert (made / f"softprune-{__version__}.tar.gz").exists()
    (wheel,) = made.glob("softprune-*.whl")
    assert wheel.name == f"softprune-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    kinds = (".py", ".toml", ".npz", ".csv", ".md", ".html", ".css", ".js", ".typed")
    assert {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in kinds} <= names
    assert {"softprune/py.typed", "softprune/lab/recipes/digits.toml"} <= names
    install = [*python, "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True)
    return target


def packages(requirements: list[str], into: Path) -> None:
    """Link what `requirements` name, and what that requires, into a folder."""
    missing, seen = [Requirement(text) for text in requirements], set()
    while missing:
        requirement = missing.pop()
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        package = importlib.metadata.distribution(requirement.name)
        missing += [Requirement(text) for text in package.requires or []]
        for name in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            if not (into / name).exists():
                (into / name).symlink_to(Path(str(package.locate_file(name))))


def run(arguments: list[str], folder: Path, *paths: Path) -> str:
    """What Python prints that finds packages in the `paths` alone."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-P", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_library_needs_three_packages(installed: Path, tmp_path: Path) -> None:
    assert [Requirement(text).name for text in PROJECT["dependencies"]] == ["torch", "numpy", "safetensors"]
    site = tmp_path / "site"
    site.mkdir()
    packages(PROJECT["dependencies"], site)
    assert not {"pydantic", "typer", "rich", "softprune"} & {path.name for path in site.iterdir()}
    code = "import softprune as sp; print(sp.__file__, [getattr(sp, name) for name in sp.__all__] and 'every name')"
    assert run(["-c", code], tmp_path, installed, site) == f"{installed}/softprune/__init__.py every name\n"


@pytest.mark.slow
def test_the_command_line_needs_the_extra_lab(installed: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    packages([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["lab"]], site)
    softprune = ["-m", "softprune"]
    assert run([*softprune, "--version"], tmp_path, installed, site) == f"softprune {__version__}\n"
    few = ["--set", "train.dense_baseline=false", "--set", "data.holdout=1300"]
    train = [*softprune, "train", "--epochs", "1", *few, "--out", "run"]
    assert "Report: run" in run(train, tmp_path, installed, site)
