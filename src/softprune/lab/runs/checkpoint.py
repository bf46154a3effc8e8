"""Checkpoints: one file each with a checksum, written atomically, the previous one kept.

A file is what ``torch.save`` writes, with a checksum as the comment of its ZIP archive. It holds tensors and plain
Python values only, so that ``torch.load(path, weights_only=True)`` opens it.
"""

import hashlib
import io
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from softprune.errors import CheckpointError, FileFormatError, first_line
from softprune.io import LARGEST_NETWORK, read_bytes, write_atomically
from softprune.lab.runs.folder import RunFolder
from softprune.log import get_logger

logger = get_logger(__name__)

_VERSION = 3
_COMMENT = re.compile(rb"softprune checkpoint (\d{1,9}) sha256 [0-9a-f]{64}\Z")
_SUFFIX = ".ckpt"


class _DamagedError(CheckpointError):
    """The file is not complete."""


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoint files, unread, the newest first."""
    # Steps are zero-padded, so that names sort as numbers do.
    return sorted(folder.glob(f"step-*{_SUFFIX}"), reverse=True)


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write ``state`` as the checkpoint of ``step`` and delete all but it and the one before."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    archive = buffer.getvalue()[:-2]
    path = folder / f"step-{step:010d}{_SUFFIX}"
    write_atomically(path, (archive, _ending(archive)), then="resume the run")
    for old in checkpoints_in(folder)[2:]:
        old.unlink(missing_ok=True)
    return path


def _ending(archive: bytes | memoryview) -> bytes:
    """Return how a checkpoint ends: the length of its ZIP archive's comment, two bytes, and the comment."""
    digest = hashlib.sha256(archive)
    digest.update(b"\0\0")  # the length of no comment, as torch.save writes it
    comment = b"softprune checkpoint %d sha256 %s" % (_VERSION, digest.hexdigest().encode())
    return len(comment).to_bytes(2, "little") + comment


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint file, on the CPU, or raise a CheckpointError that says what is wrong."""
    content = read_bytes(path, LARGEST_NETWORK)
    comment = _COMMENT.search(content[-128:])
    if comment is None:
        raise _DamagedError(f"A checkpoint must end with its checksum. Got a damaged or another file at {path}.")
    if int(comment[1]) != _VERSION:
        raise CheckpointError(
            f"This softprune reads checkpoints of version {_VERSION}. Got version {int(comment[1])} at {path}. Nothing "
            "was changed; resume with the softprune that wrote it."
        )
    length = len(content) - len(comment[0]) - 2
    if content[length:] != _ending(memoryview(content)[:length]):
        raise _DamagedError(f"A checkpoint must match its checksum. Got a damaged file at {path}.")
    try:
        state = load_tensors(content)
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__}")
    except Exception as error:  # what torch.load refuses has no common class
        raise _DamagedError(
            f"A checkpoint must hold tensors and plain values. Got {first_line(error)} at {path}."
        ) from error
    return state


def load_tensors(content: bytes) -> Any:
    """Return what ``torch.save`` wrote, on the CPU, without running code. Raise nearly anything for other bytes."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def read_newest(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the newest complete checkpoint of ``folder``; damaged newer ones are skipped with a warning.

    A checkpoint that cannot be opened, or of another version, is an error: it may be complete, and the training since
    the one before it would be lost.
    """
    paths = checkpoints_in(folder)
    for path in paths:
        try:
            return path, read_checkpoint(path)
        except _DamagedError as error:
            logger.warning("softprune: %s Reading the checkpoint before it.", error)
        except (CheckpointError, FileFormatError):
            if path.exists():
                raise
            # The process that trains the run has deleted it in the meantime.
    raise CheckpointError(
        f"The network of a run is in its checkpoints. Got {len(paths) or 'none'} in {folder}, and no complete one. "
        f"Restore a copy of one, or train from the beginning with `{RunFolder(folder.parent).resume_command}`."
    )


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators that a network or a loader may draw from: PyTorch, Python, NumPy."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    _, key, *rest = numpy
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [torch.from_numpy(key.astype(np.int64)), *rest],  # a checkpoint holds no uint32
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators to what :func:`random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key, *rest = state["numpy"]
    np.random.set_state(("MT19937", key.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
