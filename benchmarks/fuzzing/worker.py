"""Handle inputs in another process, with limits, and tell what came of each."""

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


class Worker:
    """A forked process that handles inputs one after another. A fork costs more than most inputs.

    It is replaced after a finding, and after ``most`` inputs. ``function`` takes the name of an input and an empty
    folder.
    """

    def __init__(self, function: Callable[[str, Path], str], most: int = 50) -> None:
        self._function, self._most, self._left = function, most, 0
        self._child, self._to, self._from = 0, -1, -1

    def handle(self, name: str, keep: Path | None = None) -> Outcome:
        """Handle the input ``name``; ``keep`` receives the folder of a finding."""
        base = Path(tempfile.mkdtemp(prefix="fuzz-"))
        work = base / "a" / "b"  # "../../x" stays inside
        work.mkdir(parents=True)
        if not self._left:
            self._start()
        self._left -= 1
        used = _progress(self._child)[0]
        os.write(self._to, json.dumps([name, str(work)]).encode() + b"\n")
        verdict, message = _wait(self._child, self._from, used)
        if message.endswith(b"\n"):
            outcome = Outcome(**json.loads(message))
        else:
            outcome = _judged(verdict, self._reap())
        if outcome.outcome in GOOD and outcome.megabytes * 2**20 > MEMORY:
            outcome.outcome = "memory"
        if outcome.outcome in GOOD and outcome.seconds > SECONDS:
            outcome.outcome = "hang"
        if outcome.outcome not in GOOD:
            self.close()
            if keep is not None:
                _keep(work, keep, outcome)
        shutil.rmtree(base, ignore_errors=True)
        return outcome

    def close(self) -> None:
        """End the process."""
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            self._reap()

    def _start(self) -> None:
        self.close()
        child_end, self._to = os.pipe()
        self._from, writer = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._to)
            os.close(self._from)
            _serve(self._function, child_end, writer)
        os.close(child_end)
        os.close(writer)
        self._left = self._most

    def _reap(self) -> int:
        """Wait for the process, which has ended or was killed, and return its status."""
        status = os.waitpid(self._child, 0)[1]
        os.close(self._to)
        os.close(self._from)
        self._child = self._left = 0
        return status


def handle(function: Callable[[Path], str], keep: Path | None = None) -> Outcome:
    """Call ``function`` with an empty folder in a forked process of its own."""
    worker = Worker(lambda _, work: function(work))
    try:
        return worker.handle("", keep)
    finally:
        worker.close()


def _keep(work: Path, keep: Path, outcome: Outcome) -> None:
    shutil.rmtree(keep, ignore_errors=True)
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(work, keep / "input", symlinks=True, ignore=_special)
    keep.mkdir(parents=True, exist_ok=True)
    (keep / "outcome.json").write_text(json.dumps(asdict(outcome), indent=1) + "\n")


def _special(folder: str, names: list[str]) -> list[str]:
    """Fifos cannot be copied."""
    paths = [Path(folder, name) for name in names]
    return [path.name for path in paths if not (path.is_symlink() or path.is_file() or path.is_dir())]


def _serve(function: Callable[[str, Path], str], reader: int, writer: int) -> None:
    """Handle inputs until the pipe ends; never returns."""
    with open(os.devnull, "r+b") as nothing:
        for descriptor in (0, 1, 2):
            os.dup2(nothing.fileno(), descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (_virtual() + _RAISED,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()  # a crash is reported by the parent
    requests = os.fdopen(reader, encoding="utf-8")
    while line := requests.readline():
        name, work = json.loads(line)
        os.chdir(work)
        _reset_peak()
        before, began = _status("VmRSS"), time.process_time()
        found = _call(function, name, Path(work))
        found.seconds = round(time.process_time() - began, 3)
        found.megabytes = round(max(_status("VmHWM") - before, 0) / 1024, 1)
        os.chdir("/")
        os.write(writer, json.dumps(asdict(found)).encode() + b"\n")
    os._exit(0)


def _call(function: Callable[[str, Path], str], name: str, work: Path) -> Outcome:
    from softprune.errors import SoftpruneError

    try:
        return Outcome(function(name, work))
    except SoftpruneError as error:
        return Outcome("memory" if ran_out(error) else "refused", str(error)[:200])
    except WrongResult as error:
        return Outcome("wrong result", str(error)[:2000])
    except BaseException:
        return Outcome("traceback", traceback.format_exc()[-3000:])


NO_MEMORY = re.compile("MemoryError|allocate memory|out of memory|Cannot allocate", re.IGNORECASE)


def ran_out(error: BaseException | None) -> bool:
    """Return whether an allocation failed, which the limit of this process did: a user's machine might have tried."""
    while error is not None:
        if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _wait(child: int, reader: int, used: float) -> tuple[str, bytes]:
    """Return the message of the child, or why it was killed. ``used`` is its processor time before the input."""
    message, idle, limit = b"", time.monotonic(), used + SECONDS
    while not message.endswith(b"\n"):
        ready, _, _ = select.select([reader], [], [], 0.25)
        if ready:
            piece = os.read(reader, 65536)
            if not piece:
                break
            message += piece
            continue
        seconds, state = _progress(child)
        # A process that waits for a busy processor (R) is not one that hangs.
        if seconds > used or state == "R":
            used, idle = seconds, time.monotonic()
        if used > limit or time.monotonic() - idle > SECONDS:
            os.kill(child, signal.SIGKILL)
            return f"{SECONDS + used - limit:.1f} s of processor time, state {state}", b""
    return "", message


def _judged(verdict: str, status: int) -> Outcome:
    """Return the outcome of an input whose process ended or was killed."""
    if verdict:
        return Outcome("hang", verdict)
    if os.WIFSIGNALED(status):
        return Outcome("crash", signal.Signals(os.WTERMSIG(status)).name)
    return Outcome("crash", f"exit status {status} without an outcome")


def _progress(process: int) -> tuple[float, str]:
    """Return the processor time and the state of a process."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, "Z"
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0]


def _reset_peak() -> None:
    """Let the peak of the memory count from now; without the permission it counts from the start."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _status(field: str) -> int:
    """Return kilobytes of this process's memory, by the name of the kernel."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def _virtual() -> int:
    return _status("VmSize") * 1024
