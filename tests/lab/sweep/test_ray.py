"""Sweeps on Ray: bad input and lost workers on a pretended cluster, and a loopback cluster that loses a node."""

import fcntl
import math
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import ray_sweep
from tiny import tiny_recipe

from softprune.errors import ConfigError
from softprune.lab.cli import sweep as sweep_command
from softprune.lab.sweep import executor, ray_task
from softprune.lab.sweep.executor import RayExecutor
from softprune.lab.sweep.grid import read_sweep
from softprune.lab.sweep.ray_task import RayOptions
from softprune.lab.sweep.runner import SweepListener, SweepRunner

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


class PretendedRay(types.ModuleType):
    """A cluster without processes. A task returns the next of `answers` as soon as it is asked."""

    class exceptions:
        class RayError(Exception): ...

        class RayTaskError(RayError): ...

        class RuntimeEnvSetupError(RayError): ...

    def __init__(self, *nodes: dict[str, float], blind: tuple[str, ...] = ()) -> None:
        super().__init__("ray")
        self._nodes, self.blind, self.connected = nodes, blind, False
        self.refusal: Exception | None = None
        self.answers: list[Any] = []
        self.submitted: list[tuple[Any, ...]] = []

    def is_initialized(self) -> bool:
        return self.connected

    def init(self, **options: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.connected = True

    def shutdown(self) -> None:
        self.connected = False

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "Resources": resources, "NodeID": str(n), "NodeManagerHostname": f"node{n}"}
            for n, resources in enumerate(self._nodes)
        ]

    def remote(self, **options: Any) -> Any:
        def decorate(function: Any) -> Any:
            def submit(*arguments: Any) -> Any:
                if function is executor._missing:
                    return [path for path in arguments[0] if path.startswith(self.blind or ("nowhere",))]
                self.submitted.append(arguments)
                return self.answers.pop(0)

            task = types.SimpleNamespace(remote=submit)
            task.options = lambda **_: task
            return task

        return decorate

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references, []

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*nodes: dict[str, float], **options: Any) -> PretendedRay:
        ray = PretendedRay(*nodes, **options)
        strategies = types.SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
        return ray

    return install


def test_without_ray_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="`pip install ray`"):
        RayExecutor(RayOptions(), tmp_path)


def test_an_unreachable_cluster_is_named_at_once(pretend: Any, tmp_path: Path) -> None:
    ray = pretend({"CPU": 1.0})
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        ray.refusal = ConnectionError("Could not find any running Ray instance.\nmore")
        with pytest.raises(
            ConfigError, match=rf"must be that of a running Ray cluster. Got '{address}': Could not find .*\. Start one"
        ):
            RayExecutor(RayOptions(address=address), tmp_path)
    ray.refusal = AssertionError("Ray tries for minutes")
    for prefix in ("", "ray://"):
        with pytest.raises(ConfigError, match=rf"Got '{prefix}{address}': .* Connection refused\. Start one"):
            RayExecutor(RayOptions(address=prefix + address), tmp_path)


