"""Begin a run from a checkpoint of another that was trained alike, such as Slimming cut at another ratio.

    python benchmarks/gpu/fork.py SOURCE OUT RECIPE [--seed N] [--data-dir DIR] [--set KEY=VALUE ...]

Copies the newest checkpoint of the run SOURCE to the new run OUT with the configuration of RECIPE; `softprune resume
OUT` continues. The record is the one that `softprune train RECIPE` would write, without the time of the common
training. Both configurations must agree in all but the name, the ratio, the fine-tuning and what is recorded.
"""

import argparse
import sys
from pathlib import Path

from softprune.lab.config.recipes import config_to_dict, load_recipe
from softprune.lab.config.settings import RunConfig
from softprune.lab.runs.checkpoint import read_newest, save_checkpoint
from softprune.lab.runs.folder import RunFolder
from softprune.lab.train.run import absolute_paths


def common_training(config: RunConfig) -> RunConfig:
    """The configuration without what may differ between the two runs."""
    options = {name: value for name, value in config.method.options.items() if name != "ratio"}
    method = config.method.replace(options=options)
    finetune, records = type(config.finetune)(), type(config.records)()
    return config.replace(name="", method=method, finetune=finetune, records=records)


def fork(source: RunFolder, target: Path, config: RunConfig) -> None:
    """Make the run ``target`` with the newest checkpoint of ``source``."""
    path, state = read_newest(source.checkpoints)
    if common_training(source.read_config()) != common_training(config):
        raise SystemExit(f"The run must be trained as {source.path} was. Got another configuration for {target}.")
    if state["cuts"] or state["epoch"] >= config.train.epochs:
        raise SystemExit(f"The run must be forked before its network is cut. Got {path} of epoch {state['epoch']}.")
    settings = state["stage"]["pruner"]["settings"]  # of the source, which the pruner is compared with
    settings |= {name: value for name, value in config.method.options.items() if name in settings}
    folder = RunFolder.create(target, config)
    folder.add_session(source.read_sessions()[-1])
    step = int(path.stem.removeprefix("step-"))
    save_checkpoint(folder.checkpoints, step, {**state, "config": config_to_dict(config)})


def main(arguments: list[str]) -> None:
    """Make the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("recipe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args(arguments)
    config = load_recipe(options.recipe, options.set)
    config = config.replace(seed=options.seed, data=config.data.replace(dir=options.data_dir))
    fork(RunFolder.open(options.source), options.out, absolute_paths(config))


if __name__ == "__main__":
    main(sys.argv[1:])
