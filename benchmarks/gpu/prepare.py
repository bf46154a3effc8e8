"""Prepare a GPU session with one command: packages, jobs, data, and the list of calls.

    python benchmarks/gpu/prepare.py --data DATA [--seconds 1690] [--only 'cifar100-*'] [--first NAME ...]
    python benchmarks/gpu/prepare.py --plan 3    # only show which runs the next three sessions would finish

DATA holds cifar-10-batches-py and cifar-100-python (../shared/data/make_cifar.py) and tinyimagenet
(../shared/data/make_tinyimagenet.py); only the sets that the jobs need are read. Runs that the time does not suffice
for stay in the list as a reserve if they need no other data. Writes gpu-wheels, gpu-job and gpu-data-1, ...
"""

import argparse
import fnmatch
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import data  # noqa: E402
import missing  # noqa: E402
from jobs import FOLDERS, jobs  # noqa: E402
from plan import Plan  # noqa: E402
from run_jobs import STOPPED, Job  # noqa: E402

REPOSITORY = HERE.parents[1]
LIMIT = 63 * 2**20
"""Bytes that may travel with a call: the working tree and what it carries. The limit is 64 MiB; folders and long names
take a part of it."""
BLOCK = 512
"""Bytes of a block of a tar archive."""
PACKAGES = ("pydantic", "jinja2", "filelock", "tomli-w")
PLATFORM = ("--platform", "manylinux2014_x86_64", "--python-version", "3.12")
WAIT = 290
"""Seconds of a waiting call, which brings back what has finished."""
SEND = 15.0
"""Seconds from the first call until its data are unpacked."""


def wanted_runs(only: list[str], first: list[str]) -> list[tuple[str, int]]:
    """The runs of the queue whose names match a pattern, those in ``first`` in front in that order."""
    found = missing.wanted_runs(missing.measured())
    unknown = sorted(set(first) - {name for name, _ in found})
    if unknown:
        raise SystemExit(f"--first must name runs that benchmarks/missing.py wants. Got {', '.join(unknown)}.")
    found = [run for run in found if run[0] in first or any(fnmatch.fnmatch(run[0], each) for each in only or ["*"])]
    return sorted(found, key=lambda run: first.index(run[0]) if run[0] in first else len(first))


def sessions(wanted: list[tuple[str, int]], number: int, seconds: float, most: int, runs: Path | None) -> list[Plan]:
    """Plan sessions one after the other. A run that is stopped continues in the next, if its checkpoint comes back."""
    plans, begun = [], dict[str, float]()
    for _ in range(number):
        found = [replace(job, minutes=begun.get(job.name, job.minutes)) for job in jobs(wanted, runs)]
        found.sort(key=lambda job: job.name not in begun)
        plan = Plan(found, seconds - SEND, most)
        plan.run()
        plans.append(plan)
        begun |= {job.name: plan.unfinished[job.name] for job in found if job.resumable and job.name in plan.unfinished}
        wanted = [(name, seed) for name, seed in wanted if plan.codes.get(f"{name}-s{seed}") != 0]
    return plans


def report(plan: Plan) -> str:
    """When each run of a plan starts and ends, and the rows of the paper's tables that it adds."""
    starts, lines, rows, adds = dict[str, str](), [], 0, missing.new_rows(missing.measured())
    for line in plan.lines:
        when, what, name, *rest = [*line.split(), ""]
        if what == "start":
            starts[name] = when
        elif what == "end":
            new = adds[name.rpartition("-s")[0]] if rest[0] == "0" else 0
            rows += new
            state = f"stopped, {plan.unfinished[name]:.1f} minutes left" if rest[0] == str(STOPPED) else f"{new} rows"
            lines.append(f"{starts[name]:>6} to {when:>4} s  {name}: {state}")
    ended = sum(code == 0 and not name.startswith("fork-") for name, code in plan.codes.items())
    return "\n".join([*lines, f"{ended} runs end, {rows} rows of the paper's tables"])


def select(found: list[Job], plan: Plan) -> tuple[list[Job], list[str]]:
    """Jobs of the data sets that the planned runs need, and these sets in the order of need.

    A job also waits for the sets of the jobs before it, since it would take their place while these are sent.
    """
    names = {folder: name for name, folder in FOLDERS.items()}
    sets = {job.name: names.get(Path(job.needs[0]).name, Path(job.needs[0]).name) for job in found if not job.brief}
    used = list(dict.fromkeys(sets[job.name] for job in found if job.name in plan.codes and not job.brief))
    found = [job for job in found if sets.get(job.name.removeprefix("fork-")) in used]
    images = list(dict.fromkeys(job.needs[0] for job in found if not job.brief))
    seen = 0
    for number, job in enumerate(found):
        if not job.brief:
            seen = max(seen, images.index(job.needs[0]))
            found[number] = replace(job, needs=list(dict.fromkeys([*job.needs, *images[: seen + 1]])))
    return found, used


