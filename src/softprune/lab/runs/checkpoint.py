"""Checkpoints: a single file with a checksum, written atomically. The previous checkpoint is kept.

The file is written by ``torch.save``, with a checksum as the comment of its ZIP archive. It holds only tensors and
plain Python values, so ``torch.load(path, weights_only=True)`` can open it.
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
    """Raised for an incomplete or damaged file."""


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints, newest first."""
    # Steps are zero-padded, so names sort in numerical order.
    return sorted(folder.glob(f"step-*{_SUFFIX}"), reverse=True)


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write ``state`` as the checkpoint of ``step``, and delete all but the two newest checkpoints."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    archive = buffer.getvalue()[:-2]
    path = folder / f"step-{step:010d}{_SUFFIX}"
    write_atomically(path, (archive, _ending(archive)), then="resume the run")
    for old in checkpoints_in(folder)[2:]:
        old.unlink(missing_ok=True)
    return path


def _ending(archive: bytes | memoryview) -> bytes:
    """Return the last bytes of a checkpoint: the length of the ZIP archive's comment (2 bytes) and the comment."""
    digest = hashlib.sha256(archive)
    digest.update(b"\0\0")  # torch.save writes an empty comment, of length 0
    comment = b"softprune checkpoint %d sha256 %s" % (_VERSION, digest.hexdigest().encode())
    return len(comment).to_bytes(2, "little") + comment


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint file, with tensors on the CPU; raise a CheckpointError if it is not valid."""
    content = read_bytes(path, LARGEST_NETWORK)
    comment = _COMMENT.search(content[-128:])
    if comment is None:
        raise _DamagedError(f"A checkpoint must end with its checksum. Got none: {path} is damaged or another file.")
    if int(comment[1]) != _VERSION:
        raise CheckpointError(
            f"This softprune reads checkpoints of format version {_VERSION}. Got version {int(comment[1])} in {path}. "
            "The file is unchanged; resume with the softprune that wrote it."
        )
    length = len(content) - len(comment[0]) - 2
    if content[length:] != _ending(memoryview(content)[:length]):
        raise _DamagedError(f"A checkpoint must match its checksum. Got a damaged file, {path}.")
    try:
        state = load_tensors(content)
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__}")
    except Exception as error:  # torch.load raises many kinds of errors, without a common class
        raise _DamagedError(
            f"A checkpoint must hold tensors and plain values. Got {first_line(error)} in {path}."
        ) from error
    return state


def load_tensors(content: bytes) -> Any:
    """Load the output of ``torch.save`` to the CPU without running code. Other bytes may raise any exception."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def read_newest(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return path and state of the newest valid checkpoint in ``folder``; skip damaged ones with a warning.

    A checkpoint that cannot be opened, or has another version, is not skipped: it may be valid, and the training since
    the previous checkpoint would be lost. It raises an error.
    """
    paths = checkpoints_in(folder)
    for path in paths:
        try:
            return path, read_checkpoint(path)
        except _DamagedError as error:
            logger.warning("softprune: %s Trying the previous checkpoint.", error)
        except (CheckpointError, FileFormatError):
            if path.exists():
                raise
            # The training process has deleted it in the meantime.
    raise CheckpointError(
        f"A run needs a valid checkpoint. Got {len(paths) or 'none'} in {folder}, and no valid one. "
        f"Restore a checkpoint from a backup, or train from the start with `{RunFolder(folder.parent).resume_command}`."
    )


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the global random generators of PyTorch, Python and NumPy."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    _, key, *rest = numpy
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [torch.from_numpy(key.astype(np.int64)), *rest],  # checkpoints cannot hold uint32
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the result of :func:`random_state`."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key, *rest = state["numpy"]
    np.random.set_state(("MT19937", key.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
