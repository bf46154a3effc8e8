"""Sweeps: how a file becomes runs, what is refused before any of them starts, and how they are worked off."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from tiny import tiny_recipe
from typer.testing import CliRunner

import softprune.lab.cli.sweep
import softprune.lab.cli.train  # registers the command
from softprune.errors import CheckpointError, ConfigError
from softprune.lab.cli.app import app
from softprune.lab.config.recipes import config_to_dict, dump_config, sweep_files, title_of
from softprune.lab.runs.folder import RunFolder
from softprune.lab.sweep import grid
from softprune.lab.sweep.executor import LocalPool
from softprune.lab.sweep.grid import Cell, Sweep, _finder, read_sweep
from softprune.lab.sweep.runner import Job, SweepListener, SweepRunner

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


POPEN = subprocess.Popen


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    tiny_recipe(tmp_path)

    def write(text: str) -> Path:
        path = tmp_path / "my-sweep.toml"
        path.write_text(text)
        return path

    return write


def test_a_file_becomes_a_grid_of_checked_runs(write: Any) -> None:
    sweep = read_sweep(write(GRID))
    assert sweep.folder == Path("runs/my-sweep")
    assert [cell.name for cell in sweep.cells] == [
        f"{label}-seed{seed}-strength{strength}"
        for label in ("tiny", "again")
        for seed in (0, 1)
        for strength in ("0.5", "0.0001")
    ]
    cell = sweep.cells[3]
    assert (cell.config.seed, cell.config.method.strength, cell.config.train.epochs) == (1, 1e-4, 1)
    # Repetitions share a name, by which they are averaged.
    assert cell.config.name == sweep.cells[1].config.name == "tiny-strength0.0001"
    assert cell.arguments()[:2] == ["train", str(Path("tiny.toml").resolve())]
    last = sweep.cells[-1]
    assert last.after == "tiny-seed1-strength0.0001"
    assert last.config.method.options["plan"] == str(Path("runs/my-sweep/tiny-seed1-strength0.0001").absolute())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"my-sweep.toml: A sweep must have at least one \[\[run\]\]"),
        ("[[run]]\nrecipe = 'nothing'", "neither"),
        ("[[run]]\nname = 'x'", "must have a recipe"),
        ("[[runs]]\nrecipe = 'digits'", r"Got 'runs'. Did you mean 'run'"),
        ("[[run]]\nrecipe = 'digits'\nsett = {}", r"Got 'sett'. Did you mean 'set'"),
        ("[[run]]\nrecipe = 'digits'\nset = {'train.epoch' = 3}", "train.epochs"),
        ("[[run]]\nrecipe = 'digits'\ngrid = {seed = 3}", "a list of values"),
        ("[[run]]\nrecipe = 'digits'\n[[run]]\nrecipe = 'digits'", "Got 'digits' twice"),
        ("[[run]]\nrecipe = 'digits'\nafter = 'x'", "Got 'x', which fits 0 of: no run"),
        ("[[run]]\nrecipe = 'digits'\nset = {'method.name' = 'slim'}", "Did you mean 'slimming'"),
        ("[[run]]\nrecipe = 'digits'\nset = {'model.weights' = '{after}'}", "the run that `after` names"),
        (
            "[[run]]\nrecipe = 'digits'\nset = {'model.weights' = 'gone.pt'}",
            "gone.pt, which does not exist; if they were moved, put them or a link there",
        ),
        ("[[run]]\nrecipe = 'digits'\nset = 5", "`set` must be a table of settings with a value each. Got 5"),
        ("[[run]]\nrecipe = 'digits'\nset = {'model.name' = 'vgg166'}", "Did you mean 'vgg16'"),
        ("[[run]]\nrecipe = 'digits'\nset = {'model.name' = ':net'}", "module:factory of your own. Got ':net'"),
        ("[[run]]\nrecipe = 'digits'\nset = {'data.name' = 'cifar01'}", "Did you mean 'cifar10'"),
        ("[[run]]\nrecipe = 'digits'\nset = {'data.dir' = ['a']}", r"data.dir must be text in quotes. Got \['a'\]"),
        ("[[run]]\nrecipe = 'digits'\ngrid = {'data.dir' = [5]}", "data.dir must be text in quotes. Got 5"),
        (
            "[[run]]\nrecipe = 'digits'\nset = {'method.options.x' = 2020-01-01}",
            "must be true or false or a whole number",
        ),
        ("[[run]]\nrecipe = 'digits'\nname = '../evil'", "A run's name must be usable as the name of a folder"),
        ("[[run]]\nrecipe = 'digits'\nname = 'a/b'", "A run's name must be usable as the name of a folder"),
        ("[[run]]\nrecipe = 'digits'\nname = ''", "A run's name must be usable as the name of a folder"),
        ("[[run]]\nrecipe = 'digits'\nname = ['a']", "A run's name must be usable as the name of a folder"),
        ("[[run]]\nrecipe = 'digits'\nname = 'logs'", "the folder of the runs' logs"),
        ("name = '../esc'\n[[run]]\nrecipe = 'digits'", "A sweep's name must be usable as the name of a folder"),
    ],
)
def test_mistakes_are_found_before_anything_starts(write: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sweep(write(text))


def test_after_finds_one_run_of_thousands_without_a_search() -> None:
    earlier: Any = [
        SimpleNamespace(name=f"dense-seed{seed}", run="dense", point={"seed": seed}) for seed in range(2500)
    ]
    find = _finder("dense", ("seed", "optimizer.lr"), earlier)
    began = time.process_time()
    for seed in range(2500):
        found = find({"seed": seed, "optimizer.lr": 0.1})
        assert found is not None
        assert found.name == f"dense-seed{seed}"
    assert time.process_time() - began < 2
    with pytest.raises(ConfigError, match=r"fits 0 of: dense-seed0, .* and others"):
        find({"seed": 9999})


def test_runs_of_a_sweep_may_start_from_their_own_baselines(write: Any) -> None:
    settings = "{ 'model.weights' = 'baseline', 'train.dense_baseline' = true }"
    (cell,) = read_sweep(write(f"[[run]]\nrecipe = 'tiny.toml'\nset = {settings}")).cells
    assert cell.config.model.weights == "baseline"


@pytest.mark.parametrize("name", sweep_files())
def test_sweeps_that_ship_are_valid(name: str, tmp_path: Path) -> None:
    read_sweep(name, tmp_path)
    assert title_of(sweep_files()[name])


def test_train_makes_of_a_cells_arguments_the_configuration_that_the_sweep_expects(write: Any) -> None:
    file = write("[[run]]\nrecipe = 'digits'\nset = { 'model.name' = 'tiny_networks:tiny', 'method.name' = 'sfp' }")
    (cell,) = read_sweep(file).cells
    done = CliRunner().invoke(app, [*cell.arguments(), "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["config"] == config_to_dict(cell.config)


def test_a_run_that_was_started_otherwise_is_not_mixed_up(write: Any) -> None:
    file = write("[[run]]\nrecipe = 'tiny.toml'")
    cell = read_sweep(file).cells[0]
    RunFolder.create(cell.folder.path, cell.config)
    assert read_sweep(file).cells[0].arguments() == ["resume", "runs/my-sweep/tiny", "--model", "tiny_networks:tiny"]
    elsewhere = read_sweep(file, data_dir="images").cells[0]
    assert elsewhere.arguments()[-2:] == ["--data-dir", "images"]
    other = cell.config.replace(seed=5)
    cell.folder.config.write_text(dump_config(other))
    with pytest.raises(ConfigError, match=r"must hold the run 'tiny' .* Got a changed .*, seed = 0 instead of 5; give"):
        read_sweep(file)


def test_a_sweep_is_found_from_another_folder_and_where_it_was_moved(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(GRID)
    for cell in read_sweep(file).cells:
        RunFolder.create(cell.folder.path, cell.config)
    read_sweep(file)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    read_sweep(file, tmp_path / "runs" / "my-sweep")
    (tmp_path / "runs" / "my-sweep").rename(tmp_path / "moved")
    read_sweep(file, tmp_path / "moved")
    file.write_text(GRID.replace('"{after}"', '"{after}-other"'))
    with pytest.raises(ConfigError, match=r"method\.options\.plan = '.*-other' instead of"):
        read_sweep(file, tmp_path / "moved")


class Recorder(SweepListener):
    """Notes what happened in order, and how many ran at once."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.most = 0
        self.seen: list[str] = []

    def on_change(self, job: Job) -> None:
        self.events.append((job.cell.name, job.state))

    def on_poll(self, jobs: Any) -> None:
        self.most = max(self.most, sum(job.state == "running" for job in jobs))
        self.seen = [job.state for job in jobs]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretended(Cell):
    """A run that is a line of Python."""

    code: str

    def arguments(self) -> list[str]:
        return ["--help"]


