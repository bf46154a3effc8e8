"""A sweep on a two-node Ray cluster that loses a node, against the local pool: equal bits, overhead, wall time.

    python benchmarks/ray_sweep.py [--runs 8] [--epochs 2] [--work DIR]

Starts two Ray nodes on the loopback (`ray start --head`, `ray start --address`), runs `softprune sweep --on ray`, kills
one node with SIGKILL while it trains, and compares every run with those of an undisturbed sweep on the local pool.
Writes benchmarks/records/ray_sweep.json.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests" / "support")]

SWEEP = """
[grid]
seed = {seeds}
[[run]]
recipe = "tiny.toml"
[run.set]
"train.epochs" = {epochs}
"train.deterministic" = true
"records.checkpoint_steps" = 5
"""
START_SECONDS = 120


class Node:
    """A Ray node: `ray start --block` and everything that it started."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.log = folder / f"{name}.log"
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            "--disable-usage-stats",
            "--object-store-memory=100000000",
            *arguments,
        ]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=_environment(), stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while "Ray runtime started" not in self.log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"`{' '.join(command)}` did not start: {self.log.read_text()}")
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill every process of the node with SIGKILL, as a loss of power does."""
        for process in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def loopback_cluster() -> Iterator[tuple[str, list[Node]]]:
    """Yield the address and the two nodes, with one CPU each, of a cluster on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        nodes: list[Node] = []
        try:
            place = ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--num-gpus=0"]
            head = ["--head", f"--port={port}", f"--temp-dir={folder}/r", "--include-dashboard=false"]
            nodes.append(Node(Path(folder), "head", *head, *place))
            nodes.append(Node(Path(folder), "node", f"--address={address}", *place))
            yield address, nodes
        finally:
            for node in reversed(nodes):
                node.kill()


