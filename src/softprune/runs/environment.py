"""What a run ran on: versions, device, source revision and command line, for its records."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import softprune


def describe_environment(device: torch.device, world_size: int = 1) -> dict[str, Any]:
    """Versions, device and source revision as plain values."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a class of its own, which no checkpoint may hold
        "numpy": np.__version__,
        "softprune": softprune.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "device": device_name(device),
        "processes": world_size,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "git": _revision(),
    }


def describe_session(device: torch.device, world_size: int, *, epoch: int, batch: int) -> dict[str, Any]:
    """A process of a run, which may take several: when and where in the training it began, its command and machine."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "epoch": epoch,
        "batch": batch,
        "command": command_line(),
        "environment": describe_environment(device, world_size),
    }


def device_name(device: torch.device) -> str:
    """The device in words: the GPU's model, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({_processor()}, {os.cpu_count()} cores)"


def command_line() -> str:
    """The command that this process was started with, ready to paste into a shell."""
    arguments = sys.argv[1:]
    program = Path(sys.argv[0]).name
    return shlex.join(["softprune" if program in ("__main__.py", "softprune") else program, *arguments])


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _revision() -> dict[str, Any] | None:
    """Commit of the checkout that softprune runs from, and whether it has local changes; None outside git."""
    folder = Path(softprune.__file__).parent
    if "site-packages" in folder.parts:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
