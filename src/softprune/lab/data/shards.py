"""Tar shards in the WebDataset layout, local or by URL.

A shard is an uncompressed tar file. Files with the same path up to the first dot of their name form a sample: an image
(`.jpg`, `.png`, ...) and its class number as text (`.cls`). The headers of all shards are read once at the start. From
then on an image is one read at a known offset, so shards are ordered like any other data set: shuffled over all
images, and the same after a resume and on any number of processes.
"""

import glob
import io
import itertools
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from softprune.errors import ConfigError, DataError
from softprune.io import write_atomically
from softprune.lab.data.datasets import DataBundle
from softprune.lab.data.download import fetch_file
from softprune.lab.data.folder import SPLITS, SUFFIXES, scan_folder
from softprune.lab.data.images import MOST_BYTES, Crops, EncodedDataset
from softprune.rng import hashed_permutation

CLASSES = "classes.txt"
"""Beside the shards: the names of the classes, one a line. Optional."""
_LARGEST_LABEL = 2**20
_MOST_SHARDS = 1_000_000
# Takes the place of a site's number in the hash; far above any of them.
_WRITTEN = 0x73686172


class ShardDataset(EncodedDataset):
    """The images of tar shards. A row is the number of the shard, and offset, size and label of the image."""

    def __init__(self, shards: Sequence[Path], rows: np.ndarray, crops: Crops) -> None:
        super().__init__(rows, torch.from_numpy(rows[:, 3]), crops)
        self._shards = shards

    def read(self, index: int) -> bytes:
        shard, offset, size, _ = self.rows[index].tolist()
        # Opened for each image: a set can have more shards than a process may have open files.
        file = os.open(self._shards[shard], os.O_RDONLY)
        try:
            content = os.pread(file, size, offset)
        finally:
            os.close(file)
        if len(content) < size:
            raise OSError("the shard is truncated")
        return content

    def source(self, index: int) -> str:
        shard, offset, _, _ = self.rows[index]
        return f"{self._shards[shard]} (the image at byte {offset})"


def load_shards(root: Path, crops: Crops, *, train_shards: str, val_shards: str, download: bool) -> DataBundle:
    """Return the images of tar shards. The patterns are relative to `root`; shards of a URL are downloaded to it."""
    parts = []
    for split, pattern in zip(SPLITS, (train_shards, val_shards), strict=True):
        shards = find_shards(pattern, root, f"data.{split}_shards", download=download)
        parts.append(ShardDataset(shards, _read_rows(shards), crops))
    count = 1 + max(int(part.labels.max()) for part in parts)
    return DataBundle.of_files("webdataset", parts, _class_names(root / CLASSES, count), count)


def find_shards(pattern: str, root: Path, key: str, *, download: bool) -> list[Path]:
    """Return the shards of a pattern such as `train-{000..009}.tar`, `train-*.tar` or a URL."""
    names = expand_braces(pattern)
    if "://" in pattern:
        # By host and path, as `wget -x` does: other URLs, which another run may have, can end alike.
        targets = [(url, root / os.path.normpath("/" + url.partition("://")[2]).lstrip("/")) for url in names]
        if any(character in pattern for character in "*?["):
            raise DataError(f"{key} must list the shards of a URL with braces, {{000..009}}. Got {pattern!r}.")
        for url, path in targets:
            if path.is_file():
                continue
            if not download:
                raise DataError(
                    f"{key} names shards by URL, which are kept in data.dir = {root}. Got no {path.relative_to(root)} "
                    "there; set data.download = true to fetch it."
                )
            fetch_file(url, path)
        return [path for _, path in targets]
    found = [path for name in names for path in sorted(glob.glob(str(root / name))) or [str(root / name)]]
    missing = [path for path in found if not os.path.isfile(path)]
    if missing:
        raise DataError(
            f"{key} must be a pattern of tar files in data.dir = {root}. Got {pattern!r}: there is no {missing[0]}. "
            "`softprune shards` writes shards from a folder of images."
        )
    return [Path(path) for path in found]


def expand_braces(pattern: str) -> list[str]:
    """Return the names of a pattern with `{000..009}` (numbers, as wide as the first) or `{a,b}`."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    first, last, listed = match.groups()
    ends = expand_braces(pattern[match.end() :])
    count = int(last) - int(first) + 1 if listed is None else listed.count(",") + 1
    if not 0 < count * len(ends) <= _MOST_SHARDS:
        raise ConfigError(
            f"A range of shards must be increasing, with at most {_MOST_SHARDS:,} shards. Got {pattern!r}."
        )
    if listed is None:
        middles = [f"{int(first) + number:0{len(first)}d}" for number in range(count)]
    else:
        middles = listed.split(",")
    return [pattern[: match.start()] + middle + end for middle in middles for end in ends]


def _read_rows(shards: Sequence[Path]) -> np.ndarray:
    rows: list[tuple[int, int, int, int]] = []
    for number, path in enumerate(shards):
        found = [(number, *sample) for sample in _samples(path)]
        if not found:
            raise DataError(f"A shard must hold at least one image with its class. Got none in {path}.")
        rows += found
    return np.array(rows, dtype=np.int64)


def _samples(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield offset, size and label of every image of a shard."""
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for key, members in itertools.groupby(_plain_files(tar, file), lambda member: _key(member)[0]):
                parts = {_key(member)[1]: (member.offset_data, member.size) for member in members}
                yield _sample(path, key, parts, file)
    except (tarfile.TarError, EOFError) as error:
        raise DataError(
            f"A shard must be a complete, uncompressed tar file of plain files. Got {path}: {error}. Copy or download "
            "it again."
        ) from error
    except OSError as error:
        raise DataError(f"A shard must be readable. Got {path}: {error.strerror}; check its permissions.") from error


