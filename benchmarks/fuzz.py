"""Damage every kind of file that softprune reads, and see that it is read as before or refused with a clear message.

    python benchmarks/fuzz.py [--count 10000] [--seed 0] [--only network:17]

A command on a damaged file must end with exit code 0 or 2 within 20 seconds, without a traceback, and must not import
the module that some inputs name. Anything else is a finding: its files are kept in build/fuzz, and the exit code is 1.
Writes benchmarks/records/fuzz.json.
"""

import argparse
import collections
import contextlib
import io
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

from revision import revision  # noqa: E402

SECONDS = 20
CANARY = "fuzz_canary"
"""A module that some inputs name, and that nothing may import."""
FORMATS = {
    "recipe": ("recipe.toml", ("train", "recipe.toml", "--dry-run")),
    "sweep": ("sweep.toml", ("sweep", "sweep.toml", "--dry-run")),
    "result": ("run/result.json", ("compare", "run")),
    "report": ("run/result.json", ("report", "run")),
    "config": ("run/config.toml", ("resume", "run")),
    "checkpoint": ("run/checkpoints/*.ckpt", ("resume", "run")),
    "network": ("run/compact.safetensors", ("evaluate", "run/compact.safetensors", "--device", "cpu")),
}
"""The file that is damaged, and the command that reads it."""
UNFINISHED = ("config", "checkpoint")
"""Formats that are read of a run without result.json."""
RECIPE = '[model]\nname = "digits_net"\n[data]\nname = "digits"\n[train]\nepochs = 1\n'
SWEEP = '[grid]\nseed = [0, 1]\n[[run]]\nname = "scp"\nrecipe = "digits"\nset = { "train.epochs" = 1 }\n'
TEXTS = (
    *('""', "-1", "1e999", "nan", "null", "{}", "[[]]", "9" * 400, '"../../x"', '"\\u001b[2J"', "true", "[" * 1000),
    f'"{CANARY}:make"',
)
"""What takes the place of a value."""


def main() -> int:
    """Read the inputs, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="FORMAT:NUMBER", help="one input, with its output")
    parser.add_argument("--record", type=Path, default=HERE / "records" / "fuzz.json")
    options = parser.parse_args()
    began, counts = time.monotonic(), dict[str, collections.Counter[str]]()
    with tempfile.TemporaryDirectory() as folder:
        seeds = make_seeds(Path(folder))
        names = [f"{kind}:{number}" for number in range(-(-options.count // len(FORMATS))) for kind in FORMATS]
        for name in [options.only] if options.only else names:
            outcome, detail = handle(name, options.seed, seeds)
            counts.setdefault(name.partition(":")[0], collections.Counter())[outcome] += 1
            if options.only or outcome not in ("accepted", "refused"):
                print(name, outcome, detail[-2000:], flush=True)
    total = collections.Counter[str]()
    for each in counts.values():
        total.update(each)
    findings = sum(count for outcome, count in total.items() if outcome not in ("accepted", "refused"))
    print(f"{total.total():,} inputs, {findings} findings, {time.monotonic() - began:.0f} s")
    if not options.only:
        record = {
            "what": "damaged files by format and outcome",
            "command": f"python benchmarks/fuzz.py --count {options.count} --seed {options.seed}",
            "inputs": total.total(),
            "findings": findings,
            "revision": revision("src", "benchmarks"),
            "formats": {kind: dict(sorted(counter.items())) for kind, counter in counts.items()},
        }
        options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(findings > 0)


def make_seeds(folder: Path) -> Path:
    """Write an undamaged file of each format."""
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    (folder / "sweep.toml").write_text(SWEEP, encoding="utf-8")
    with contextlib.chdir(folder):
        code, output = command("train", "recipe.toml", "--out", "run", "--device", "cpu")
    assert code == 0, output
    return folder


def handle(name: str, seed: int, seeds: Path) -> tuple[str, str]:
    """Return what became of an input, such as "network:17", and the output of the command."""
    kind, rng = name.partition(":")[0], random.Random(f"{seed}/{name}")
    pattern, arguments = FORMATS[kind]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(shutil.copytree(seeds, Path(folder) / "work"))
        if kind in UNFINISHED:
            (work / "run" / "result.json").unlink()
        for file in work.glob(pattern):
            file.write_bytes(damaged(rng, file.read_bytes()))
        with contextlib.chdir(work):
            outcome, detail = judged(*arguments)
        if outcome not in ("accepted", "refused"):
            kept = HERE.parent / "build" / "fuzz" / name.replace(":", "-")
            shutil.copytree(work, kept, dirs_exist_ok=True)
    return outcome, detail


def judged(*arguments: str) -> tuple[str, str]:
    """Run a command and return the outcome."""
    signal.alarm(SECONDS)
    try:
        code, output = command(*arguments)
    except TimeoutError:
        return "hang", ""
    except BaseException:
        return "traceback", traceback.format_exc()
    finally:
        signal.alarm(0)
    if CANARY in sys.modules:
        return "code was run", output
    if "Traceback" in output or code not in (0, 2):
        return "traceback", output
    return ("accepted" if code == 0 else "refused"), output


def command(*arguments: str) -> tuple[Any, str]:
    """Run a softprune command in this process; return its exit code and output."""
    from softprune.lab.cli import main as program

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), _argv(*arguments):
        try:
            program()
        except SystemExit as ended:
            return ended.code or 0, output.getvalue()
    return 0, output.getvalue()


@contextlib.contextmanager
def _argv(*arguments: str) -> Iterator[None]:
    before, sys.argv = sys.argv, ["softprune", *arguments]
    try:
        yield
    finally:
        sys.argv = before


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Return the content with one to three places changed, cut off, or with other values."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(content) + 1)
        end = min(at + rng.choice((1, 4, 64, 4096)), len(content))
        action = rng.randrange(6)
        if action == 0:
            content = content[:at]
        elif action == 1:
            content = content[:at] + rng.randbytes(end - at) + content[end:]
        elif action == 2:
            content = content[:at] + content[end:]
        elif action == 3:
            content = content[:end] + content[at:]
        else:  # a value of a text
            line = content.rfind(b"\n", 0, at) + 1
            equals = max(content.find(mark, line) for mark in (b"=", b":"))
            ends = [place for place in (content.find(b"\n", line), content.find(b",", equals)) if place > 0]
            stop = min(ends, default=at)
            if 0 < equals < stop:
                content = content[: equals + 1] + rng.choice(TEXTS).encode() + content[stop:]
    return content


def _out_of_time(*_: object) -> None:
    raise TimeoutError


signal.signal(signal.SIGALRM, _out_of_time)

if __name__ == "__main__":
    sys.exit(main())
