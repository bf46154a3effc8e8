"""Handle one input in a process of its own, with limits, and tell what came of it."""

import contextlib
import faulthandler
import json
import os
import re
import resource
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

SECONDS = 5.0
"""Processor time of an input, and time that it may wait without using any."""
MEMORY = 2**30
"""Bytes above what the process has before it handles its input."""
_RAISED = 3 * 2**30
"""Bytes of address space above that, to protect the machine; a MemoryError is a finding as well."""

GOOD = ("same", "accepted", "refused")
"""Outcomes that are as documented: the result of the undamaged input, another valid one, or a SoftpruneError."""


class WrongResult(Exception):
    """The input was accepted with a result that it must not have."""


@dataclass
class Outcome:
    """What came of an input."""

    outcome: str
    detail: str = ""
    seconds: float = 0.0
    """Processor time."""
    megabytes: float = 0.0
    """Memory above that of the process before the input."""


def handle(function: Callable[[Path], str], keep: Path | None = None) -> Outcome:
    """Call ``function`` with an empty folder in a forked process; ``keep`` receives the folder of a finding."""
    base = Path(tempfile.mkdtemp(prefix="fuzz-"))
    work = base / "a" / "b"  # "../../x" stays inside
    work.mkdir(parents=True)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(function, work, writer)
    os.close(writer)
    verdict, message = _wait(child, reader)
    _, status, usage = os.wait4(child, 0)
    os.close(reader)
    outcome = _judged(verdict, message, status)
    outcome.seconds = round(usage.ru_utime + usage.ru_stime, 3)
    outcome.megabytes = round(max(usage.ru_maxrss / 1024 - outcome.megabytes, 0), 1)
    if outcome.outcome in GOOD and outcome.megabytes * 2**20 > MEMORY:
        outcome = Outcome("memory", outcome.detail, outcome.seconds, outcome.megabytes)
    if outcome.outcome not in GOOD and keep is not None:
        shutil.rmtree(keep, ignore_errors=True)
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(work, keep / "input", symlinks=True, ignore=_special)
        keep.mkdir(parents=True, exist_ok=True)
        (keep / "outcome.json").write_text(json.dumps(asdict(outcome), indent=1) + "\n")
    shutil.rmtree(base, ignore_errors=True)
    return outcome


def _special(folder: str, names: list[str]) -> list[str]:
    """Fifos cannot be copied."""
    paths = [Path(folder, name) for name in names]
    return [path.name for path in paths if not (path.is_symlink() or path.is_file() or path.is_dir())]


def _child(function: Callable[[Path], str], work: Path, writer: int) -> None:
    """Handle the input and write the outcome; never returns."""
    from softprune.errors import SoftpruneError

    with open(os.devnull, "r+b") as nothing:
        for descriptor in (0, 1, 2):
            os.dup2(nothing.fileno(), descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (_virtual() + _RAISED,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()  # a crash is reported by the parent
    os.chdir(work)
    # A fork shares the pages of mapped files only when it uses them: the parent's memory would be no measure.
    before = _resident() / 2**20
    try:
        found = Outcome(function(work))
    except SoftpruneError as error:
        found = Outcome("memory" if ran_out(error) else "refused", str(error)[:200])
    except WrongResult as error:
        found = Outcome("wrong result", str(error)[:2000])
    except BaseException:
        found = Outcome("traceback", traceback.format_exc()[-3000:])
    found.megabytes = before
    with contextlib.suppress(OSError):
        os.write(writer, json.dumps(asdict(found)).encode()[:60_000])
    os._exit(0)


NO_MEMORY = re.compile("MemoryError|allocate memory|out of memory|Cannot allocate", re.IGNORECASE)


def ran_out(error: BaseException | None) -> bool:
    """Return whether an allocation failed, which the limit of this process did: a user's machine might have tried."""
    while error is not None:
        if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _wait(child: int, reader: int) -> tuple[str, bytes]:
    """Return the message of the child, or why it was killed."""
    message, idle, used = b"", time.monotonic(), 0.0
    while True:
        ready, _, _ = select.select([reader], [], [], 0.25)
        if ready:
            piece = os.read(reader, 65536)
            if not piece:
                return "", message
            message += piece
            continue
        seconds, state = _progress(child)
        # A process that waits for a busy processor (R) is not one that hangs.
        if seconds > used or state == "R":
            used, idle = seconds, time.monotonic()
        if used > SECONDS or time.monotonic() - idle > SECONDS:
            os.kill(child, signal.SIGKILL)
            return f"{used:.1f} s of processor time, state {state}", message


def _judged(verdict: str, message: bytes, status: int) -> Outcome:
    if verdict:
        return Outcome("hang", verdict)
    if os.WIFSIGNALED(status):
        return Outcome("crash", signal.Signals(os.WTERMSIG(status)).name)
    try:
        return Outcome(**json.loads(message))
    except ValueError:
        return Outcome("crash", f"exit status {status} without an outcome")


def _progress(process: int) -> tuple[float, str]:
    """Return the processor time and the state of a process."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, "Z"
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0]


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