def _plain_files(tar: tarfile.TarFile, file: io.BufferedReader) -> Iterator[tarfile.TarInfo]:
    """Yield the files of an archive. Raise a TarError for links and devices, and at the end if it is incomplete."""
    end = 0
    for member in tar:
        end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            raise tarfile.TarError(f"{member.name} is not a plain file")
        yield member
    # A file cut off between two members looks complete to tarfile. The last sample may lack its class then.
    if os.pread(file.fileno(), tarfile.BLOCKSIZE, end) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.TarError("the end of the archive is missing")


def _key(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return the key of the sample that a file belongs to, and the file's extension."""
    folder, slash, name = member.name.rpartition("/")
    stem, _, extension = name.partition(".")
    return folder + slash + stem, extension.lower()


def _sample(path: Path, key: str, parts: dict[str, tuple[int, int]], file: io.BufferedReader) -> tuple[int, int, int]:
    images = [name for name in parts if f".{name}" in SUFFIXES]
    if len(images) != 1 or "cls" not in parts:
        raise DataError(
            f"A sample of a shard must have one image and its class number in a file .cls. Got {path}: {key} with "
            f"{', '.join(sorted(parts))}."
        )
    offset, size = parts["cls"]
    text = os.pread(file.fileno(), min(size, 20), offset).decode("ascii", "replace").strip()
    if not text.isdecimal() or int(text) >= _LARGEST_LABEL:
        raise DataError(f"A class must be a number from 0. Got {path}: {key}.cls with {text!r}.")
    offset, size = parts[images[0]]
    if size > MOST_BYTES:
        raise DataError(f"An image can have at most {MOST_BYTES:,} bytes. Got {path}: {key} with {size:,}.")
    return offset, size, int(text)


def _class_names(path: Path, count: int) -> tuple[str, ...]:
    if not path.is_file():
        return ()
    try:
        names = tuple(path.read_text(encoding="utf-8").split("\n"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must name the classes in UTF-8, one a line. Got {error}.") from error
    names = names[:-1] if names[-1] == "" else names
    if len(names) < count:
        raise DataError(
            f"{path} must name every class, one a line. Got {len(names)} names and labels up to {count - 1}."
        )
    return names


def write_shards(
    root: Path | str, out: Path | str, *, per_shard: int = 1000, on_shard: Callable[[Path], None] = lambda path: None
) -> None:
    """Write the images of a folder in the ImageNet layout as shards, in a shuffled order.

    The bytes of the files are kept. A shard that exists is not written again, so that a stopped call can be repeated.
    """
    out = Path(out)
    if per_shard < 1:
        raise ConfigError(f"A shard must hold at least one image. Got per_shard = {per_shard}.")
    classes, splits = scan_folder(Path(root))
    out.mkdir(parents=True, exist_ok=True)
    for split, (files, labels) in splits.items():
        order = hashed_permutation(len(files), 0, _WRITTEN, 0).tolist()
        for number, start in enumerate(range(0, len(order), per_shard)):
            path = out / f"{split}-{number:06d}.tar"
            chosen = order[start : start + per_shard]
            if not path.exists():
                images = ((Path(root) / split / os.fsdecode(files[each]), labels[each]) for each in chosen)
                write_atomically(path, _archive(itertools.count(start), images), then="repeat the command")
            elif [label for _, _, label in _samples(path)] != [labels[each] for each in chosen]:
                raise DataError(
                    f"A shard that exists must hold the images that it would get now. Got {path}, written from other "
                    "images or with another number per shard; remove the old shards, or name another folder."
                )
            on_shard(path)
    write_atomically(out / CLASSES, "".join(f"{name}\n" for name in classes).encode(), then="repeat the command")


def _archive(numbers: Iterator[int], images: Iterator[tuple[Path, int]]) -> Iterator[bytes]:
    """Yield the bytes of a tar file, sample by sample. They depend on the images alone."""
    total = 0
    for number, (path, label) in zip(numbers, images, strict=False):
        for extension, content in ((path.suffix.lower().lstrip("."), path.read_bytes()), ("cls", str(label).encode())):
            member = tarfile.TarInfo(f"{number:08d}.{extension}")
            member.size = len(content)
            block = member.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)
            total += len(block)
            yield block
    yield bytes(2 * tarfile.BLOCKSIZE + -(total + 2 * tarfile.BLOCKSIZE) % tarfile.RECORDSIZE)
