"""The folder of a run: its files, and how each is written and read."""

import contextlib
import os
import platform
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from softprune.errors import CheckpointError, ConfigError, FileFormatError, SoftpruneError
from softprune.io import create_file, read_bytes, unwritable, write_atomically
from softprune.lab.config.recipes import dump_config, read_config
from softprune.lab.config.settings import RunConfig
from softprune.lab.factories import is_factory_name
from softprune.lab.runs.result import Epoch, Result, Session, numbered_lines, parse, parse_result, to_line
from softprune.log import get_logger

logger = get_logger(__name__)


class RunFolder:
    """The paths of a run, and how each file in it is written and read."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.sessions = self.path / "sessions.jsonl"
        self.result = self.path / "result.json"
        self.checkpoints = self.path / "checkpoints"
        self.compact = self.path / "compact.safetensors"
        self.bench = self.path / "bench.json"
        self.report = self.path / "report.html"
        self.dense = self.path / "dense"
        self.log = self.path / "run.log"
        self.tensorboard = self.path / "tensorboard"
        self.lock_file = self.path / ".lock"

    @property
    def whole(self) -> "RunFolder":
        """The run that is started and resumed: for a baseline, the run that contains it."""
        around = RunFolder(self.path.parent)
        return around if self.path == around.dense and around.config.is_file() else self

    @property
    def resume_command(self) -> str:
        run, own = self.whole, list[str]()
        with contextlib.suppress(SoftpruneError, OSError):  # a damaged config.toml must not hide the first error
            own = own_code(run.read_config())
        return shlex.join(["softprune", "resume", str(run.path), *own])

    @property
    def again_command(self) -> str:
        """The command that starts another run with the same settings."""
        return f"softprune train {shlex.quote(str(self.whole.config))}"

    @classmethod
    def create(cls, path: Path | str, config: RunConfig) -> "RunFolder":
        """Make the folder of a new run and write its configuration."""
        cls.check_new(path)
        folder = cls(path)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            create_file(folder.config, dump_config(config).encode())
        except OSError as error:
            raise ConfigError(
                f"A new run must have a folder that can be made and written to. Got {path}: {error.strerror or error}. "
                "Name another folder with --out."
            ) from error
        return folder

    @classmethod
    def check_new(cls, path: Path | str) -> None:
        """Raise a ConfigError for a URL, and for a folder that holds a run already or lies below a file."""
        folder = cls(check_not_url(path))
        if os.path.lexists(folder.config):
            raise ConfigError(
                f"A new run must have its own folder. Got {path}, which holds a run already. Resume it "
                f"(`{folder.resume_command}`), or name another folder with --out."
            )
        parent = next(each for each in (folder.path, *folder.path.absolute().parents) if os.path.lexists(each))
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise ConfigError(
                f"A new run must have a folder that can be made and written to. Got {path}: {parent} is not a folder "
                "that can be written to. Name another folder with --out."
            )

    @classmethod
    def open(cls, path: Path | str) -> "RunFolder":
        folder = cls(path)
        if not folder.config.is_file():
            raise ConfigError(
                f"A run must be a folder that `softprune train` made, with a config.toml in it. Got {path}."
            )
        return folder

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only process that writes the run, and remove the temporary files of a killed one.

        The kernel releases the lock when the process ends, however it ends. Reading needs no lock.
        """
        lock = FileLock(self.lock_file)
        try:
            lock.acquire(blocking=False)
            self.lock_file.write_text(f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8")
        except Timeout:
            holder = self.lock_file.read_text(encoding="utf-8", errors="replace").strip() or "another process"
            raise CheckpointError(
                f"Only one process may write a run at a time. Got {self.path}, which {holder} is training. Wait until "
                f"it ends, or stop it with SIGTERM (it saves first); then `{self.resume_command}`."
            ) from None
        except OSError as error:
            raise unwritable(self.lock_file, error, self._then) from error
        try:
            for folder in (self.path, self.checkpoints):
                for leftover in folder.glob(".*.tmp"):
                    leftover.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def is_locked(self) -> bool:
        """Return whether a process writes the run. Changes nothing."""
        try:
            import fcntl  # not on Windows

            with open(os.open(self.lock_file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    return True
        except (ImportError, OSError):
            return False
        return False

    @property
    def _then(self) -> str:
        return f"run `{self.resume_command}`"

    def read_config(self) -> RunConfig:
        return read_config(self.config)

    def write_history(self, rows: Sequence[Epoch]) -> None:
        """Make metrics.jsonl hold exactly ``rows``: the epochs of the checkpoint that a run resumes from."""
        write_atomically(self.metrics, "".join(map(to_line, rows)).encode(), then=self._then)

    def append_metrics(self, row: Epoch) -> None:
        """Add the line of one epoch. On resume :meth:`write_history` removes a line that a crash cut off."""
        try:
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.write(to_line(row))
        except OSError as error:
            raise unwritable(self.metrics, error, self._then) from error

    def add_session(self, session: Session) -> None:
        """Record a process that trains the run, before it does anything."""
        before = read_bytes(self.sessions) if self.sessions.is_file() else b""
        if before and not before.endswith(b"\n"):
            before += b"\n"  # an incomplete line stays alone
        write_atomically(self.sessions, before + to_line(session).encode(), then=self._then)

    def read_sessions(self) -> list[Session]:
        """Return the processes that trained the run, in order, without lines that are damaged."""
        if not self.sessions.is_file():
            return []
        sessions = []
        for number, line in numbered_lines(self.sessions):
            try:
                sessions.append(parse(Session, line, f"{self.sessions}, line {number}", "The line is left out."))
            except FileFormatError as error:
                logger.warning("softprune: %s", error)
        return sessions

    def write_result(self, result: Result) -> None:
        write_atomically(self.result, result.to_json().encode(), then=self._then)

    def read_result(self) -> Result:
        """Return the content of result.json, or raise an error that says why there is none."""
        if not self.result.is_file():
            raise ConfigError(
                f"A finished run must have a result.json. Got none at {self.result}. If the run was stopped, "
                f"`{self.resume_command}` finishes it."
            )
        content = read_bytes(self.result)
        remedy = f"Delete it, and `{self.resume_command}` writes it again from the last checkpoint."
        return parse_result(content, str(self.result), remedy)


def own_names(config: RunConfig) -> dict[str, str]:
    """Return what names code of the user's own, by section."""
    names = {"model": config.model.name, "data": config.data.name, "method": config.method.name}
    return {key: name for key, name in names.items() if is_factory_name(name)}


def own_code(config: RunConfig) -> list[str]:
    """Return the options that name the user's own code of a run, for commands that import nothing on its word."""
    return [part for key, name in own_names(config).items() for part in (f"--{key}", name)]


def check_not_url(path: Path | str) -> Path:
    """Return ``path``. Raise a ConfigError for a URL, which would otherwise become a folder of that name."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise ConfigError(
            f"The folder of runs must be on a disk, which may be shared storage that all machines mount. Got the URL "
            f"{path}; mount it, and name the folder with --out."
        )
    return Path(path)


def check_folder_name(name: Any, key: str = "name") -> str:
    """Return ``name`` if it can be the name of a folder, or raise a ConfigError that names ``key``."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ConfigError(f"{key} must be usable as the name of a folder. Got {name!r}; use --out for the path.")
    return name
