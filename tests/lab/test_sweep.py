"""Sweeps: how a file becomes runs, what is refused before any of them starts, and how they are trained."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_recipe
from typer.testing import CliRunner

import softprune.lab.sweep
from softprune.errors import ConfigError
from softprune.lab.cli.app import app
from softprune.lab.config.recipes import SWEEPS, dump_config, title_of
from softprune.lab.runs.folder import RunFolder
from softprune.lab.sweep import Ended, read_sweep, run_here, run_on_ray
from softprune.lab.train.control import Listener

GRID = """
[grid]
seed = [0, 1]
[[run]]
recipe = "tiny.toml"
set = { "train.epochs" = 1 }
grid = { "method.strength" = [0.5, 1e-4] }
[[run]]
recipe = "tiny.toml"
name = "again"
after = "tiny"
grid = { "method.strength" = [0.5, 1e-4] }
set = { "method.name" = "scratch", "method.options.plan" = "{after}" }
"""
FAILING = """
[[run]]
recipe = "tiny.toml"
name = "bad"
set = { "model.name" = "tiny_networks:gone" }
[[run]]
recipe = "tiny.toml"
name = "blocked"
after = "bad"
[[run]]
recipe = "tiny.toml"
set = { "train.epochs" = 1 }
[[run]]
recipe = "tiny.toml"
name = "scratch"
after = "tiny"
set = { "train.epochs" = 1, "method.name" = "scratch", "method.options.plan" = "{after}" }
"""
STATES = {"bad": "failed", "blocked": "blocked", "tiny": "done", "scratch": "done"}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.chdir(tmp_path)
    tiny_recipe(tmp_path)

    def write(text: str) -> Path:
        path = tmp_path / "my-sweep.toml"
        path.write_text(text)
        return path

    return write


def progress() -> nullcontext[Listener]:
    return nullcontext(Listener())


def by_name(ended: list[Ended]) -> dict[str, str]:
    return {each.cell.name: each.state for each in ended}


def test_a_file_becomes_a_grid_of_checked_runs(write: Callable[[str], Path]) -> None:
    sweep = read_sweep(write(GRID))
    folder = Path("runs/my-sweep").absolute()
    assert {cell.folder.path.parent for cell in sweep} == {folder}
    assert [cell.name for cell in sweep] == [
        f"{label}-seed{seed}-strength{strength}"
        for label in ("tiny", "again")
        for seed in (0, 1)
        for strength in ("0.5", "0.0001")
    ]
    cell = sweep[3]
    assert (cell.config.seed, cell.config.method.strength, cell.config.train.epochs) == (1, 1e-4, 1)
    # Repetitions share a name, by which they are averaged.
    assert cell.config.name == sweep[1].config.name == "tiny-strength0.0001"
    last = sweep[-1]
    assert last.after == "tiny-seed1-strength0.0001"
    assert last.config.method.options["plan"] == str(folder / "tiny-seed1-strength0.0001")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"my-sweep.toml: A sweep must have at least one \[\[run\]\]"),
        ("[[run]]\nname = 'x'", "recipe must be given"),
        ("[[runs]]\nrecipe = 'digits'", "Did you mean 'run'"),
        ("[[run]]\nrecipe = 'digits'\nsett = {}", "Did you mean 'set'"),
        ("[[run]]\nrecipe = 'digits'\ngrid = {seed = 3}", "grid.seed must be a valid list"),
        ("[[run]]\nrecipe = 'digits'\n[[run]]\nrecipe = 'digits'", "Got 'digits' twice"),
        ("[[run]]\nrecipe = 'digits'\nafter = 'x'", "Got 'x', with 0; earlier: none"),
        ("[[run]]\nrecipe = 'digits'\nset = {'method.name' = 'slim'}", "Did you mean 'slimming'"),
        ("[[run]]\nrecipe = 'digits'\nset = {'model.weights' = '{after}'}", "needs `after`, the name"),
        ("[[run]]\nrecipe = 'digits'\nset = {'model.weights' = 'gone.pt'}", "gone.pt"),
        ("[[run]]\nrecipe = 'digits'\nset = {'data.name' = 'cifar01'}", "Did you mean 'cifar10'"),
        ("[[run]]\nrecipe = 'digits'\nname = '../evil'", "valid folder name"),
    ],
)
def test_mistakes_are_found_before_anything_starts(write: Callable[[str], Path], text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sweep(write(text))


@pytest.mark.parametrize("name", SWEEPS)
def test_sweeps_that_ship_are_valid(name: str, tmp_path: Path) -> None:
    read_sweep(name, tmp_path)
    assert title_of(SWEEPS[name])


def test_the_folder_of_another_run_is_refused(write: Callable[[str], Path]) -> None:
    file = write("[[run]]\nrecipe = 'tiny.toml'")
    cell = read_sweep(file)[0]
    RunFolder.create(cell.folder.path, cell.config)
    assert read_sweep(file, data_dir="images")[0].state() == "started"
    cell.folder.config.write_text(dump_config(cell.config.replace(seed=5)))
    with pytest.raises(ConfigError, match="seed = 0 instead of 5"):
        read_sweep(file)


def test_a_failed_run_stops_no_other_and_finished_ones_are_kept(write: Callable[[str], Path]) -> None:
    sweep = read_sweep(write(FAILING))
    ended = list(run_here(sweep, progress, device="cpu", time_limit=None))
    assert by_name(ended) == STATES
    assert "tiny_networks:gone" in ended[0].message
    assert "bad" in ended[1].message
    assert Path("runs/my-sweep/tiny/report.html").is_file()
    before = [cell.folder.result.stat().st_mtime_ns for cell in sweep[2:]]
    assert by_name(list(run_here(sweep, progress, device="cpu", time_limit=None))) == STATES
    assert [cell.folder.result.stat().st_mtime_ns for cell in sweep[2:]] == before


def test_a_run_that_another_process_trains_is_left_to_it(write: Callable[[str], Path]) -> None:
    sweep = read_sweep(write("[[run]]\nrecipe = 'tiny.toml'"))
    RunFolder.create(sweep[0].folder.path, sweep[0].config)
    with sweep[0].folder.lock():
        assert by_name(list(run_here(sweep, progress, device="cpu", time_limit=None))) == {"tiny": "elsewhere"}


def test_the_command_stops_with_everything_saved_and_resumes(write: Callable[[str], Path], tmp_path: Path) -> None:
    file = write("[[run]]\nrecipe = 'tiny.toml'\n[[run]]\nrecipe = 'tiny.toml'\nname = 'bad'\nafter = 'tiny'\n"
                 "set = { 'model.name' = 'tiny_networks:gone' }")  # fmt: skip
    command = ["sweep", str(file), "--device", "cpu"]
    stopped = CliRunner().invoke(app, [*command, "--time-limit", "0"])
    assert stopped.exit_code == 75, stopped.output
    assert not (tmp_path / "runs/my-sweep/tiny/result.json").exists()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 1, again.output
    assert (tmp_path / "runs/my-sweep/tiny/result.json").is_file()
    assert "1 of 2 runs done" in again.stdout
    assert "bad failed" in again.stderr


def on_ray(file: Path) -> "subprocess.Popen[str]":
    """A sweep with two runs side by side, as a process: Ray's own processes outlive the warnings of a test."""
    pytest.importorskip("ray", reason='the "sweep" extra is not installed')
    command = [sys.executable, "-m", "softprune", "sweep", str(file), "--jobs", "2", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_what_goes_on_after_a_signal_is_interrupted_again(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may lose an interrupt; here it loses the first."""
    cells = read_sweep(write(FAILING))
    sent: list[int] = []
    ended = {number: Ended(cell, "stopped") for number, cell in enumerate(cells)}
    numbers = iter(ended)
    ray = SimpleNamespace(
        init=lambda **_: None,
        shutdown=lambda: None,
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 8.0}}],
        remote=lambda **_: lambda _: SimpleNamespace(remote=lambda *_: next(numbers)),
        wait=lambda pending, timeout: ([each for each in pending if sent.count(each) > 1], []),
        cancel=sent.append,
        get=ended.__getitem__,
        exceptions=SimpleNamespace(RayError=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(softprune.lab.sweep, "_AGAIN", 0.0)
    limits: dict[str, Any] = {"jobs": 2, "address": None, "cpus": 1.0, "gpus": None, "device": "cpu"}
    assert [*run_on_ray(cells, nullcontext, time_limit=0.0, **limits)] == [*ended.values()]  # type: ignore[arg-type]


@pytest.mark.slow
def test_runs_on_ray_end_as_in_this_process(write: Callable[[str], Path]) -> None:
    with on_ray(write(FAILING)) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 1, output
    assert all(f"{state:<9} {name}\n" in output for name, state in STATES.items()), output


@pytest.mark.slow
def test_a_signal_lets_runs_on_ray_save(write: Callable[[str], Path], tmp_path: Path) -> None:
    grid = "[grid]\nseed = [0, 1, 2]\n[[run]]\nrecipe = 'tiny.toml'\nset = { 'train.epochs' = 2000 }"
    with on_ray(write(grid)) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("runs/*/*/checkpoints/*.ckpt")) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 75, output
    assert not any("ERROR" in path.read_text() for path in tmp_path.glob("runs/*/*/run.log"))
