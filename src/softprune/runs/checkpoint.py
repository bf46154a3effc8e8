"""Checkpoints: one file each with a checksum, written atomically, the previous one kept.

A file is a magic line, the SHA-256 of the rest, and a ``torch.save`` archive that holds tensors and plain
Python values only, so that it loads with ``weights_only=True``.
"""

import hashlib
import io
import logging
import random
import re
import shlex
from pathlib import Path
from typing import Any

import torch

from softprune.errors import CheckpointError
from softprune.io import remove_leftovers, write_atomically

logger = logging.getLogger(__name__)

_VERSION = 1
_MAGIC = b"softprune checkpoint %d\n" % _VERSION
_ANY_MAGIC = re.compile(rb"softprune checkpoint (\d{1,9})\n")
_DIGEST_BYTES = 32
_SUFFIX = ".ckpt"
_ASIDE = ".damaged"


class _DamagedError(CheckpointError):
    """The file itself is not whole: no other softprune and no other rights would read it."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` optimizer steps lies."""
    return folder / f"step-{step:010d}{_SUFFIX}"


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Write ``state`` as the checkpoint of ``step`` and delete all but the newest ``keep`` files."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    archive = buffer.getvalue()
    path = checkpoint_path(folder, step)
    write_atomically(path, (_MAGIC, hashlib.sha256(archive).digest(), archive))
    for old in _newest_first(folder)[keep:]:
        old.unlink(missing_ok=True)
    return path


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a checkpoint file, on the CPU, or a CheckpointError that says what is wrong with the
    file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"A checkpoint must be a readable file. Got {error.strerror} at {path}. Nothing was changed; make it "
            "readable and go on."
        ) from error
    mark = _ANY_MAGIC.match(content)
    if mark is not None and int(mark[1]) > _VERSION:
        raise CheckpointError(
            f"This softprune reads checkpoints of version {_VERSION}. Got version {int(mark[1])} at {path}, which a "
            "newer softprune wrote. Nothing was changed; go on with that softprune."
        )
    if not content.startswith(_MAGIC):
        raise _DamagedError(f"A checkpoint must begin with softprune's mark. Got another file at {path}.")
    body = memoryview(content)[len(_MAGIC) :]
    digest, archive = bytes(body[:_DIGEST_BYTES]), body[_DIGEST_BYTES:]
    if hashlib.sha256(archive).digest() != digest:
        raise _DamagedError(
            f"A checkpoint must match its checksum. Got a damaged or truncated file at {path}."
        )
    state = torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
    assert isinstance(state, dict)
    return state


def read_newest(folder: Path, *, mend: bool = False) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint of ``folder`` that is whole; damaged newer ones are skipped with a warning.

    One that cannot be opened, or that a newer softprune wrote, is an error: it may be whole, and what was trained
    since the one before it would be lost.

    ``mend`` is for who holds the run's lock: it also sets damaged files aside and deletes what a killed process left
    behind. To anybody else such a file may be one that the run is about to write.
    """
    if mend:
        remove_leftovers(folder)
    paths = _newest_first(folder)
    if not paths and not has_damaged(folder):
        raise CheckpointError(
            f"A run's network is in its checkpoints. Got none in {folder}: the run stopped before its first one. "
            f"`softprune resume {shlex.quote(str(folder.parent))}` trains it."
        )
    damaged = len(_damaged(folder))
    for path in paths:
        try:
            return path, read_checkpoint(path)
        except _DamagedError as error:
            damaged += 1
            if not mend:
                logger.warning("%s Reading the checkpoint before it.", error)
                continue
            aside = path.with_suffix(_ASIDE)
            path.replace(aside)
            logger.warning("%s It is now %s; going back to the checkpoint before it.", error, aside.name)
        except CheckpointError:
            if path.exists():
                raise
            # Whoever works on the run has set it aside or deleted it meanwhile.
    raise CheckpointError(
        f"At least one checkpoint must be whole. Got {damaged} damaged ones in {folder}. Put a "
        f"copy of one back, or start a new run with `softprune train`. Without the {_ASIDE} files `softprune resume` "
        "would train from the beginning."
    )


def has_damaged(folder: Path) -> bool:
    """Whether checkpoints of ``folder`` were set aside because they were not whole."""
    return bool(_damaged(folder))


def _damaged(folder: Path) -> list[Path]:
    return list(folder.glob(f"step-*{_ASIDE}"))


def newest_path(folder: Path) -> Path | None:
    """The newest checkpoint file, unread, or None."""
    paths = _newest_first(folder)
    return paths[0] if paths else None


def _newest_first(folder: Path) -> list[Path]:
    # Steps are zero-padded, so names sort as numbers do.
    return sorted(folder.glob(f"step-*{_SUFFIX}"), reverse=True)


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of the generators that a network (dropout) or a loader may draw from."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators back to what :func:`random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
