"""Send images and unfinished runs to the GPU machine in parts, and put them together there.

    python benchmarks/gpu/data.py pack gpu-data BYTES cifar100=DATA tinyimagenet=DATA/tinyimagenet runs=gpu-runs
    python benchmarks/gpu/data.py unpack ARRIVED ROOT    # on the GPU machine, after each part

The first writes gpu-data-1, gpu-data-2, ... of at most BYTES, one for each call. The second writes every set whose
files have all arrived, to ROOT/data, and runs to ROOT/runs. CIFAR travels as lossless WebP sheets (17 MB for 10,000
images, 60% of the original files); anything else as a compressed tar file in pieces.
"""

import json
import pickle
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

PIECE = 13_000_000
"""Bytes of one file of a tar file in pieces."""
SHEET = 10_000
"""Images of one sheet."""
COLUMNS = 100
RUNS = "runs"


def sheet_of(images: np.ndarray) -> np.ndarray:
    """Return the images (N, 3, S, S) side by side as one picture (rows * S, COLUMNS * S, 3); the rest is black."""
    side = images.shape[-1]
    rows = -(-len(images) // COLUMNS)
    padded = np.zeros((rows * COLUMNS, 3, side, side), np.uint8)
    padded[: len(images)] = images
    grid = padded.reshape(rows, COLUMNS, 3, side, side).transpose(0, 3, 1, 4, 2)
    return np.ascontiguousarray(grid).reshape(rows * side, COLUMNS * side, 3)


def images_of(sheet: np.ndarray, count: int) -> np.ndarray:
    """Return the first ``count`` images of a sheet as the rows of CIFAR's files: all red, then green, then blue."""
    side = sheet.shape[1] // COLUMNS
    grid = sheet.reshape(-1, side, COLUMNS, side, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(grid).reshape(-1, 3 * side * side)[:count]


def pack_cifar(name: str, data: Path, out: Path) -> list[Path]:
    """Write the sheets and the labels of `cifar10` or `cifar100`."""
    from softprune.lab.data import load_data

    bundle = load_data(name, data)
    files, labels = [], {"names": np.array(bundle.class_names)}
    for split, part in (("train", bundle.train), ("test", bundle.test)):
        labels[split] = part.labels.numpy().astype(np.uint8)
        for number, first in enumerate(range(0, len(part), SHEET)):
            path = out / f"{name}-{split}-{number}.webp"
            picture = Image.fromarray(sheet_of(part.images[first : first + SHEET].numpy()))
            picture.save(path, lossless=True, quality=50, method=2)
            files.append(path)
    path = out / f"{name}-labels.npz"
    np.savez_compressed(path, **labels)
    return [*files, path]


def unpack_cifar(name: str, arrived: Path, out: Path) -> Path:
    """Write CIFAR's files in the layout of the official archives; return their folder."""
    labels = np.load(arrived / f"{name}-labels.npz")
    rows = {}
    for split in ("train", "test"):
        count = len(labels[split])
        sheets = [
            images_of(np.asarray(Image.open(arrived / f"{name}-{split}-{number}.webp")), min(SHEET, count - first))
            for number, first in enumerate(range(0, count, SHEET))
        ]
        rows[split] = np.concatenate(sheets)
    names = [str(each).encode() for each in labels["names"]]
    folder = out / {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
    partial = folder.with_name(f".{folder.name}")
    partial.mkdir(parents=True, exist_ok=True)
    if name == "cifar10":
        size = len(rows["train"]) // 5
        parts = {f"data_batch_{i + 1}": ("train", slice(i * size, (i + 1) * size)) for i in range(5)}
        parts["test_batch"] = ("test", slice(None))
        key, meta, meta_key = b"labels", "batches.meta", b"label_names"
    else:
        parts = {"train": ("train", slice(None)), "test": ("test", slice(None))}
        key, meta, meta_key = b"fine_labels", "meta", b"fine_label_names"
    for file, (split, which) in parts.items():
        _dump(partial / file, {b"data": rows[split][which], key: labels[split][which].tolist()})
    _dump(partial / meta, {meta_key: names})
    partial.rename(folder)  # jobs wait for it
    return folder


def _dump(path: Path, content: dict[bytes, object]) -> None:
    path.write_bytes(pickle.dumps(content, protocol=4))


def pack_folder(name: str, folder: Path, out: Path) -> list[Path]:
    """Write a folder as a tar file in pieces."""
    whole = out / f"{name}.tar"
    with tarfile.open(whole, "w:gz", compresslevel=1) as tar:  # headers of small files
        tar.add(folder, arcname=".")
    files = []
    with whole.open("rb") as source:
        while piece := source.read(PIECE):
            files.append(out / f"{name}.tar.{len(files):02d}")
            files[-1].write_bytes(piece)
    whole.unlink()
    return files


def unpack_folder(files: list[Path], folder: Path) -> Path:
    """Put the pieces of a tar file together and extract it to ``folder``, which appears when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    whole, partial = folder.with_name(f".{folder.name}.tar"), folder.with_name(f".{folder.name}")
    with whole.open("wb") as target:
        for file in files:
            target.write(file.read_bytes())
    with tarfile.open(whole) as tar:
        tar.extractall(partial, filter="data")
    whole.unlink()
    if folder.is_dir():  # of runs: others may have begun
        for path in partial.iterdir():
            path.rename(folder / path.name)
        partial.rmdir()
    else:
        partial.rename(folder)
    return folder


def into_parts(sets: dict[str, list[Path]], out: Path, most: int) -> list[Path]:
    """Move the files to OUT-1, OUT-2, ... of ``most`` bytes each in the order of the sets, with a list of each set."""
    manifest = json.dumps({name: [file.name for file in files] for name, files in sets.items()})
    parts: list[list[Path]] = []
    room = 0
    for file in (file for files in sets.values() for file in files):
        size = file.stat().st_size
        if size > room:
            parts.append([])
            room = most - len(manifest)
        parts[-1].append(file)
        room -= size
    folders = []
    for number, files in enumerate(parts, start=1):
        folder = out.with_name(f"{out.name}-{number}")
        folder.mkdir()
        (folder / "manifest.json").write_text(manifest)
        for file in files:
            shutil.move(file, folder / file.name)
        folders.append(folder)
    return folders


def pack(out: Path, sets: dict[str, Path], most: int) -> list[Path]:
    """Write data sets, and unfinished runs under the name "runs", as OUT-1, OUT-2, ...; return the folders."""
    out.mkdir()
    packed = {
        name: (pack_cifar if name in ("cifar10", "cifar100") else pack_folder)(name, folder, out)
        for name, folder in sets.items()
    }
    parts = into_parts(packed, out, most)
    out.rmdir()
    return parts


def unpack(arrived: Path, root: Path) -> list[str]:
    """Write every set whose files are all in ``arrived``, once; return the names."""
    done = []
    for name, names in json.loads((arrived / "manifest.json").read_text()).items():
        files, mark = [arrived / each for each in names], arrived / f"{name}.done"
        if mark.exists() or not all(file.is_file() for file in files):
            continue
        if name in ("cifar10", "cifar100"):
            unpack_cifar(name, arrived, root / "data")
        else:
            unpack_folder(files, root / RUNS if name == RUNS else root / "data" / name)
        mark.touch()
        done.append(name)
    return done


if __name__ == "__main__":
    action, first, second, *given = sys.argv[1:]
    if action == "pack":
        folders = {name: Path(folder) for name, folder in (each.split("=", 1) for each in given)}
        print(*pack(Path(first), folders, int(second)))
    else:
        print("complete:", *unpack(Path(first), Path(second)))