def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch, **codes: str) -> Sweep:
    """A sweep of runs that execute a line each with `folder` set; `done()` writes the result."""
    prelude = (
        "import sys, time, pathlib; folder = pathlib.Path(sys.argv[1]); "
        "done = lambda: (folder.mkdir(parents=True, exist_ok=True), (folder / 'result.json').write_text('{}')); "
    )
    cells = []
    for name, code in codes.items():
        label, _, after = name.partition("__")
        cells.append(
            Pretended(
                name=label,
                recipe="",
                settings=(),
                folder=RunFolder(folder / label),
                config=None,  # type: ignore[arg-type]
                point={},
                after=after or None,
                code=prelude + code,
            )
        )

    def popen(command: list[str], **options: Any) -> Any:
        cell = cells[next(i for i, cell in enumerate(cells) if options["stdout"].name.endswith(f"/{cell.name}.log"))]
        return POPEN([sys.executable, "-c", cell.code, str(cell.folder.path)], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    return Sweep(folder, tuple(cells))


def test_runs_go_side_by_side_and_failures_stop_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = pretend(
        tmp_path,
        monkeypatch,
        one="time.sleep(0.5); done()",
        two="time.sleep(0.5); sys.exit('the disk is full')",
        three__one="assert (folder.parent / 'one' / 'result.json').is_file(); done()",
        four__two="done()",
        five="done()",
    )
    recorder, runner = Recorder(), SweepRunner(sweep, LocalPool(2))
    assert runner.run(recorder) is None
    assert recorder.most == 2
    states = {job.cell.name: job.state for job in runner.jobs}
    assert states == {"one": "done", "two": "failed", "three": "done", "four": "blocked", "five": "done"}
    assert runner.jobs[1].last_lines() == ["the disk is full"]
    # Again: what is done is left alone, what failed is tried again.
    sweep = pretend(tmp_path, monkeypatch, one="sys.exit('again?')", two="done()", four__two="done()")
    recorder = Recorder()
    assert SweepRunner(sweep).run(recorder) is None
    assert recorder.events == [("two", "running"), ("two", "done"), ("four", "running"), ("four", "done")]


def test_a_stop_lets_the_runs_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: (open(folder.parent / 'saved', 'w'), sys.exit(75))); "
        "time.sleep(60)"
    )
    sweep = pretend(tmp_path, monkeypatch, one=saving, two="done()")
    runner = SweepRunner(sweep)
    began = time.monotonic()
    recorder = Recorder()
    assert runner.run(recorder, time_limit=1.5) == "the time limit of 1.5 s"
    assert 1 < runner.jobs[0].seconds < time.monotonic() - began < 30
    assert (tmp_path / "saved").exists()
    assert [job.state for job in runner.jobs] == recorder.seen == ["stopped", "waiting"]


