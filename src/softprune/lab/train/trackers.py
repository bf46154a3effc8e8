"""Experiment trackers: the numbers of every epoch in TensorBoard, Weights & Biases or MLflow."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from softprune.errors import first_line
from softprune.factories import import_optional
from softprune.io import write_atomically
from softprune.lab.config.recipes import config_to_dict, flat_settings
from softprune.lab.config.settings import RunConfig, TrackerName
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.result import Epoch
from softprune.log import get_logger

logger = get_logger(__name__)

_PROJECT = "softprune"


class TensorBoard:
    """Writes event files into the folder ``tensorboard`` of a run; every start and resume adds one."""

    def __init__(self, folder: Path, config: RunConfig, step: int) -> None:
        writer = _module("tensorboard").SummaryWriter
        # Events after the checkpoint that the run resumes from are purged: those epochs are trained again.
        self._writer = writer(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Logs to Weights & Biases, project $WANDB_PROJECT or "softprune". A resumed run continues its W&B run."""

    def __init__(self, folder: Path, config: RunConfig, step: int) -> None:
        known = _read_ids(folder).get("wandb")
        self._run = _module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=config.name or folder.name,
            dir=str(folder),
            config=config_to_dict(config),
            id=known,
            resume="allow" if known else None,
        )
        _write_id(folder, "wandb", self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)  # W&B ignores a step that it has: epochs trained again

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Logs to MLflow, experiment $MLFLOW_EXPERIMENT_NAME or "softprune". A resumed run continues its MLflow run."""

    def __init__(self, folder: Path, config: RunConfig, step: int) -> None:
        mlflow = _module("mlflow")
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient()
        known = _read_ids(folder).get("mlflow")
        if known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            logged = self._client.get_metric_history(known, "train_loss")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            self._id = self._client.create_run(number, run_name=config.name or folder.name).info.run_id
            for key, value in flat_settings(config_to_dict(config)):
                self._client.log_param(self._id, key, value)
            _write_id(folder, "mlflow", self._id)
            logged = []
        self._last = max((metric.step for metric in logged), default=-1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step <= self._last:
            return  # MLflow keeps every value of a step: epochs trained again would be there twice
        now = int(1000 * time.time())
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)


Tracker = TensorBoard | WandB | MLflow
_TRACKERS: dict[TrackerName, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
_MODULES: dict[TrackerName, str] = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_PACKAGES: dict[TrackerName, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}


class Trackers:
    """The trackers of a run that starts or resumes at ``step``. One that fails is left out, and training continues."""

    def __init__(self, folder: Path, config: RunConfig, step: int = 0) -> None:
        self._open: dict[str, Tracker] = {}
        for name in config.records.trackers:
            with self._guard(name):
                self._open[name] = _TRACKERS[name](folder, config, step)

    def log_epoch(self, row: Epoch) -> None:
        values = {
            key: float(value)
            for key, value in row
            if isinstance(value, int | float) and not isinstance(value, bool) and key not in ("epoch", "step")
        }
        for name, tracker in list(self._open.items()):
            with self._guard(name):
                tracker.log(row.step, values)

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            with self._guard(name):
                tracker.close()
        self._open.clear()

    @contextmanager
    def _guard(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a server that fails, or a package missing here, must not end a training
            self._open.pop(name, None)
            logger.warning(
                "softprune: the tracker %s failed and is left out (%s: %s); metrics.jsonl has all numbers",
                name,
                type(error).__name__,
                first_line(error),
            )


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raise a ConfigError if the package of a tracker is not installed."""
    for name in names:
        _module(name, otherwise=f", or remove {name!r} from records.trackers")


def _module(name: TrackerName, otherwise: str = "") -> Any:
    return import_optional(_MODULES[name], f"The tracker {name}", _PACKAGES[name], otherwise=otherwise)


def _read_ids(folder: Path) -> dict[str, str]:
    """Return the ids that trackers gave to the run when it was started."""
    try:
        return {str(name): str(value) for name, value in json.loads((folder / "trackers.json").read_bytes()).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _write_id(folder: Path, name: str, identity: str) -> None:
    ids = _read_ids(folder) | {name: identity}
    then = f"run `{RunFolder(folder).resume_command}`"
    write_atomically(folder / "trackers.json", (json.dumps(ids, indent=1) + "\n").encode(), then=then)