def get_packages(folder: Path) -> None:
    """Download what the GPU machine lacks, for its platform, unless it is there."""
    if folder.is_dir():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:"]
    subprocess.run([*command, *PLATFORM, "--target", str(folder), *PACKAGES], check=True)
    shutil.rmtree(folder / "bin", ignore_errors=True)


def archived(paths: Iterable[Path]) -> int:
    """Bytes of the files in a tar archive, as they travel: a header each, and whole blocks of content."""
    sizes = [path.stat().st_size for path in paths if path.is_file()]
    return sum(BLOCK * (1 + math.ceil(size / BLOCK)) for size in sizes)


def tree_size() -> int:
    """Bytes of the working tree that travel, without results/."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", ":!results"]
    names = subprocess.run(listed, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.split("\0")
    return archived(REPOSITORY / name for name in names if name)


def calls(parts: list[str], seconds: int, most: int) -> list[tuple[str, list[str]]]:
    """The calls of a session in order: command, and folders that it carries."""
    start = (f"bash benchmarks/gpu/start.sh {seconds} {most}", ["gpu-wheels", "gpu-job", parts[0]])
    receive = [(f"bash benchmarks/gpu/receive.sh {part}", [part]) for part in parts[1:]]
    wait = [(f"bash benchmarks/gpu/wait.sh {WAIT}", list[str]())] * math.ceil((seconds + 60) / WAIT)
    return [start, *receive, *wait]


def main(arguments: list[str]) -> None:
    """Prepare the session, or only plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets")
    parser.add_argument("--runs", type=Path, help="folder of runs that came back unfinished (pack.py --collect)")
    parser.add_argument("--seconds", type=int, default=1690, help="from the first call to the end of training")
    parser.add_argument("--most", type=int, default=6, help="jobs at the same time")
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="names to take; all by default")
    parser.add_argument("--first", nargs="+", default=[], metavar="NAME", help="names to put in front")
    parser.add_argument("--plan", type=int, metavar="SESSIONS", help="number of sessions to plan; write nothing")
    options = parser.parse_args(arguments)
    if options.runs is not None and not options.runs.is_dir():
        raise SystemExit(
            f"--runs must be a folder that `pack.py --collect` wrote. Got {options.runs}; leave it out if no run is "
            "to be continued."
        )
    wanted = wanted_runs(options.only, options.first)
    plans = sessions(wanted, options.plan or 1, options.seconds, options.most, options.runs)
    for number, plan in enumerate(plans, start=1):
        print(f"Session {number}, seconds since the data arrived:\n{report(plan)}\n")
    if options.plan:
        return
    found, sets = select(jobs(wanted, options.runs), plans[0])
    if not sets:
        raise SystemExit(f"No wanted run would end in {options.seconds} s. Change --seconds or --only.")
    get_packages(REPOSITORY / "gpu-wheels")
    job = REPOSITORY / "gpu-job"
    job.mkdir(exist_ok=True)
    (job / "jobs.json").write_text(json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8")
    for old in REPOSITORY.glob("gpu-data*"):
        shutil.rmtree(old)
    folders = {name: options.data if name in FOLDERS else options.data / name for name in sets}
    tree, first = tree_size(), sum(archived(folder.rglob("*")) for folder in (REPOSITORY / "gpu-wheels", job))
    parts = data.pack(REPOSITORY / "gpu-data", folders, options.runs, LIMIT - tree - first)
    print(f"{len(found)} jobs; data: {', '.join(sets)}\n\nmv results ../results-away    # before the calls\n")
    for command, carried in calls([part.name for part in parts], options.seconds, options.most):
        total = tree + sum(archived((REPOSITORY / folder).rglob("*")) for folder in carried)
        if total > LIMIT:
            raise SystemExit(f"A call must stay within {LIMIT:,} bytes. Got {total:,} with {', '.join(carried)}.")
        print(f"{command:<48} carry: {', '.join(carried) or '-':<36} {total:>12,} of {LIMIT:,} bytes")
    print(
        "\nmv ../results-away results    # after the last call\npython benchmarks/gpu/pack.py --collect FILES gpu-runs"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
