"""Sweeps on Ray: clear errors without a cluster, and a loopback cluster that loses a node."""

import builtins
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import metrics, tiny_recipe

from softprune.errors import ConfigError
from softprune.sweep.executor import LocalPool
from softprune.sweep.grid import read_sweep
from softprune.sweep.ray_executor import RayExecutor, RayOptions
from softprune.sweep.runner import SweepListener, SweepRunner


def test_without_ray_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_ = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name == "ray":
            raise ImportError("No module named 'ray'")
        return import_(name, *rest, **options)

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match="pip install ray"):
        RayExecutor(RayOptions(), tmp_path)


@pytest.fixture(scope="module")
def cluster() -> Any:
    """A head without room for runs, and a node with room for two."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


class Watch(SweepListener):
    """Calls a function once, when a run has begun to write checkpoints."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def on_look(self, jobs: Any) -> None:
        if self.action is not None and any(list(job.cell.folder.checkpoints.glob("*.ckpt")) for job in jobs):
            self.action()
            self.action = None


SWEEP = """
[grid]
seed = [0, 1, 2]
[[run]]
recipe = "tiny.toml"
set = { "train.epochs" = 12, "records.checkpoint_steps" = 5 }
"""


@pytest.mark.slow
def test_a_lost_node_costs_nothing(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tiny_recipe(tmp_path)
    (tmp_path / "s.toml").write_text(SWEEP)
    doomed = next(iter(cluster.worker_nodes))

    def lose() -> None:
        cluster.add_node(num_cpus=2)
        cluster.remove_node(doomed, allow_graceful=False)

    sweep = read_sweep("s.toml", tmp_path / "on-ray")
    options = RayOptions(address=cluster.address)
    runner = SweepRunner(sweep, RayExecutor(options, sweep.folder))
    assert runner.run(Watch(lose)) is None
    assert [job.state for job in runner.jobs] == ["done"] * 3, [job.last_words() for job in runner.jobs]
    assert any("was lost; it is resumed" in job.log.read_text() for job in runner.jobs)
    local = read_sweep("s.toml", tmp_path / "local")
    SweepRunner(local, LocalPool(2, ["cpu"])).run(SweepListener())
    for cell in sweep.cells:
        assert metrics(tmp_path / "on-ray" / cell.name) == metrics(tmp_path / "local" / cell.name)
    # Again: nothing is left to do.
    began = {cell.name: cell.folder.result.stat().st_mtime_ns for cell in sweep.cells}
    again = SweepRunner(read_sweep("s.toml", tmp_path / "on-ray"), RayExecutor(options, sweep.folder))
    assert again.run(SweepListener()) is None
    assert began == {cell.name: cell.folder.result.stat().st_mtime_ns for cell in sweep.cells}


@pytest.mark.slow
def test_a_stop_lets_runs_on_ray_save(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_recipe(tmp_path)
    (tmp_path / "s.toml").write_text(SWEEP.replace("12", "2000"))
    sweep = read_sweep("s.toml")
    runner = SweepRunner(sweep, RayExecutor(RayOptions(address=cluster.address), sweep.folder))
    stop = {"now": False}
    monkeypatch.setattr(
        "softprune.train.control.StopSignal.reason", lambda _: "a test" if stop["now"] else None
    )
    assert runner.run(Watch(lambda: stop.update(now=True))) == "a test"
    states = [job.state for job in runner.jobs]
    assert "failed" not in states, [job.last_words() for job in runner.jobs]
    assert "stopped" in states
    assert not list(sweep.folder.rglob("*.stop"))


@pytest.mark.slow
def test_requests_that_no_node_meets_and_unreachable_clusters(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"Got 1 CPUs, 0\.25 GPUs per run, and nodes with at most 2 CPUs, 0 GPUs"
    ):
        RayExecutor(RayOptions(address=cluster.address, gpus_per_run=0.25), tmp_path)
    with pytest.raises(ConfigError, match="must request CPU cores or GPUs"):
        RayExecutor(RayOptions(address=cluster.address, cpus_per_run=0), tmp_path)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"must be that of a running Ray cluster. Got '127\.0\.0\.1:1'"):
        RayExecutor(RayOptions(address="127.0.0.1:1"), tmp_path)
    assert time.monotonic() - began < 60
