"""The end of a run: the last cut, the compact network, the table, and result.json."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal

import torch
from safetensors.torch import save as to_safetensors
from torch import nn

from softprune.costs import Cost
from softprune.cut import save
from softprune.errors import CheckpointError
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.networks import inputs_of, origin_of
from softprune.lab.runs.result import Module, Moment, Result, Totals, Variant, best_epoch
from softprune.lab.train.evaluate import latency_ms
from softprune.lab.train.trainer import Trainer
from softprune.log import get_logger

logger = get_logger(__name__)

_LATENCY_BATCH = 64


def finish(trainer: Trainer) -> Result:
    """Cut the trained network, measure dense, masked and compact, write everything, and return the result.

    All processes take part in the measurements; rank 0 writes.
    """
    trainer.listener.on_phase("measuring accuracy, cost and latency")
    costs = trainer.costs
    if trainer.stage.pruner is None and trainer.history.pruned is None:
        with trainer.stage.eval_weights() as network:
            tested = trainer.evaluator(network, on_test=True)
            table = [_row(trainer, "dense", network, (tested.top1, tested.top5), costs.dense)]
        return _write(trainer, table, costs.dense_cost, costs.dense, network)
    dense, accuracy = costs.dense_network.to(trainer.world.device), trainer.history.given
    baseline = RunFolder(trainer.folder.dense)
    if baseline.result.is_file():
        row = baseline.read_result().table[0]
        accuracy = (row.top1, row.top5)
    table = [_row(trainer, "dense", dense, accuracy, costs.dense)]
    with _compact(trainer) as compact:
        assert trainer.history.pruned is not None
        pruned = trainer.history.pruned
        masks = {site.name: torch.tensor(site.keep, dtype=torch.bool) for site in pruned.sites}
        counted, totals = costs.of_network(compact, masks)
        masked_network = trainer.stage.network if trainer.stage.pruner is not None else None
        size = table[0].file_bytes  # the masks are not saved
        table.append(_row(trainer, "masked", masked_network, (pruned.top1, pruned.top5), costs.dense, size))
        tested = trainer.evaluator(compact, on_test=True)
        table.append(_row(trainer, "compact", compact, (tested.top1, tested.top5), totals))
        if trainer.world.is_writer:
            save(compact, trainer.folder.compact, origin=origin_of(trainer.config, trainer.data))
            exports = set(trainer.folder.path.glob("compact.*")) - {trainer.folder.compact}
            for path in sorted(exports):
                logger.warning("softprune: %s is an export of an earlier cut; export it again", path)
    return _write(trainer, table, counted, totals, compact)


@contextmanager
def _compact(trainer: Trainer) -> Iterator[nn.Module]:
    """Yield the compact network: cut now or, after fine-tuning, with the weights that were evaluated."""
    if trainer.stage.pruner is not None:
        yield trainer.finish_pruning()
    else:
        with trainer.stage.eval_weights() as network:
            yield network


def _row(
    trainer: Trainer,
    name: Literal["dense", "masked", "compact"],
    network: nn.Module | None,
    accuracy: tuple[float | None, float | None],
    totals: Totals,
    file_bytes: int | None = None,
) -> Variant:
    batch = trainer.data.example(_LATENCY_BATCH, trainer.world.device)
    return Variant(
        name=name,
        top1=accuracy[0],
        top5=accuracy[1],
        params=totals.params,
        macs=totals.macs,
        file_bytes=_file_bytes(network) if file_bytes is None and network is not None else file_bytes,
        latency_ms=None if network is None else latency_ms(network, batch),
    )


def _file_bytes(network: nn.Module) -> int:
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in network.state_dict().items()}
    return len(to_safetensors(tensors))


def _write(trainer: Trainer, table: list[Variant], counted: Cost, totals: Totals, final: nn.Module) -> Result:
    config, history, pruned = trainer.config, trainer.history.epochs, trainer.history.pruned
    sessions = trainer.folder.read_sessions() or [trainer.session]
    tested = [row for row in history if row.test_top1 is not None]
    best = best_epoch(history)
    if best is None:
        raise CheckpointError(
            "A finished run must have a tested epoch of its final network. Got none in the newest checkpoint: the file "
            "was changed. Restore it, or delete it to resume from the one before."
        )
    seconds = sum(row.seconds for row in history)
    images = sum(row.seconds * row.images_per_second for row in history)
    result = Result(
        name=config.name,
        command=sessions[0].command,
        model=config.model.name,
        data=config.data.name,
        method=config.method.name,
        seed=config.seed,
        started=trainer.history.started,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        wall_seconds=trainer.history.seconds,
        images_per_second=images / max(seconds, 1e-9),
        dense=trainer.costs.dense,
        compact=totals,
        best=Moment.of(best),
        last=Moment.of(tested[-1]),
        table=tuple(table),
        latency_batch=_LATENCY_BATCH,
        round_to=None if pruned is None else pruned.round_to,
        finalised_step=None if pruned is None else pruned.finalised_step,
        inputs=inputs_of(trainer.data, config),
        sites=() if pruned is None else pruned.sites,
        modules=_modules(trainer, counted, final),
        config=config,
        environment=trainer.session.environment,
        sessions=tuple(sessions),
        epochs=tuple(history),
    )
    if trainer.world.is_writer:
        trainer.folder.write_result(result)
    return result


def _modules(trainer: Trainer, counted: Cost, final: nn.Module) -> tuple[Module, ...]:
    """Return convolutions and linear layers before and after the cut; a removed one costs nothing after."""
    dense = trainer.costs.dense_network
    after = dict(final.named_modules())
    modules = []
    for name, part in trainer.costs.dense_cost.by_module.items():
        if not part.macs:
            continue
        now = counted.by_module.get(name)
        modules.append(
            Module(
                name=name,
                kind=part.kind,
                macs_dense=part.macs,
                macs_compact=0 if now is None else now.macs,
                params_dense=part.params,
                params_compact=0 if now is None else now.params,
                out_dense=_width(dense.get_submodule(name)),
                out_compact=_width(after[name]) if now is not None and now.macs else 0,
            )
        )
    return tuple(modules)


def _width(module: nn.Module) -> int | None:
    width = getattr(module, "out_channels", getattr(module, "out_features", None))
    return width if isinstance(width, int) else None
