"""The end of a run: the last cut, the compact network, the table, and result.json."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from softprune.config.recipes import config_to_dict
from softprune.costs import Cost
from softprune.runs.folder import RunFolder
from softprune.runs.networks import origin_of
from softprune.runs.result import RESULT_FORMAT
from softprune.surgery import save
from softprune.train.evaluate import latency_ms
from softprune.train.trainer import Trainer

logger = logging.getLogger(__name__)

_LATENCY_BATCH = 64


def finish(trainer: Trainer) -> dict[str, Any]:
    """Cut the trained network, measure dense, masked and compact, write everything, and return the result.

    All processes take part in the measurements; rank 0 writes.
    """
    trainer.listener.on_stage("measuring")
    costs = trainer.costs
    if trainer.stage.pruner is None and trainer.pruned is None:
        with trainer.stage.eval_weights() as network:
            tested = trainer.evaluator(network, on_test=True)
            table = [_row(trainer, "dense", network, tested.top1, tested.top5, costs.dense)]
        return _write(trainer, table, costs.dense_cost, costs.dense, network)
    baseline = _baseline(trainer.folder) or trainer.given
    dense = costs.dense_network.to(trainer.world.device)
    table = [_row(trainer, "dense", dense, baseline.get("top1"), baseline.get("top5"), costs.dense)]
    with _compact(trainer) as compact:
        assert trainer.pruned is not None
        pruned = trainer.pruned
        masks = {site["name"]: _mask(site) for site in pruned["sites"]}
        counted, totals = costs.of_network(compact, masks)
        masked_network = trainer.stage.network if trainer.stage.pruner is not None else None
        table.append(_row(trainer, "masked", masked_network, pruned["top1"], pruned["top5"], costs.dense))
        table[-1]["file_bytes"] = table[0]["file_bytes"]
        tested = trainer.evaluator(compact.eval(), on_test=True)
        table.append(_row(trainer, "compact", compact, tested.top1, tested.top5, totals))
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
    variant: str,
    network: nn.Module | None,
    top1: float | None,
    top5: float | None,
    totals: dict[str, Any],
) -> dict[str, Any]:
    """Return one row of the table dense / masked / compact."""
    batch = trainer.data.example(_LATENCY_BATCH, trainer.world.device)
    return {
        "variant": variant,
        "top1": top1,
        "top5": top5,
        "params": totals["params"],
        "macs": totals["macs"],
        "file_bytes": None if network is None else _file_bytes(network),
        "latency_ms": None if network is None else latency_ms(network, batch),
    }


def _file_bytes(network: nn.Module) -> int:
    tensors = {
        name: tensor.detach().cpu().contiguous().clone() for name, tensor in network.state_dict().items()
    }
    return len(to_safetensors(tensors))


def _mask(site: dict[str, Any]) -> Tensor:
    return torch.tensor(site["keep"], dtype=torch.bool)


def _baseline(folder: RunFolder) -> dict[str, Any]:
    """Return the row of the baseline that the run trained first, or nothing."""
    baseline = RunFolder(folder.dense)
    return baseline.read_result()["table"][0] if baseline.result.is_file() else {}


def _write(
    trainer: Trainer, table: list[dict[str, Any]], counted: Cost, totals: dict[str, Any], final: nn.Module
) -> dict[str, Any]:
    config, history = trainer.config, trainer.history
    sessions = trainer.folder.read_sessions() or [trainer.session]
    # The best epoch of the final network: neither of one that was not cut yet, nor of one before its fine-tuning.
    final_epochs = [row for row in history if row["phase"] == history[-1]["phase"] and row["decided"]]
    tested = [row for row in final_epochs if row["test_top1"] is not None]
    images = sum(row["seconds"] * row["images_per_second"] for row in history)
    result = {
        "format": RESULT_FORMAT,
        "name": config.name,
        "command": sessions[0]["command"],
        "model": config.model.name,
        "data": config.data.name,
        "method": config.method.name,
        "seed": config.seed,
        "started": trainer.started,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_seconds": trainer.seconds,
        "images_per_second": images / max(sum(row["seconds"] for row in history), 1e-9),
        "dense": trainer.costs.dense,
        "compact": totals,
        "best": _moment(max(tested, key=lambda row: row["test_top1"])),
        "last": _moment(next(row for row in reversed(history) if row["test_top1"] is not None)),
        "table": table,
        "round_to": None if trainer.pruned is None else trainer.pruned.get("round_to"),
        "masks": config_to_dict(config)["masks"],
        "sites": [] if trainer.pruned is None else trainer.pruned["sites"],
        "modules": _modules(trainer, counted, final),
        "config": config_to_dict(config),
        "environment": trainer.session["environment"],
        "sessions": sessions,
        "epochs": history,
    }
    if trainer.world.is_writer:
        trainer.folder.write_result(result)
    return result


def _moment(row: dict[str, Any]) -> dict[str, Any]:
    kept = {key: row[key] for key in ("channels", "params", "macs", "paper")}
    return {"epoch": row["epoch"], "top1": row["test_top1"], "top5": row["test_top5"], **kept}


def _modules(trainer: Trainer, counted: Cost, final: nn.Module) -> list[dict[str, Any]]:
    """Return convolutions and linear layers before and after the cut; a removed one costs nothing after."""
    dense = trainer.costs.dense_network
    after = dict(final.named_modules())
    modules = []
    for name, part in trainer.costs.dense_cost.by_module.items():
        if not part.macs:
            continue
        now = counted.by_module.get(name)
        modules.append(
            {
                "name": name,
                "kind": part.kind,
                "macs_dense": part.macs,
                "macs_compact": 0 if now is None else now.macs,
                "params_dense": part.params,
                "params_compact": 0 if now is None else now.params,
                "out_dense": _width(dense.get_submodule(name)),
                "out_compact": _width(after[name]) if now is not None and now.macs else 0,
            }
        )
    return modules


def _width(module: nn.Module) -> int | None:
    width = getattr(module, "out_channels", getattr(module, "out_features", None))
    return width if isinstance(width, int) else None