def test_a_request_that_no_node_meets(pretend: Any, tmp_path: Path) -> None:
    ray = pretend({"CPU": 4.0}, {"CPU": 2.0, "GPU": 1.0})
    with pytest.raises(ConfigError, match=r"Got 1 CPUs, 2 GPUs per run, and nodes with at most 4 CPUs, 1 GPUs; lower"):
        RayExecutor(RayOptions(gpus_per_run=2), tmp_path)
    assert not ray.connected, "the connection is closed after an error"
    with pytest.raises(ConfigError, match=r"Got 1 CPUs, 64 GB per run"):
        RayExecutor(RayOptions(memory_per_run=64), tmp_path)
    with pytest.raises(ConfigError, match="must request CPU cores or GPUs"):
        RayExecutor(RayOptions(cpus_per_run=0), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus_per_run": 1.5}, r"a fraction of one GPU or a whole number.*Got 1\.5; use 2"),
        ({"gpus_per_run": 1e-6}, r"--gpus-per-run must be 0, or a number of at least 0\.0001\. Got 1e-06"),
        ({"cpus_per_run": math.nan}, r"--cpus-per-run .*Got nan"),
        ({"memory_per_run": math.inf}, r"--memory-per-run .*Got inf"),
        ({"device": "cuda:1"}, r"--device must be auto, cpu or cuda with --on ray.*Got 'cuda:1'; request GPUs with"),
    ],
)
def test_options_that_ray_does_not_take(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RayOptions(**options)


def test_fractions_of_a_gpu_are_slots(pretend: Any, tmp_path: Path) -> None:
    pretend({"CPU": 8.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 2.0}, {"CPU": 9.0})
    assert RayExecutor(RayOptions(gpus_per_run=0.25), tmp_path).free_slots() == 4 + 2


def test_jobs_and_device_hold_on_ray(pretend: Any, tmp_path: Path) -> None:
    ray = pretend({"CPU": 8.0})
    ray.answers = [0]
    make = sweep_command._executor("ray", 2, "cpu", {})
    executor = make(tmp_path)
    with open(tmp_path / "run.lock", "w") as lock:
        assert executor.free_slots() == 2
        executor.start(lambda: ["train"], tmp_path / "run.log", lock)
    assert ray.submitted[0][0] == ["train", "--device", "cpu"]
    with pytest.raises(
        ConfigError, match=r"--gpus-per-run must come with --on ray\. Got --gpus-per-run 0\.25 for runs"
    ):
        sweep_command._executor("local", None, "auto", {"gpus_per_run": 0.25})
    with pytest.raises(ConfigError, match=r"--on must be local or ray\. Got 'moon'"):
        sweep_command._executor("moon", None, "auto", {})


@pytest.mark.parametrize("blind", ["folder of the sweep", "current folder"])
def test_a_path_that_a_node_does_not_see(
    pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blind: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    hidden = tmp_path / ("runs" if blind == "folder of the sweep" else "here")
    pretend({"CPU": 1.0}, blind=(str(hidden),))
    with pytest.raises(ConfigError, match=rf"Every node must see .*Got {hidden}, which is not on node0; "):
        RayExecutor(RayOptions(), tmp_path / "runs")
    assert not list((tmp_path / "runs").iterdir()), "the probe is removed"


def test_a_node_that_does_not_answer(pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pretend({"CPU": 1.0})

    def too_late(*_: Any, **__: Any) -> None:
        raise ray.exceptions.RayError("Get timed out: some object(s) not ready.")

    monkeypatch.setattr(ray, "get", too_late)
    with pytest.raises(ConfigError, match=r"must execute a short task. Got: Get timed out: .*`ray status`"):
        RayExecutor(RayOptions(), tmp_path)


def test_a_lost_worker_is_resumed_a_few_times(pretend: Any, tmp_path: Path) -> None:
    ray = pretend({"CPU": 1.0})
    lost = ray.exceptions.RayError("the node died")
    ray.answers = [lost, lost, 0]
    starts = iter([["train"], ["resume"], ["resume"]])
    with open(tmp_path / "run.lock", "w") as lock:
        task = RayExecutor(RayOptions(), tmp_path).start(lambda: next(starts), tmp_path / "run.log", lock)
        assert [task.poll() for _ in range(5)] == [None, None, None, None, 0]
        assert [arguments[0][0] for arguments in ray.submitted] == ["train", "resume", "resume"]
        ray.answers = [lost] * 4
        task = RayExecutor(RayOptions(), tmp_path).start(lambda: [], tmp_path / "run.log", lock)
        codes = [task.poll() for _ in range(8)]
    assert codes[-2:] == [1, 1]
    assert "was lost 4 times: the node died" in (tmp_path / "run.log").read_text()


def test_a_run_waits_for_the_process_of_the_lost_worker(
    pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray reports a worker as lost before its process has ended; two processes would spoil the run."""
    ray = pretend({"CPU": 1.0})
    ray.answers = [0]
    with open(tmp_path / "run.node", "w") as held, open(tmp_path / "run.lock", "w") as lock:
        fcntl.flock(held, fcntl.LOCK_EX)
        task = RayExecutor(RayOptions(), tmp_path).start(lambda: [], tmp_path / "run.log", lock)
        assert task.poll() is None
        assert not ray.submitted
        fcntl.flock(held, fcntl.LOCK_UN)
        assert [task.poll(), task.poll()] == [None, 0]
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(ray_task, "_FREE_SECONDS", -1.0)
        assert RayExecutor(RayOptions(), tmp_path).start(lambda: [], tmp_path / "run.log", lock).poll() == 1
    assert "still holds" in (tmp_path / "run.log").read_text()


@pytest.fixture(scope="module")
def cluster() -> Any:
    """Two nodes with room for one run each, and the second of them."""
    pytest.importorskip("ray", reason='the "ray" extra is not installed')
    with ray_sweep.loopback_cluster() as (address, nodes):
        yield address, nodes[1]


class StopOnCheckpoint(SweepListener):
    """Asks the sweep to stop when a run has a checkpoint."""

    stop = False

    def on_poll(self, jobs: Any) -> None:
        self.stop |= any(list(job.cell.folder.checkpoints.glob("*.ckpt")) for job in jobs)


@pytest.mark.slow
def test_a_stop_lets_runs_on_ray_save(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_recipe(tmp_path)
    (tmp_path / "s.toml").write_text(
        "[grid]\nseed = [0, 1, 2]\n[[run]]\nrecipe = 'tiny.toml'\n"
        "set = { 'train.epochs' = 2000, 'records.checkpoint_epochs' = 1 }"
    )
    sweep = read_sweep("s.toml")
    runner = SweepRunner(sweep, RayExecutor(RayOptions(address=cluster[0]), sweep.folder))
    listener = StopOnCheckpoint()
    monkeypatch.setattr("softprune.lab.train.control.StopSignal.reason", lambda _: "a test" if listener.stop else None)
    assert runner.run(listener) == "a test"
    states = [job.state for job in runner.jobs]
    assert "failed" not in states, [job.last_lines() for job in runner.jobs]
    assert "stopped" in states
    assert not list(sweep.folder.rglob("*.stop"))


@pytest.mark.slow
def test_a_lost_node_costs_nothing(cluster: Any, tmp_path: Path) -> None:
    """Last, since it kills a node of the cluster."""
    address, node = cluster
    ray_sweep.write_sweep(tmp_path, runs=3, epochs=2)
    lost = ray_sweep.disturbed_sweep(tmp_path, "ray", address, node)
    assert lost["killed_while_training"] in lost["resumed"]
    ray_sweep.run_sweep(tmp_path, "pool", "--jobs", "2", "--device", "cpu")
    for seed in range(3):
        ray_sweep.assert_equal(tmp_path / "ray" / f"tiny-seed{seed}", tmp_path / "pool" / f"tiny-seed{seed}")
    results = sorted(tmp_path.glob("ray/*/result.json"))
    before = [path.stat().st_mtime_ns for path in results]
    ray_sweep.run_sweep(tmp_path, "ray", "--on", "ray", "--address", address)
    assert [path.stat().st_mtime_ns for path in results] == before
