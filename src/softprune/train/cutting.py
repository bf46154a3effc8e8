"""Cut the network of a run at its newest checkpoint, finished or not."""

from pathlib import Path
from typing import Any

from softprune.config.settings import RunConfig
from softprune.costs import Cost, cost
from softprune.data import DataBundle
from softprune.distributed import World, join_world
from softprune.errors import ConfigError
from softprune.runs.checkpoint import read_newest
from softprune.runs.folder import RunFolder
from softprune.runs.networks import build_network, origin_of
from softprune.surgery import save
from softprune.train.recalibration import recalibrate
from softprune.train.run import open_data, set_arithmetic
from softprune.train.stage import Stage
from softprune.train.trainer import rebuild_network


def restore_stage(config: RunConfig, data: DataBundle, world: World, state: dict[str, Any]) -> Stage:
    """The network of a checkpoint with its pruner, as it was when the checkpoint was written."""
    network = rebuild_network(config, data, state).to(world.device)
    # Neither has a pruner: the fine-tuning behind a cut, and a dense run, which is never fine-tuned.
    finetune = state["stage"]["pruner"] is None and config.method.name != "dense"
    return Stage(config, network, data, world, finetune=finetune, state=state["stage"])


def refuse_dense(config: RunConfig, run: Path) -> None:
    """Raise a ConfigError for a run that prunes nothing, so that there is no compact network to make or to find."""
    if config.method.name == "dense":
        raise ConfigError(
            f"A compact network is cut from a pruned one. Got the dense run {run}, which prunes nothing; give the "
            'folder of a run with a pruning method (method.name other than "dense").'
        )


def compact_run(
    run: Path,
    out: Path | None = None,
    *,
    device: str = "auto",
    data_dir: str | None = None,
    round_to: int | None = None,
    gathers: bool = True,
) -> tuple[Path, Cost, Cost]:
    """Write the compact network of a run's newest checkpoint; return its path, the dense cost and its cost.

    Of a finished run it is the network that the run itself wrote, on the same device. Several processes that
    recalibrated looked at a share of each batch, where this one looks at all of it. `round_to` and `gathers` as in
    Pruner.compact.
    """
    folder = RunFolder.open(run)
    config = folder.read_config()
    refuse_dense(config, run)
    world = join_world(device)
    set_arithmetic(config, world.device)
    data = open_data(config, world.device, data_dir)
    stage = restore_stage(config, data, world, read_newest(folder.checkpoints)[1])
    if round_to is not None or not gathers:
        _check_choice(config, stage, out)
    with stage.judged() as network:
        compact = network
        if stage.pruner is not None:
            compact = stage.pruner.compact(round_to=round_to, gathers=gathers)
            if config.train.recalibrate:
                recalibrate(compact, stage.step.feed, config.train.recalibrate)
        target = save(compact, out or folder.compact, origin=origin_of(config, data))
    dense = build_network(config.model.name, data.num_classes)
    return target, cost(dense, data.example(1)), cost(compact, data.example(1, world.device))


def _check_choice(config: RunConfig, stage: Stage, out: Path | None) -> None:
    """Whether the network may be cut in another way than the run itself cuts it."""
    if out is None:
        raise ConfigError(
            "RUN/compact.safetensors is the network that the run reports. Got another kind of cut without a file of "
            "its own; name one with --out."
        )
    if stage.pruner is None:
        raise ConfigError(
            "Multiples and gathers are chosen when a network is cut. Got a run that is past its cut, in its "
            "fine-tuning; leave --round-to and --no-gathers out, or set method.round_to before training."
        )
    if config.train.recalibrate:
        raise ConfigError(
            "Recalibrated statistics belong to one cut. Got train.recalibrate together with --round-to or "
            "--no-gathers, whose network would compute something else; set method.round_to before training."
        )
