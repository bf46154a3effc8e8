"""Milliseconds per training step of several revisions, timed in turns on one machine.

    git archive 72ea914 src benchmarks/step_time.py | tar x -C gpu-old
    python benchmarks/gpu/turns.py --code old=gpu-old --code new=. --out benchmarks/records/step_turns.json

Every revision runs its own benchmarks/step_time.py in processes of its own, with masks and the fast step. All of them
compile first, side by side; then each times one block of steps after the other, for several rounds. cuDNN's search may
choose other algorithms in another process: --copies processes of each revision show how much that matters. --begin FILE
waits for FILE before the first block, so that compiling can share the machine with other work.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = "turn:"
"""Begins the lines that a child writes for its parent."""


class Child:
    """A process that holds one training loop of one revision."""

    def __init__(self, revision: str, folder: Path, model: str, copy: int, options: argparse.Namespace) -> None:
        self.row = {"revision": revision, "model": model, "copy": copy}
        self.times: list[float] = []
        self.ready = False
        self.started = threading.Event()
        """Set when the process is ready, and when it has failed."""
        settings = ["--device", options.device, "--batch", str(options.batch), "--images", str(options.images)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", str(folder), model, str(options.steps), *settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines = self._read()
        threading.Thread(target=self._wait_until_ready, daemon=True).start()

    def time_block(self) -> None:
        """Run one block of steps and keep its milliseconds per step."""
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            self.times += [float(line) for line in [next(self._lines, None)] if line is not None]

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> Iterator[str]:
        for line in self._process.stdout or ():
            if line.startswith(MARK):
                yield line.removeprefix(MARK)
            else:
                print(self.row, line, end="", file=sys.stderr, flush=True)

    def _wait_until_ready(self) -> None:
        self.ready = next(self._lines, None) is not None
        self.started.set()


def run_child(arguments: list[str]) -> None:
    """Start the loop of one revision and time a block for every line of standard input."""
    folder, model, steps, *settings = arguments
    root = Path(folder).resolve()
    sys.path[:0] = [str(root / "benchmarks"), str(root / "src")]
    import step_time

    def time_on_request(loops: list[Iterator[Any]], options: argparse.Namespace) -> list[list[float]]:
        (loop,) = loops
        for _ in range(min(10, options.steps)):
            next(loop)
        step_time._wait(options.device)
        print(MARK, "ready", flush=True)
        times = []
        for _ in sys.stdin:
            began = time.perf_counter()
            for _ in range(options.steps):
                next(loop)
            step_time._wait(options.device)
            times.append((time.perf_counter() - began) / options.steps * 1000)
            print(MARK, times[-1], flush=True)
        return [times or [0.0]]

    step_time._time_blocks = time_on_request
    with tempfile.TemporaryDirectory() as out:
        fixed = ["--out", f"{out}/row.json", "--models", model, "--variants", "fast", "--masks", "on"]
        step_time.main([*fixed, "--steps", steps, *settings])


def measure(children: list[Child], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Wait for the children, let them take turns, and return a row for each."""
    deadline = time.monotonic() + options.time_limit
    for child in children:
        child.started.wait(max(0.0, deadline - time.monotonic()))
    while options.begin is not None and not options.begin.exists():
        time.sleep(0.2)
    ready = [child for child in children if child.ready]
    for _ in range(options.rounds):
        for child in ready:
            child.time_block()
    rows = []
    for child in ready:
        child.close()
        if child.times:
            times = [round(value, 4) for value in child.times]
            rows.append(child.row | {"ms_per_step": round(statistics.median(times), 4), "blocks": times})
    return rows


def main(arguments: list[str]) -> None:
    """Measure what the command line asks for, write the record and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", action="append", required=True, metavar="NAME=FOLDER", help="a revision")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["vgg16", "resnet56", "densenet40"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=200, help="steps per block")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--copies", type=int, default=2, help="processes of each revision and network")
    parser.add_argument("--begin", type=Path, help="wait for this file before the first block")
    parser.add_argument("--time-limit", type=float, default=600.0, help="leave out what is not compiled by then")
    options = parser.parse_args(arguments)
    revisions = dict(code.split("=", 1) for code in options.code)
    children = [
        Child(name, Path(folder), model, copy, options)
        for copy in range(options.copies)
        for model in options.models
        for name, folder in revisions.items()
    ]
    record = {
        "format": 1,
        "what": "milliseconds per training step with masks, revisions in turns",
        "command": ["python", "benchmarks/gpu/turns.py", *arguments],
        "revisions": {name: _revision(Path(folder)) for name, folder in revisions.items()},
        "environment": _environment(options.device),
        "rows": measure(children, options),
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in record["rows"]:
        print(row)


def _revision(folder: Path) -> str:
    """The commit that `REVISION` in the folder names, since a copy without .git cannot tell."""
    file = folder / "REVISION"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else str(folder)


def _environment(device: str) -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "precision": "bf16"}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_child(sys.argv[2:])
    else:
        main(sys.argv[1:])
