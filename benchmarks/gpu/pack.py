"""Bring back what trained on the GPU machine: records, compact networks, checkpoints of unfinished runs.

    python benchmarks/gpu/pack.py ROOT OUT                  # on the GPU machine
    python benchmarks/gpu/pack.py --collect OUT gpu-runs    # here, afterwards

The weights of a finished dense network are in its newest checkpoint, which travels too. Eight files of 16 MiB come
back, 64 MiB in all: what does not fit is listed. `python benchmarks/keep.py gpu-runs/NAME --network` keeps a finished
run; an unfinished one goes to the machine again with `data.py pack ... runs=gpu-runs`.
"""

import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

FILE = 15_500_000
"""Bytes of one file that comes back."""
TOTAL = 64_000_000
"""Bytes of all of them, which are eight at most."""


def weights(runs: Path) -> Iterator[tuple[int, Path]]:
    """Yield the files to bring besides the records: (order, path). What is not finished comes first."""
    for config in sorted(runs.rglob("config.toml")):
        run = config.parent
        checkpoint = max((run / "checkpoints").glob("*.ckpt"), default=None)
        dense = run.name == "dense" or 'name = "dense"' in config.read_text(encoding="utf-8")
        if checkpoint is not None and not (run / "result.json").is_file():
            yield 0, checkpoint
        elif checkpoint is not None and dense:
            yield 1, checkpoint
        if (run / "compact.safetensors").is_file():
            yield 2, run / "compact.safetensors"


def pack(root: Path, out: Path) -> list[str]:
    """Write records.tgz and the pieces of one tar file to ``out``; return the names of the files that did not fit."""
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / "records.tgz", "w:gz", compresslevel=6) as tar:
        for path in sorted((*root.glob("runs/**/*"), *root.glob("logs/*"), root / "queue.log")):
            if path.is_file() and path.suffix not in (".ckpt", ".safetensors") and path.name != ".lock":
                tar.add(path, arcname=str(path.relative_to(root)))
    left, left_out, archive = TOTAL - (out / "records.tgz").stat().st_size - 10_240, [], io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for _, path in sorted(weights(root / "runs"), key=lambda item: (item[0], item[1].stat().st_size)):
            size = path.stat().st_size + 2048  # the header and the padding in the tar file
            if size > left:
                left_out.append(f"{path.relative_to(root)} ({size / 1e6:.1f} MB)")
            else:
                tar.add(path, arcname=str(path.relative_to(root)))
                left -= size
    for number, start in enumerate(range(0, len(archive.getbuffer()), FILE), start=1):
        (out / f"weights-{number}.part").write_bytes(archive.getbuffer()[start : start + FILE])
    return left_out


def collect(packed: Path, runs: Path) -> list[Path]:
    """Extract the files to ``runs``; return the folders of finished runs."""
    pieces = b"".join(file.read_bytes() for file in sorted(packed.glob("weights-*.part")))
    for content in ((packed / "records.tgz").read_bytes(), pieces):
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for member in tar.getmembers():
                member.name = member.name.removeprefix("runs/")
            tar.extractall(runs, filter="data")
    return sorted(file.parent for file in runs.glob("*/result.json"))


if __name__ == "__main__":
    if sys.argv[1] == "--collect":
        for finished in collect(Path(sys.argv[2]), Path(sys.argv[3])):
            print("finished:", finished)
    else:
        for name in pack(Path(sys.argv[1]), Path(sys.argv[2])):
            print("left out:", name)
