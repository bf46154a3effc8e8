"""The folder of a run: paths of its files, and how each file is written and read."""

import contextlib
import os
import platform
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from softprune.errors import CheckpointError, ConfigError, SoftpruneError
from softprune.io import read_bytes, unwritable, write_atomically
from softprune.lab.config.recipes import dump_config, read_config
from softprune.lab.config.settings import RunConfig
from softprune.lab.factories import is_factory_name
from softprune.lab.runs.result import Epoch, Result, Run, parse

_THEN = "resume the run"


class BusyError(CheckpointError):
    """Raised if another process is training the run."""


class RunFolder:
    """Paths of a run's files, and methods that write and read them."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.result = self.path / "result.json"
        self.checkpoints = self.path / "checkpoints"
        self.compact = self.path / "compact.safetensors"
        self.report = self.path / "report.html"
        self.dense = self.path / "dense"
        self.log = self.path / "run.log"
        self.lock_file = self.path / ".lock"

    @property
    def resume_command(self) -> str:
        command = ["softprune", "resume", str(self.path)]
        with contextlib.suppress(SoftpruneError, OSError):  # a damaged config.toml must not hide the original error
            config = self.read_config()
            # `resume` imports user code named in config.toml only if the command names it too.
            for key in ("model", "data", "method"):
                name = config.setting(f"{key}.name")
                command += [f"--{key}", name] if is_factory_name(name) else []
        return shlex.join(command)

    @classmethod
    def create(cls, path: Path | str, config: RunConfig) -> "RunFolder":
        """Create the folder of a new run and write its configuration."""
        folder = cls(path)
        folder.check_new()
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            with folder.config.open("xb") as file:
                file.write(dump_config(config).encode())
        except OSError as error:
            raise ConfigError(
                f"The folder of a new run must be writable. Got {path}: {error.strerror or error}. Choose another "
                "folder with --out."
            ) from error
        return folder

    def check_new(self) -> None:
        """Raise a ConfigError if the folder already contains a run."""
        if os.path.lexists(self.config):
            raise ConfigError(
                f"A new run must have its own folder. Got {self.path}, which already contains a run. Resume it "
                f"(`{self.resume_command}`), or choose another folder with --out."
            )

    @classmethod
    def open(cls, path: Path | str) -> "RunFolder":
        folder = cls(path)
        if not folder.config.is_file():
            raise ConfigError(f"A run must be a folder created by `softprune train`, with a config.toml. Got {path}.")
        return folder

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run for writing, and remove temporary files left by a killed process.

        The kernel releases the lock when the process ends, even if it is killed. Reading does not need the lock.
        """
        lock = FileLock(self.lock_file)
        try:
            lock.acquire(blocking=False)
            self.lock_file.write_text(f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8")
        except Timeout:
            holder = read_bytes(self.lock_file).decode(errors="replace").strip() or "another process"
            raise BusyError(
                f"Only one process may write a run at a time. Got {self.path}, which {holder} is training. Wait until "
                f"it ends, or stop it with SIGTERM (it saves first); then `{self.resume_command}`."
            ) from None
        except OSError as error:
            raise unwritable(self.lock_file, error, _THEN) from error
        try:
            for folder in (self.path, self.checkpoints):
                for leftover in folder.glob(".*.tmp"):
                    leftover.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def read_config(self) -> RunConfig:
        return read_config(self.config)

    def write_metrics(self, rows: Sequence[Epoch]) -> None:
        """Write metrics.jsonl atomically, with one line per finished epoch."""
        write_atomically(self.metrics, "".join(row.model_dump_json() + "\n" for row in rows).encode(), then=_THEN)

    def write_result(self, result: Result) -> None:
        write_atomically(self.result, result.to_json().encode(), then=_THEN)

    def read_result(self) -> Result:
        """Return the content of result.json; raise a ConfigError if the run is not finished."""
        if not self.result.exists():
            raise ConfigError(
                f"A finished run must have a result.json. Got none at {self.result}. If the run was stopped, "
                f"`{self.resume_command}` finishes it."
            )
        remedy = (
            "If a newer version of softprune wrote it, use that version. Otherwise delete the file and run "
            f"`{self.resume_command}`, which writes it again from the last checkpoint."
        )
        return parse(read_bytes(self.result), str(self.result), remedy)


def check_folder_name(name: Any, key: str = "name") -> str:
    """Return ``name`` if it is a valid folder name; otherwise raise a ConfigError that mentions ``key``."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ConfigError(f"{key} must be a valid folder name. Got {name!r}; use --out for a path.")
    return name


def load_run(run_dir: Path | str) -> Run:
    """Return the record of a finished run, for reports and comparisons."""
    folder = RunFolder(run_dir)
    return Run.model_construct(path=folder.path, **dict(folder.read_result()))