def test_a_stop_during_start_up_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has no handler before it has imported what it needs: SIGTERM ends it, with nothing to save."""
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    sweep = pretend(tmp_path, monkeypatch, killed=killed, starting="time.sleep(60)")
    runner = SweepRunner(sweep)
    assert runner.run(Recorder(), time_limit=1.5) == "the time limit of 1.5 s"
    # The one that somebody else killed has failed.
    assert [job.state for job in runner.jobs] == ["failed", "stopped"]
    assert runner.jobs[0].last_lines() == ["ended by signal 15, Terminated"]


def test_an_error_of_the_sweep_stops_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(SweepListener):
        def on_poll(self, jobs: Any) -> None:
            raise OSError("the terminal is gone")

    closed: list[LocalPool] = []
    monkeypatch.setattr(LocalPool, "close", lambda pool: closed.append(pool))
    runner = SweepRunner(pretend(tmp_path, monkeypatch, one="time.sleep(60)"))
    with pytest.raises(OSError, match="the terminal is gone"):
        runner.run(Broken())
    assert [job.state for job in runner.jobs] == ["stopped"]
    assert closed == [runner.executor]


def test_a_run_that_is_stopped_by_itself_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = pretend(tmp_path, monkeypatch, one="print('Stopped by SIGTERM'); sys.exit(75)", two__one="done()")
    monkeypatch.setattr(grid, "read_sweep", lambda *_, **__: sweep)
    ended = CliRunner().invoke(app, ["sweep", "pretended", "--time-limit", "20", "--device", "cpu"])
    assert ended.exit_code == 1, ended.output
    assert "one stopped: Stopped by SIGTERM" in ended.stderr
    assert "two blocked: it needs one, which has no result" in ended.stderr


def test_a_damaged_record_of_a_finished_run_does_not_hide_which_runs_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = pretend(tmp_path, monkeypatch, one="", two="")
    sweep.cells[0].folder.path.mkdir()
    sweep.cells[0].folder.result.write_text("{}")
    runner = SweepRunner(sweep)
    runner.jobs[0].state, runner.jobs[1].state = "done", "failed"
    for reason, code in ((None, 1), ("SIGTERM", 75)):
        with pytest.raises(typer.Exit) as ended:
            softprune.lab.cli.sweep._conclude(sweep, runner.jobs, reason)
        assert ended.value.exit_code == code
        printed = capsys.readouterr()
        assert "result.json" in printed.err
        assert "two failed: it wrote no message" in printed.err
        assert printed.out


@pytest.mark.parametrize("end", ["done", "dropped"])
def test_a_run_that_outlived_its_sweep_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """A killed sweep leaves its processes behind; a second process on the same run would spoil it."""
    code = "done()" if end == "done" else "(folder.parent / 'logs' / 'one.dropped').write_text('{}')"
    sweep = pretend(tmp_path, monkeypatch, one=f"time.sleep(1.5); {code}")
    orphan = SweepRunner(sweep).jobs[0]
    assert orphan.lock()
    orphan.start(LocalPool())
    orphan.release()  # as if the sweep had been killed: the process alone holds the claim now
    recorder, runner = Recorder(), SweepRunner(sweep)
    assert runner.run(recorder) is None
    assert recorder.events == [("one", end)]
    while not orphan.poll():
        time.sleep(0.05)


def test_signals_reach_the_runs_through_the_sweep(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command: SIGTERM, exit code 75, and the same command resumes it."""
    bad = "[[run]]\nrecipe = 'tiny.toml'\nname = 'bad'\nset = {'model.name' = 'tiny_networks:gone'}"
    file = write(f"[[run]]\nrecipe = 'tiny.toml'\n{bad}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ["sweep", str(file), "--jobs", "1", "--device", "cpu"]
    with POPEN([sys.executable, "-m", "softprune", *command], stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "runs/my-sweep/tiny/config.toml").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert not (tmp_path / "runs/my-sweep/tiny/result.json").exists()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 1, again.output
    assert (tmp_path / "runs/my-sweep/tiny/result.json").is_file()
    assert "1 of 2 runs done" in again.stdout
    assert "bad failed" in again.stderr
    assert "tiny_networks" in again.stderr


def test_a_folder_that_cannot_be_is_a_clear_error(write: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sweep = read_sweep(write("[[run]]\nrecipe = 'digits'"), tmp_path / "file" / "runs")
    with pytest.raises(CheckpointError, match=r"must be writable.*repeat the command"):
        SweepRunner(sweep).run(Recorder())
