"""Evaluation of a network: accuracy on a whole test set, the latency of a forward, and networks of checkpoints."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softprune.costs import Cost, cost
from softprune.cut import load, read_origin, save
from softprune.devices import broadcast_from_rank0_, capture_graph, has_fast_bf16, time_ms
from softprune.errors import ConfigError
from softprune.lab.config.settings import DataConfig, ModelConfig, RunConfig
from softprune.lab.data import DATASETS, ArrayDataset, BatchLoader, DataBundle, LoadedDataset, normalised
from softprune.lab.runs.checkpoint import newest_path, read_newest
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.networks import build_network, locate_compact, named_config, origin_of
from softprune.lab.train.stage import open_data, restored_stage, set_arithmetic
from softprune.lab.world import World, join_world
from softprune.log import get_logger
from softprune.models import REGISTRY
from softprune.module_state import evaluating

logger = get_logger(__name__)

_CAPTURED_FROM = 8
"""Batches from which a CUDA graph pays off: capturing one takes as long as a few forwards."""


@dataclass(frozen=True)
class EvalTotals:
    """Accuracy and loss of a network on a test set."""

    images: int
    loss: float
    """Mean cross-entropy."""
    top1: float
    """Percentage of the images whose class has the largest output."""
    top5: float | None
    """Percentage of the images whose class is among the five largest outputs; None for five outputs or fewer."""


class Evaluator:
    """Evaluates networks on the images of a run. With several processes each evaluates its share."""

    def __init__(self, data: DataBundle, config: RunConfig, world: World) -> None:
        self._data, self._world = data, world
        self._batch_size, self._workers = config.data.eval_batch_size, config.data.workers
        self._bf16 = config.train.precision == "bf16" and has_fast_bf16(world.device)
        self._layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
        self._captures = world.device.type == "cuda" and config.train.mode != "eager"
        self._loaders: dict[int, BatchLoader] = {}

    @torch.no_grad()
    def __call__(self, network: nn.Module, *, on_test: bool = False) -> EvalTotals:
        """Return accuracy and loss of ``network``. All processes must call this together.

        The images are the held-out ones if there are any and ``on_test`` is False, else the test images.
        """
        data = self._data.test if on_test or self._data.holdout is None else self._data.holdout
        device = self._world.device
        own = torch.arange(self._world.rank, len(data), self._world.size)
        count = min(self._batch_size, len(own)) or 1
        missing = -len(own) % count
        # The last batch is padded with the first image, which is not counted there.
        rows = F.pad(own, (0, missing)).view(-1, count)
        counted = F.pad(torch.ones(len(own)), (0, missing)).view(-1, count).to(device, torch.float64)
        totals = torch.zeros(4, dtype=torch.float64, device=device)
        # Buffers of fixed address, which a CUDA graph reads.
        buffers = (
            torch.zeros(count, *data.shape, device=device).contiguous(memory_format=self._layout),
            torch.zeros(count, dtype=torch.int64, device=device),
            torch.zeros(count, dtype=torch.float64, device=device),
        )

        def add() -> None:
            images, labels, weights = buffers
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._bf16, cache_enabled=False):
                logits = network(images)
            losses = F.cross_entropy(logits.float(), labels, reduction="none").double()
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            columns = torch.stack([torch.ones_like(losses), losses, best[:, 0].double(), best.any(1).double()], dim=1)
            totals.add_((weights[:, None] * columns).sum(0))

        run: Callable[[], None] = add
        if self._world.size > 1:
            # Each process has its own running statistics; those of rank 0 are saved.
            broadcast_from_rank0_(*network.buffers())
        with evaluating(network):
            for number, (batch, weights) in enumerate(zip(self._batches(data, rows), counted, strict=True)):
                for buffer, content in zip(buffers, (*batch, weights), strict=True):
                    buffer.copy_(content)
                if number == 0 and self._captures and len(rows) >= _CAPTURED_FROM:
                    try:
                        run = capture_graph(add, device, trial=add, undo=totals.zero_).replay
                    except Exception as error:
                        logger.warning("softprune: evaluation cannot run as a CUDA graph, and runs eagerly: %s", error)
                        totals.zero_()
                run()
        images_seen, loss, first, five = self._world.sum_(totals).tolist()
        top5 = 100 * five / images_seen if self._data.num_classes > 5 else None
        return EvalTotals(int(images_seen), loss / images_seen, 100 * first / images_seen, top5)

    def _batches(self, data: ArrayDataset | LoadedDataset, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        if isinstance(data, ArrayDataset):
            for row in rows.to(self._world.device):
                yield data.batch(row)
            return
        if id(data) not in self._loaders:  # worker processes persist
            self._loaders[id(data)] = BatchLoader(data, workers=self._workers, device=self._world.device)
        mean, std = data.mean.to(self._world.device), data.std.to(self._world.device)
        for pixels, labels in self._loaders[id(data)].batches(rows, torch.zeros_like(rows)):
            yield normalised(pixels, mean, std), labels


@torch.no_grad()
def latency_ms(network: nn.Module, batch: Tensor) -> float:
    """Return the time of a forward in eval mode, in milliseconds, after at most about two seconds of timing.

    On CUDA a captured forward is replayed, so that the time is the GPU's own: small networks otherwise take as long as
    Python needs to launch them.
    """

    def forward() -> None:
        network(batch)

    call: Callable[[], object] = forward
    with evaluating(network):
        if batch.device.type == "cuda":
            try:
                call = capture_graph(forward, batch.device, trial=forward, undo=lambda: None).replay
            except RuntimeError as error:
                logger.info("the forward is timed from Python, since it cannot be captured: %s", error)
        return time_ms(call, batch.device, rounds=30, limit=1.5)


# --- networks of checkpoints -----------------------------------------------------------------------------------------


def evaluate_folder(
    path: Path,
    *,
    device: str = "auto",
    data_dir: str | None = None,
    model: str = "",
    data: str = "",
    method: str = "",
    shape: tuple[int, ...] = (),
) -> dict[str, EvalTotals]:
    """Return the test accuracy of a run's network, as trained ("masked") and "compact", or of a compact network alone.

    A compact network inside its run takes the model and the data from the run's configuration. Elsewhere they come
    from its record of its origin, or from ``model`` and ``data``; so does the ``shape`` of its images.
    """
    run, compact = locate_compact(path)
    is_run = run is not None and run.path == path
    if not is_run and not compact.is_file():
        raise ConfigError(
            "`softprune evaluate` takes the folder of a run (with config.toml) or the .safetensors file of a compact "
            f"network. Got {path}, which is neither."
        )
    if run is None:
        config, shape = _config_outside(compact, model, data, shape)
    else:
        needs = ("model", "data", "method") if is_run else ("model", "data")
        config = named_config(run, model, data, method, needs=needs)
    world = join_world(device)
    set_arithmetic(config, world.device)
    images = open_data(config, world.device, data_dir, in_memory=False)
    if shape and shape != images.input_shape:
        needed, found_shape = ("x".join(map(str, each)) for each in (shape, images.input_shape))
        raise ConfigError(
            f"A network must be evaluated with images of its own shape, {needed}. Got {found_shape} from "
            f"{config.data.name}; if that is right, pass it as --input."
        )
    evaluator = Evaluator(images, config, world)
    found = {}
    if run is not None and is_run and newest_path(run.checkpoints) is not None:
        stage = restored_stage(config, images, world, read_newest(run.checkpoints)[1]).stage
        found["masked" if stage.pruner is not None else "trained"] = evaluator(stage.network, on_test=True)
    if compact.is_file():
        dense = build_network(config.model.name, images.num_classes, config.model.options).to(world.device)
        found["compact"] = evaluator(load(compact, dense).float(), on_test=True)
    if not found:
        raise ConfigError(f"A run must have a checkpoint to evaluate. Got none in {path}; train it first.")
    return found


def _config_outside(compact: Path, model: str, data: str, shape: tuple[int, ...]) -> tuple[RunConfig, tuple[int, ...]]:
    """Return the configuration for a compact network outside its run, and the shape of its images, if it is known."""
    origin = read_origin(compact)
    # A module:factory is code of whoever wrote the file, and runs only when the user names it.
    if origin is not None and origin.model in REGISTRY:
        model, data = model or origin.model, data or origin.data
    if not (model and data):
        raise ConfigError(
            "A compact network outside its run needs --model and --data, unless it records that it comes from one of "
            f"softprune's own networks. Got {model or 'no'} model and {data or 'no'} data."
        )
    shape = shape or (() if origin is None else origin.input_shape)
    if data in DATASETS and DATASETS[data].input_shape is None and not shape:
        raise ConfigError(
            f"A compact network that does not record the shape of its images needs --input, such as --input 3x224x224. "
            f"Got {compact} with images of any size ({data})."
        )
    images = DataConfig(name=data, image_size=shape[-1]) if shape else DataConfig(name=data)
    return RunConfig(model=ModelConfig(name=model), data=images), shape


def refuse_dense(config: RunConfig, run: Path) -> None:
    """Raise a ConfigError for a run without pruning, which has no compact network."""
    if config.method.name == "dense":
        raise ConfigError(
            f"A compact network is cut from a pruned one. Got the dense run {run}; pass the folder of a run with a "
            'pruning method (method.name other than "dense").'
        )


def compact_run(
    run: Path,
    out: Path | None = None,
    *,
    device: str = "auto",
    data_dir: str | None = None,
    round_to: int | None = None,
    gathers: bool = True,
    model: str = "",
    data: str = "",
    method: str = "",
) -> tuple[Path, Cost, Cost]:
    """Write the compact network of a run's newest checkpoint; return its path, the dense cost and its own cost.

    For a finished run it equals the network that the run wrote, if the device is the same. `round_to` and `gathers`
    are those of Pruner.compact; `model`, `data` and `method` those of named_config.
    """
    folder = RunFolder.open(run)
    config = named_config(folder, model, data, method)
    refuse_dense(config, run)
    world = join_world(device)
    set_arithmetic(config, world.device)
    images = open_data(config, world.device, data_dir, in_memory=False)
    start = restored_stage(config, images, world, read_newest(folder.checkpoints)[1])
    compact, pruner = start.stage.network, start.stage.pruner
    if (round_to is not None or not gathers) and (out is None or pruner is None):
        raise ConfigError(
            "--round-to and --no-gathers cut a network in another way than its run did, which needs --out and a run "
            f"that has not begun its fine-tuning. Got {'no --out' if out is None else 'a run in its fine-tuning'}."
        )
    with evaluating(start.stage.network):
        if pruner is not None:
            compact = pruner.compact(round_to=round_to, gathers=gathers)
        target = save(compact, out or folder.compact, origin=origin_of(config, images))
    return target, cost(start.dense, images.example(1)), cost(compact, images.example(1, world.device))
