"""Commands in a real pseudo-terminal, and what is on its screen."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PIECE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


def in_terminal(folder: Path, *arguments: str, columns: int = 80) -> tuple[int, str]:
    """Run a softprune command in a pseudo-terminal and return its exit code and everything that it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "softprune", *arguments],
        cwd=folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    written, deadline = b"", time.monotonic() + 300
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 1.0)[0]:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other side has closed
                break
            if not part:
                break
            written += part
    os.close(ours)
    return process.wait(timeout=60), written.decode()


def lines_of(written: str) -> list[str]:
    """Every line that was on the screen at some time, without escape sequences."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", ESCAPE.sub("", written))]


def screens_of(written: str) -> list[list[str]]:
    """The lines of the screen, with their colours, before each erased line and at the end."""
    screens: list[list[str]] = []
    lines, row = [""], 0
    for argument, command, control, text in _PIECE.findall(written):
        if command == "A":
            row = max(row - int(argument or 1), 0)
        elif command == "K":
            screens.append(list(lines))
            lines[row] = ""
        elif command == "m":
            lines[row] += f"\x1b[{argument}m"
        elif control == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif text:
            lines[row] += text
    return [*screens, lines]
