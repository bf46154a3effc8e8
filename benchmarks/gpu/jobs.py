"""The jobs of a GPU session, from the queue of wanted runs.

Runs that were cut off come first, then what benchmarks/missing.py wants most. A dense network that several runs start
from is trained once, by the first of them, and so is the training before a cut: runs that differ only in what follows
it continue from a checkpoint of the first (fork.py).
"""

import json
import math
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import missing  # noqa: E402
import torch  # noqa: E402
from fork import common_training  # noqa: E402
from prices import IMAGES  # noqa: E402
from run_jobs import Job  # noqa: E402

from softprune.lab.config.recipes import config_to_dict  # noqa: E402
from softprune.lab.config.settings import BASELINE, RunConfig  # noqa: E402
from softprune.lab.data import DATASETS  # noqa: E402
from softprune.lab.runs.checkpoint import checkpoint_path  # noqa: E402
from softprune.lab.runs.networks import build_network  # noqa: E402
from softprune.lab.train.run import dense_config  # noqa: E402

ROOT = Path("/tmp/g")
"""The folder on the GPU machine. Runs name it in their configuration, so it stays the same."""
SETTINGS = (*missing.SETTINGS, "records.checkpoint_seconds=200")
FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
LARGEST = 14_000_000
"""Bytes of the largest checkpoint that surely comes back, beside those of other runs."""


def jobs(wanted: list[tuple[str, int]], kept: Path | None = None, root: Path = ROOT) -> list[Job]:
    """Return the jobs of the wanted runs; ``kept`` is the folder of runs that came back unfinished."""
    trained: dict[str, str] = {}  # dense trainings and the folder of each
    for path in sorted(kept.rglob("dense/result.json")) if kept else ():
        config = missing.RunFolder(path.parent).read_config()
        trained.setdefault(_key(config), str(root / "runs" / path.parent.relative_to(kept or path)))
    found = [_job(name, seed, root, kept, trained) for name, seed in _with_starts(wanted, kept)]
    return sorted(_fork(found), key=lambda job: not job.needs or "config.toml" not in job.needs[-1])


def _with_starts(wanted: list[tuple[str, int]], kept: Path | None) -> list[tuple[str, int]]:
    """Put dense networks that runs start from, and that did not come back, in front of the first of these runs."""
    result: dict[tuple[str, int], None] = {}
    for name, seed in wanted:
        start = missing.planned()[name].start
        if start is not None and not (kept is not None and (kept / start / "result.json").is_file()):
            dense, _, number = start.rpartition("-s")
            result.setdefault((dense, int(number)))
        result.setdefault((name, seed))
    return list(result)


def _job(name: str, seed: int, root: Path, kept: Path | None, trained: dict[str, str]) -> Job:
    planned = missing.planned()[name]
    config = planned.config.replace(seed=seed)
    run = f"{name}-s{seed}"
    folder, data = root / "runs" / run, root / "data"
    images = data / FOLDERS.get(config.data.name, name.partition("-")[0])
    data_dir = data if config.data.name in FOLDERS else images
    needs, seconds = [str(images)], planned.price.work
    # The paper reports SCP's best epoch.
    settings = [*SETTINGS, f"records.eval_epochs={1 if config.method.name.startswith('scp') else 4}", *planned.settings]
    if planned.start is not None:
        settings.append(f"model.weights={root / 'runs' / planned.start}")
        needs.append(f"{root / 'runs' / planned.start}/result.json")
    unfinished = kept is not None and (kept / run / "config.toml").is_file()
    own_baseline = config.train.dense_baseline
    if config.train.dense_baseline and not unfinished:
        base = trained.setdefault(_key(dense_config(config)), f"{folder}/dense")
        if base != f"{folder}/dense":
            settings += _instead_of_baseline(config, base)
            needs.append(f"{base}/result.json")
            seconds -= planned.price.dense
            own_baseline = False
    if kept is not None and unfinished:
        metrics = kept / run / "metrics.jsonl"
        done = len(metrics.read_text(encoding="utf-8").splitlines()) if metrics.is_file() else 0
        seconds *= 1 - done / (config.train.epochs + config.finetune.epochs)
        needs.append(f"{folder}/config.toml")
    program = ["python3", "-m", "softprune"]
    end = ["--data-dir", str(data_dir)]
    options = [part for setting in settings for part in ("--set", setting)]
    return Job(
        name=run,
        command=[*program, "train", planned.recipe, "--seed", str(seed), "--out", str(folder), *end, *options],
        folder=str(folder),
        resume=[*program, "resume", str(folder), *end],
        needs=needs,
        minutes=round(seconds / 60, 2),
        startup=planned.price.startup,
        epochs=0 if own_baseline else config.train.epochs + config.finetune.epochs,
        resumable=_checkpoint_bytes(config.model.name, config.data.name) <= LARGEST,
    )


def _fork(found: list[Job]) -> list[Job]:
    """Let runs with fine-tuning continue from the first one with the same training, one epoch before its cut."""
    first: dict[str, Job] = {}
    result: dict[str, Job] = {job.name: job for job in found}
    for job in found:
        name, seed = job.name.rsplit("-s", 1)
        planned = missing.planned()[name]
        config = planned.config.replace(seed=int(seed))
        if not config.finetune.epochs or config.train.dense_baseline or job.needs[1:]:
            continue
        source = first.setdefault(json.dumps(config_to_dict(common_training(config)), sort_keys=True), job)
        if source is job:
            continue
        before = config.train.epochs - 1
        save = ["--set", f"records.checkpoint_epochs={before}", "--set", "records.checkpoint_seconds=0"]
        result[source.name] = replace(source, command=[*source.command, *save], resumable=False)
        recipe, *options = job.command[job.command.index("train") + 1 :]
        out = options.index("--out")
        options = [*options[:out], *options[out + 2 :], *save]
        steps = before * math.ceil(IMAGES / config.data.batch_size)
        result["fork-" + job.name] = Job(
            name="fork-" + job.name,
            command=["python3", "benchmarks/gpu/fork.py", source.folder, job.folder, recipe, *options],
            needs=[str(checkpoint_path(Path(source.folder, "checkpoints"), steps))],
            brief=True,
        )
        minutes = round(planned.price.finetune / 60, 2)
        result[job.name] = replace(job, after=["fork-" + job.name], minutes=minutes)
    return list(result.values())


def _key(dense: RunConfig) -> str:
    """What two runs must share to start from one dense network: all but the name, the seed and the place."""
    fields = config_to_dict(dense)
    for name in ("name", "seed", "records"):
        fields.pop(name, None)
    fields["data"].pop("dir", None)
    return json.dumps(fields, sort_keys=True, default=str)


def _instead_of_baseline(config: RunConfig, base: str) -> list[str]:
    """Settings that start a run from the dense network of another run instead of training its own."""
    settings = ["train.dense_baseline=false", "train.dense_epochs=0"]
    settings += [f"model.weights={base}"] if config.model.weights == BASELINE else []
    settings += [f"distill.teacher={base}"] if config.distill.teacher == BASELINE else []
    return settings


@cache
def _checkpoint_bytes(model: str, data: str) -> int:
    """Bytes of weights and momentum, the bulk of a checkpoint."""
    with torch.device("meta"):
        network = build_network(model, DATASETS[data].num_classes or 100, {})
    return 8 * sum(parameter.numel() for parameter in network.parameters())
