"""Record the environment of a run: versions, device, git revision and command line."""

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import softprune
from softprune.errors import printable
from softprune.lab.runs.result import Environment, Revision


def describe_environment(device: torch.device, world_size: int = 1) -> Environment:
    """Return versions, device and git revision."""
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


def command_line() -> str:
    """Return the command line of this process, quoted for a shell."""
    program = Path(sys.argv[0]).name
    command = shlex.join(["softprune" if program in ("__main__.py", "softprune") else program, *sys.argv[1:]])
    return printable(command)  # arguments may contain bytes that JSON cannot represent


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _revision() -> Revision | None:
    """Return the git commit of the checkout that softprune is imported from; None outside git."""
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
