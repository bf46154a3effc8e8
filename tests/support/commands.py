"""Command lines in processes forked from a server, which has imported everything: a start costs milliseconds."""

import os
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from forked import run_command
from killing import fork_server


def begin(folder: Path, *arguments: str, out: Path, errors: Path | None = None) -> ForkServerProcess:
    """Start `softprune ARGUMENTS` in ``folder``; the test uses the fixture `forking`.

    Standard output goes to ``out``, which may be a named pipe; standard error to ``errors``, otherwise there as well.
    """
    process = fork_server().Process(target=run_command, args=(str(folder), arguments, str(out), errors and str(errors)))
    process.start()
    return process


def named_pipe(path: Path) -> Path:
    """Make a pipe for ``begin``, which waits until the test opens it."""
    os.mkfifo(path)
    return path
