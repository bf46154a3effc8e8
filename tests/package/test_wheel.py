"""The wheel, made from the source archive, has every file of the package and works without the repository."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from softprune import __version__

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_wheel_installs_and_trains(tmp_path: Path) -> None:
    pytest.importorskip("build")
    python = [sys.executable, "-m"]
    # Without isolation the build uses the installed setuptools, and needs no index.
    build = [*python, "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    assert (tmp_path / f"softprune-{__version__}.tar.gz").exists()
    (wheel,) = tmp_path.glob("softprune-*.whl")
    assert wheel.name == f"softprune-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    source = ROOT / "src"
    kinds = (".py", ".toml", ".npz", ".csv", ".md", ".html", ".css", ".js", ".typed")
    expected = {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in kinds}
    assert {"softprune/py.typed", "softprune/lab/recipes/digits.toml"} <= set(names)
    assert expected <= set(names)

    target = tmp_path / "installed"
    install = [*python, "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True)
    environment = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}
    few = ["--set", "train.dense_baseline=false", "--set", "data.holdout=1300"]
    for arguments, text in (
        (["--version"], f"softprune {__version__}"),
        (["train", "--epochs", "1", *few, "--out", "run"], "Report: run"),
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "softprune", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert text in done.stdout
    where = [sys.executable, "-P", "-c", "import softprune; print(softprune.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(target))