def descendants(process: int) -> list[int]:
    """Return the processes that ``process`` started, directly or not."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = [], [process]
    while waiting:
        new = children.get(waiting.pop(), [])
        found += new
        waiting += new
    return found


def runs_on(node: Node) -> list[Path]:
    """Return the folders of the runs that are trained on a node now."""
    folders = []
    for process in descendants(node.process.pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
            if words[1:3] == ["-m", "softprune"] and words[3] in ("train", "resume"):
                folders.append(Path(words[words.index("--out") + 1] if "--out" in words else words[4]))
    return folders


def sweep_command(folder: Path, out: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "softprune", "sweep", str(folder / "s.toml"), "--out", out, *options]


def write_sweep(folder: Path, runs: int, epochs: int) -> None:
    """Write the file of the sweep, its recipe, and the module of its network."""
    from tiny import tiny_recipe

    tiny_recipe(folder)
    (folder / "s.toml").write_text(SWEEP.format(seeds=list(range(runs)), epochs=epochs))


def run_sweep(folder: Path, out: str, *options: str) -> float:
    """Run the sweep to its end; return the wall time."""
    began = time.monotonic()
    done = subprocess.run(
        sweep_command(folder, out, *options), cwd=folder, env=_environment(), capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"The sweep failed: {done.stdout}{done.stderr}")
    return time.monotonic() - began


def disturbed_sweep(folder: Path, out: str, address: str, node: Node) -> dict[str, Any]:
    """Run the sweep on Ray and kill ``node`` when a run on it has a checkpoint and no result yet."""
    began = time.monotonic()
    with open(folder / "ray.log", "wb") as log:
        process = subprocess.Popen(
            sweep_command(folder, out, "--on", "ray", "--address", address),
            cwd=folder,
            env=_environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    killed = ""
    while process.poll() is None:
        for run in [] if killed else runs_on(node):
            place = folder / run
            if list((place / "checkpoints").glob("*.ckpt")) and not (place / "result.json").exists():
                node.kill()
                killed = place.name
                break
        time.sleep(0.05)
    words = (folder / "ray.log").read_text(errors="replace")
    if process.returncode or not killed:
        raise RuntimeError(f"The sweep on Ray failed (killed while it trained: {killed or 'none'}): {words}")
    lost = [path.stem for path in (folder / out / "logs").glob("*.log") if "was lost; it is" in path.read_text()]
    return {"seconds": time.monotonic() - began, "killed_while_training": killed, "resumed": sorted(lost)}


def assert_equal(one: Path, other: Path) -> str:
    """Raise unless two runs ended with the same bits; return the hash of the compact network."""
    from tiny import assert_same, final_state, metrics

    assert metrics(one) == metrics(other), f"metrics of {one.name} differ"
    assert_same(final_state(one), final_state(other), one.name)
    files = [(run / "compact.safetensors").read_bytes() for run in (one, other)]
    assert files[0] == files[1], f"compact networks of {one.name} differ"
    return hashlib.sha256(files[0]).hexdigest()


def overhead(executor: Any, folder: Path, count: int) -> float:
    """Return the seconds per run that start nothing but `softprune train --help`, one after another."""
    began = time.monotonic()
    for number in range(count):
        with open(folder / f"{number}.lock", "w") as lock:
            task = executor.start(lambda: ["train", "--help"], folder / f"{number}.log", lock)
            while task.poll() is None:
                time.sleep(0.01)
            assert task.poll() == 0, (folder / f"{number}.log").read_text()
    return (time.monotonic() - began) / count


def overheads(address: str, count: int) -> dict[str, float]:
    """Return the seconds per run that a pool and Ray add to the process itself."""
    from softprune.lab.sweep.executor import LocalPool, RayExecutor
    from softprune.lab.sweep.ray_task import RayOptions

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        began = time.monotonic()
        for _ in range(count):
            subprocess.run(
                [sys.executable, "-m", "softprune", "train", "--help"],
                env=_environment(),
                capture_output=True,
                check=True,
            )
        alone = (time.monotonic() - began) / count
        pool = overhead(LocalPool(1, ["cpu"]), folder, count)
        began = time.monotonic()
        ray = RayExecutor(RayOptions(address=address), folder)
        joined = time.monotonic() - began
        on_ray = overhead(ray, folder, count)
        ray.close()
    return {"process": alone, "pool": pool - alone, "ray": on_ray - alone, "ray_join": joined}


def measure(folder: Path, runs: int) -> dict[str, Any]:
    """Run every stage that has not been measured yet; return the figures of all."""
    notes = folder / "stages.json"
    stages: dict[str, Any] = json.loads(notes.read_text()) if notes.exists() else {}

    def killed() -> dict[str, Any]:
        with loopback_cluster() as (address, nodes):
            figures = disturbed_sweep(folder, "killed", address, nodes[1])
            results = sorted((folder / "killed").glob("*/result.json"))
            before = [path.stat().st_mtime_ns for path in results]
            figures["second_call"] = run_sweep(folder, "killed", "--on", "ray", "--address", address)
        assert before == [path.stat().st_mtime_ns for path in results], "the second call did something"
        return figures

    def on_ray(action: Callable[[str], Any]) -> Any:
        with loopback_cluster() as (address, _):
            return action(address)

    actions: dict[str, Callable[[], Any]] = {
        "one": lambda: run_sweep(folder, "one", "--jobs", "1", "--device", "cpu"),
        "pool": lambda: run_sweep(folder, "pool", "--jobs", "2", "--device", "cpu"),
        "calm": lambda: on_ray(lambda address: run_sweep(folder, "calm", "--on", "ray", "--address", address)),
        "killed": killed,
        "overhead": lambda: on_ray(lambda address: overheads(address, runs)),
    }
    for name, action in actions.items():
        if name not in stages:
            shutil.rmtree(folder / name, ignore_errors=True)  # of a stage that was interrupted
            stages[name] = action()
            notes.write_text(json.dumps(stages))
            print(name, stages[name], flush=True)
    return stages


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(HERE.parent / "src"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        "RAY_worker_niceness": "0",  # as the processes of the pool
        # Otherwise it depends on whether this user has ever started a local cluster.
        "RAY_AUTH_MODE": "disabled",
    }


def main() -> None:
    """Run everything and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--work", type=Path, help="keep the sweeps here, and resume after an interruption")
    parser.add_argument("--record", type=Path, default=HERE / "records" / "ray_sweep.json")
    options = parser.parse_args()

    from softprune.distributed import pick_device
    from softprune.lab.runs.environment import describe_environment

    os.environ.update(_environment())
    with contextlib.ExitStack() as stack:
        folder = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        write_sweep(folder, options.runs, options.epochs)
        stages = measure(folder, options.runs)
        hashes = {}
        for seed in range(options.runs):
            run = f"tiny-seed{seed}"
            hashes[run] = assert_equal(folder / "killed" / run, folder / "pool" / run)
            for other in ("one", "calm"):
                assert_equal(folder / other / run, folder / "pool" / run)
        print(f"{len(hashes)} runs are equal bit for bit in four sweeps", flush=True)
    killed = stages["killed"]
    record = {
        "what": "a sweep on two Ray nodes, one killed by SIGKILL, against the local pool; equal bit for bit",
        "runs": len(hashes),
        "epochs": options.epochs,
        "identical": True,  # a difference raises
        "seconds": {
            "one_after_another": round(stages["one"], 1),
            "pool_of_2": round(stages["pool"], 1),
            "ray_2_nodes": round(stages["calm"], 1),
            "ray_node_killed": round(killed["seconds"], 1),
            "second_call": round(killed["second_call"], 1),
        },
        "killed_while_training": killed["killed_while_training"],
        "resumed": killed["resumed"],
        "seconds_per_run": {name: round(value, 3) for name, value in stages["overhead"].items()},
        "compact_sha256": hashes,
        "environment": describe_environment(pick_device("cpu")).model_dump(),
    }
    options.record.parent.mkdir(parents=True, exist_ok=True)
    options.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
