"""Bring back what trained on the GPU machine: records, weights of dense networks, checkpoints of unfinished runs.

    python benchmarks/gpu/pack.py ROOT OUT                  on the GPU machine
    python benchmarks/gpu/pack.py --collect OUT gpu-runs    here, afterwards

A finished dense network keeps its weights in its newest checkpoint and nowhere else, so that checkpoint travels too.
Eight files of 16 MiB, 64 MiB in all, come back: what does not fit is listed. `--collect` extracts the files to
gpu-runs, copies the records of finished runs to results/, and removes these runs from gpu-runs but for their dense
networks: what stays there goes to the machine again with `data.py pack --runs gpu-runs`.
"""

import io
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from softprune.io import extract_plain

RESULTS = Path(__file__).parents[2] / "results"
FILE = 15_500_000
"""Bytes of one file that comes back."""
TOTAL = 64_000_000
"""Bytes of all of them, which are eight at most."""


def newest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run's folder, if it has one."""
    return max((run / "checkpoints").glob("*.ckpt"), default=None)


def is_dense(run: Path) -> bool:
    """Whether the run is a dense baseline, or trains without pruning."""
    return run.name == "dense" or 'name = "dense"' in (run / "config.toml").read_text(encoding="utf-8")


def weights(runs: Path) -> Iterator[tuple[int, Path]]:
    """The files to keep besides the records: (order, path). The GPU time in unfinished runs cannot be had again."""
    for config in sorted(runs.rglob("config.toml")):
        run = config.parent
        finished = (run / "result.json").is_file()
        checkpoint = newest_checkpoint(run)
        if checkpoint is not None and not finished:
            yield 0, checkpoint
        elif checkpoint is not None and is_dense(run):
            yield 1, checkpoint
        if (run / "compact.safetensors").is_file():
            yield 2, run / "compact.safetensors"


def pack(root: Path, out: Path) -> list[str]:
    """Write records.tgz and the pieces of one tar file to ``out``; return the names of the files that did not fit."""
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / "records.tgz", "w:gz", compresslevel=6) as tar:
        for path in sorted(root.glob("runs/**/*")):
            if path.is_file() and path.suffix not in (".ckpt", ".safetensors") and path.name != ".lock":
                tar.add(path, arcname=str(path.relative_to(root)))
        for path in (root / "logs", root / "queue.log"):
            if path.exists():
                tar.add(path, arcname=path.name)
    left = TOTAL - (out / "records.tgz").stat().st_size - 10_240  # which end a tar file
    chosen, left_out = [], []
    found = sorted(weights(root / "runs"), key=lambda item: (item[0], item[1].stat().st_size))
    for _, path in found:
        size = path.stat().st_size + 2048  # the header and the padding in the tar file
        if size > left:
            left_out.append(f"{path.relative_to(root)} ({size / 1e6:.1f} MB)")
        else:
            chosen.append(path)
            left -= size
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in chosen:
            tar.add(path, arcname=str(path.relative_to(root)))
    for number, start in enumerate(range(0, len(archive.getbuffer()), FILE), start=1):
        (out / f"weights-{number}.part").write_bytes(archive.getbuffer()[start : start + FILE])
    return left_out


def collect(packed: Path, runs: Path, results: Path = RESULTS) -> list[str]:
    """Extract the files; move records to ``results``, keep what is to be resumed in ``runs``; return new records."""
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs) as extracted:
        pieces = b"".join(file.read_bytes() for file in sorted(packed.glob("weights-*.part")))
        for content in ((packed / "records.tgz").read_bytes(), pieces):
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                extract_plain(tar, Path(extracted))
        return _sort_out(Path(extracted) / "runs", runs, results)


def _sort_out(extracted: Path, runs: Path, results: Path) -> list[str]:
    records = []
    for run in sorted(extracted.iterdir()):
        if (run / "result.json").is_file():
            target = results / run.name
            shutil.rmtree(target, ignore_errors=True)  # an earlier record's network does not belong to this one
            target.mkdir(parents=True)
            for name in ("config.toml", "result.json"):
                shutil.copy(run / name, target / name)
            records.append(run.name)
        dense = run if is_dense(run) else run / "dense"
        useful = newest_checkpoint(run) if not (run / "result.json").is_file() else None
        if useful is None and not (dense.is_dir() and newest_checkpoint(dense)):
            continue
        target = runs / run.name
        shutil.rmtree(target, ignore_errors=True)
        if useful is not None or dense == run:
            run.rename(target)
        else:
            target.mkdir()
            dense.rename(target / "dense")
    return records


def main(arguments: list[str]) -> None:
    """Pack or collect."""
    if arguments[0] == "--collect":
        for name in collect(Path(arguments[1]), Path(arguments[2])):
            print("record:", name)
        return
    root, out = map(Path, arguments)
    for name in pack(root, out):
        print("left out:", name)
    for file in sorted(out.iterdir()):
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
