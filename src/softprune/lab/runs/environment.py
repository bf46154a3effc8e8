"""The environment of a run: versions, device, source revision and command line, and how it differs from another."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

import softprune
from softprune.errors import printable
from softprune.lab.runs.result import Environment, Revision, Session
from softprune.log import get_logger

logger = get_logger(__name__)


def describe_environment(device: torch.device, world_size: int = 1) -> Environment:
    """Return versions, device and source revision."""
    on_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_cuda else f"CPU ({_processor()}, {os.cpu_count()} cores)"
    return Environment(
        python=platform.python_version(),
        torch=str(torch.__version__),  # a subclass of str
        numpy=np.__version__,
        softprune=softprune.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version() if on_cuda else None,
        device=name,
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


def warn_of_changes(before: Sequence[Session], now: Session) -> None:
    """Warn if a run is resumed where sums may be computed in another order than in the session ``before``."""
    if not before:
        return
    old, new = before[-1].environment, now.environment
    keys = ["device", "torch", "processes", *(["threads"] if new.device.startswith("CPU") else ["cuda", "cudnn"])]
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


def command_line() -> str:
    """Return the command that this process was started with, ready to paste into a shell."""
    program = Path(sys.argv[0]).name
    command = shlex.join(["softprune" if program in ("__main__.py", "softprune") else program, *sys.argv[1:]])
    # A record is printed to terminals: control characters and undecodable bytes are escaped.
    return printable(command)


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
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, dirty = done.stdout.strip().partition("-")
    return Revision(commit=commit, changed=bool(dirty))
