"""What a run records of its environment, and what resuming it needs: the same images, arithmetic, and advice."""

import logging
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import softprune
from softprune.data import DataBundle
from softprune.errors import CheckpointError, first_few
from softprune.runs.checkpoint import newest_path
from softprune.runs.folder import RunFolder
from softprune.runs.result import Environment, Revision, Session


def describe_environment(device: torch.device, world_size: int = 1) -> Environment:
    """Return versions, device and source revision."""
    return Environment(
        python=platform.python_version(),
        torch=str(torch.__version__),  # a subclass of str
        numpy=np.__version__,
        softprune=softprune.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version() if device.type == "cuda" else None,
        device=device_name(device),
        processes=world_size,
        threads=torch.get_num_threads(),
        platform=platform.platform(),
        git=_revision(),
    )


def describe_session(device: torch.device, world_size: int, *, epoch: int, batch: int) -> Session:
    """Describe this process of a run: when and where in the training it began, its command and machine."""
    return Session(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        epoch=epoch,
        batch=batch,
        command=command_line(),
        environment=describe_environment(device, world_size),
    )


def device_name(device: torch.device) -> str:
    """Return the model of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({_processor()}, {os.cpu_count()} cores)"


def command_line() -> str:
    """Return the command that this process was started with, ready to paste into a shell."""
    program = Path(sys.argv[0]).name
    command = shlex.join(["softprune" if program in ("__main__.py", "softprune") else program, *sys.argv[1:]])
    # A record is printed to terminals: control characters and undecodable bytes are escaped.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in command)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _revision() -> Revision | None:
    """Return the commit of the checkout that softprune runs from; None outside git."""
    folder = Path(softprune.__file__).parent
    if "site-packages" in folder.parts:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    return Revision(commit=commit, changed=changed)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


logger = logging.getLogger(__name__)


def resume_hint(folder: RunFolder) -> str:
    """Return how to resume after images could not be read."""
    last = newest_path(folder.checkpoints)
    start = "the beginning, since there is no checkpoint yet" if last is None else last
    return f"Repair the images; `{_whole_run(folder).resume_command}` then resumes from {start}."


def restart_hint(folder: RunFolder, *, finetuning: bool, cut: bool) -> str:
    """Return what to do after training diverged. A run keeps its settings, so that other ones are another run."""
    rate = "finetune.lr" if finetuning else "optimizer.lr"
    again = f"{_whole_run(folder).again_command} --set {rate}=..."
    last = newest_path(folder.checkpoints)
    if last is None:
        return f"There is no checkpoint yet: start a new run with `{again}`."
    kept = f"The last checkpoint with finite weights is {last}"
    if cut:
        return f"{kept}; since the network was cut in training, start a new run with `{again}`."
    weights = f"--set model.weights={folder.path}"
    return f"{kept}: start a new run from its weights with `{again} {weights}`, or without them."


def describe_images(data: DataBundle) -> dict[str, Any]:
    """Return what a checkpoint records of the images, to notice when they are others."""
    return {
        "training images": len(data.train),
        "test images": len(data.test),
        "classes": data.num_classes,
        "class names": list(data.class_names),
    }


def check_same_images(data: DataBundle, state: dict[str, Any], folder: RunFolder) -> None:
    """Raise a CheckpointError if the images are not those of the checkpoint: their order and labels would differ."""
    now, then = describe_images(data), state["data"]
    if now == then:
        return
    found = [
        f"{now[key]} {key} instead of {then[key]}"
        for key in ("training images", "test images", "classes")
        if now[key] != then[key]
    ]
    raise CheckpointError(
        f"A run must be resumed with the images that it began with. Got {', '.join(found) or 'other class names'}. "
        "Restore the images or say where they are with --data-dir, or start a new run with "
        f"`{_whole_run(folder).again_command}`."
    )


def warn_of_changes(before: Sequence[Session], now: Session) -> None:
    """Warn if a run is resumed where sums may be computed in another order than in the session ``before``."""
    if not before:
        return
    old, new = before[-1].environment, now.environment
    on_cpu = new.device.startswith("CPU")
    keys = ["device", "torch", "processes", *(["threads"] if on_cpu else ["cuda", "cudnn"])]
    changed = [
        f"{key} {getattr(old, key)} before, {getattr(new, key)} now"
        for key in keys
        if getattr(old, key) != getattr(new, key)
    ]
    if changed:
        logger.warning(
            "softprune: the run is resumed in another environment (%s): its result may differ from that of an "
            "undisturbed run in the last bits, and after many steps visibly",
            "; ".join(changed),
        )
    if old.processes != new.processes:
        logger.warning(
            "softprune: The batch of all processes together stays the same. BatchNorm normalises over the share of "
            "each process, which is another one now, unless train.sync_batchnorm is set."
        )


def unsaved_buffers(network: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are not in the state_dict (``persistent=False``): a checkpoint must hold them too."""
    saved = network.state_dict().keys()
    return {name: buffer.detach() for name, buffer in network.named_buffers() if name not in saved}


@torch.no_grad()
def load_unsaved_buffers(network: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy what :func:`unsaved_buffers` returned into ``network``."""
    buffers = dict(network.named_buffers())
    for name, value in values.items():
        if name in buffers and buffers[name].shape == value.shape:
            buffers[name].copy_(value)


class PlainAttributes:
    """Notices plain Python values of modules that change in training, such as counters: no checkpoint holds them."""

    def __init__(self, network: nn.Module) -> None:
        self._before = _plain_attributes(network)
        self._warned = False

    def check(self, network: nn.Module) -> None:
        """Warn once if a value has changed since the start."""
        if self._warned:
            return
        now = _plain_attributes(network)
        changed = sorted(key for key, value in now.items() if self._before.get(key, value) != value)
        if changed:
            self._warned = True
            logger.warning(
                "softprune: training changes %s, which no checkpoint holds: a resumed run may differ from an "
                "undisturbed one. Keep such values in buffers (register_buffer).",
                first_few(changed),
            )


def _plain_attributes(network: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in network.named_modules()
        if not type(module).__module__.startswith(("torch.", "softprune."))
        for key, value in vars(module).items()
        if key != "training" and isinstance(value, bool | int | float | str)
    }


def _whole_run(folder: RunFolder) -> RunFolder:
    """Return the run that is started and resumed: for a baseline, the run that contains it."""
    whole = RunFolder(folder.path.parent)
    return whole if folder.path == whole.dense and whole.config.is_file() else folder
