"""The run's folder: its files, among them metrics.jsonl (a line per epoch), sessions.jsonl (per process)."""

import contextlib
import json
import logging
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from softprune.config.recipes import dump_config, read_config
from softprune.config.settings import RunConfig
from softprune.errors import CheckpointError, ConfigError, FileFormatError
from softprune.io import create_file, unwritable, write_atomically
from softprune.runs.lock import hold_lock
from softprune.runs.result import RESULT_FORMAT

logger = logging.getLogger(__name__)


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
        self.report = self.path / "report.html"
        self.dense = self.path / "dense"
        self.events = self.path / "tensorboard"
        self.lock_file = self.path / ".lock"

    @property
    def resume_command(self) -> str:
        """What to type to go on with the run."""
        return f"softprune resume {shlex.quote(str(self.path))}"

    @property
    def again_command(self) -> str:
        """What to type to start another run with its settings."""
        return f"softprune train {shlex.quote(str(self.config))}"

    @classmethod
    def create(cls, path: Path | str, config: RunConfig) -> "RunFolder":
        """Make the folder of a new run and write its configuration; refuses a folder that already holds
        one, and leaves nothing behind where that cannot be done."""
        folder = cls(path)
        missing = [each for each in (folder.path, *folder.path.parents) if not os.path.lexists(each)]
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            create_file(folder.config, dump_config(config).encode())
        except OSError as error:
            for each in missing:
                with contextlib.suppress(OSError):
                    each.rmdir()
            raise _no_new_run(folder, error) from error
        return folder

    @classmethod
    def open(cls, path: Path | str) -> "RunFolder":
        """The folder of an existing run."""
        folder = cls(path)
        if not folder.config.is_file():
            raise ConfigError(
                f"A run must be the folder that `softprune train` made, with a config.toml in it. Got {path}."
            )
        return folder

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only process that writes this run; reading it needs no lock."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(hold_lock(self.lock_file))
            except BlockingIOError as error:
                raise CheckpointError(
                    f"A run must be worked on by one process at a time. Got {self.path}, which {error.strerror} is "
                    "working on. Wait until it ends, or stop it with SIGTERM (it saves first); then "
                    f"`{self.resume_command}` goes on."
                ) from None
            except OSError as error:
                raise unwritable(self.lock_file, error) from error
            yield

    def read_config(self) -> RunConfig:
        """The run's resolved configuration."""
        return read_config(self.config)

    def write_history(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make metrics.jsonl hold exactly ``rows``: what a resumed run's checkpoint remembers."""
        write_atomically(self.metrics, "".join(map(_line, rows)).encode())

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add one epoch's line. A line torn by a crash is mended by :meth:`write_history` on resume."""
        try:
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.write(_line(row))
        except OSError as error:
            raise unwritable(self.metrics, error) from error

    def add_session(self, session: Mapping[str, Any]) -> None:
        """Note a process that works on the run, before it does anything."""
        before = self.sessions.read_bytes() if self.sessions.is_file() else b""
        if before and not before.endswith(b"\n"):
            before += b"\n"  # a torn line stays alone
        write_atomically(self.sessions, before + _line(session).encode())

    def read_sessions(self) -> list[dict[str, Any]]:
        """The processes that worked on the run, in order; those of a run from before they were noted are missing, and
        so are those whose line is torn."""
        if not self.sessions.is_file():
            return []
        sessions = []
        for number, line in enumerate(self.sessions.read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                session = json.loads(line)
            except ValueError:
                session = None
            if isinstance(session, dict):
                sessions.append(session)
            else:
                logger.warning("%s: line %d is torn and is left out", self.sessions, number)
        return sessions

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json."""
        write_atomically(self.result, (json.dumps(finite(result), indent=1) + "\n").encode())

    def read_result(self) -> dict[str, Any]:
        """result.json, or an error that says why there is none to read."""
        return read_result(self.result)


def _no_new_run(folder: RunFolder, error: OSError) -> ConfigError:
    """Why no run can begin in ``folder``."""
    if os.path.lexists(folder.config):
        return ConfigError(
            f"A new run must have a folder of its own. Got {folder.path}, which holds a run already. "
            f"Go on with it (`{folder.resume_command}`), or name another with --out."
        )
    file = next(
        (
            each
            for each in (folder.path, *folder.path.parents)
            if os.path.lexists(each) and not os.path.isdir(each)
        ),
        None,
    )
    reason = f"{file} is not a folder" if file is not None else error.strerror or str(error)
    return ConfigError(
        f"A new run must have a folder that can be made and written to. Got {folder.path}: {reason}. "
        "Nothing was written; name another folder with --out."
    )


def check_folder_name(name: Any, key: str = "name") -> str:
    """``name`` if a folder can be called so, or a ConfigError that names ``key``."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ConfigError(f"{key} must be usable as a folder's name. Got {name!r}; use --out for the folder.")
    return name


def read_result(path: Path) -> dict[str, Any]:
    """A result.json of this version's format."""
    if not path.is_file():
        raise ConfigError(
            f"A finished run must have a result.json. Got none at {path}. "
            f"If the run was stopped, `{RunFolder(path.parent).resume_command}` finishes it."
        )
    again = (
        f"Delete it, and `{RunFolder(path.parent).resume_command}` writes it anew from the last checkpoint."
    )
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileFormatError(f"{path} must be readable. Got {error.strerror}; make it so.") from error
    except ValueError as error:
        raise FileFormatError(f"{path} must be JSON. Got an error reading it: {error}. {again}") from error
    got = result.get("format") if isinstance(result, dict) else type(result).__name__
    if got == RESULT_FORMAT:
        return result
    if isinstance(got, int) and got > RESULT_FORMAT:
        again = "A newer softprune wrote it: read it with that one."
    raise FileFormatError(f"{path} must have format {RESULT_FORMAT}. Got {got!r}. {again}")


def finite(value: Any) -> Any:
    """``value`` with nan and infinities as None, which is what JSON has for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(finite(row)) + "\n"
