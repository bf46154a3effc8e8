"""`method.round_to = "auto"`: found once in a run, by the first process, and kept from there on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import metrics

from softprune.errors import ConfigError
from softprune.lab.config.method import MethodConfig
from softprune.lab.config.recipes import dump_config, load_recipe, read_config
from softprune.lab.config.settings import RunConfig
from softprune.lab.data import load_data
from softprune.lab.runs.checkpoint import read_newest
from softprune.lab.runs.networks import starting_network
from softprune.lab.train.control import Listener
from softprune.lab.train.pruner import make_pruner
from softprune.lab.train.run import resume, start

Tiny = Callable[..., RunConfig]


@pytest.fixture
def likes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Makes this a machine that likes a multiple; the devices that were asked are noted."""

    def patch(multiple: int) -> list[str]:
        asked: list[str] = []
        monkeypatch.setattr(
            "softprune.methods.base.fastest_multiple", lambda device="cpu": asked.append(str(device)) or multiple
        )
        return asked

    return patch


@pytest.mark.parametrize("wrong", ["0", "fast", "1.5"])
def test_it_is_a_whole_number_or_auto(wrong: str, tmp_path: Path) -> None:
    config = load_recipe("digits", ["method.round_to=auto"])
    assert config.method.round_to == "auto"
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert read_config(tmp_path / "config.toml") == config
    with pytest.raises(ConfigError, match='round_to must be a whole number, at least 1, or "auto". Got .*' + wrong[1:]):
        load_recipe("digits", [f"method.round_to={wrong}"])


class _StopAfter(Listener):
    def __init__(self, patch: pytest.MonkeyPatch, steps: int) -> None:
        self.left = steps
        patch.setattr("softprune.lab.train.control.StopSignal.reason", lambda _: "a test" if self.left <= 0 else None)

    def on_step(self, done: int) -> None:
        self.left -= 1


@pytest.mark.parametrize("cut", [0, 2])
def test_a_run_that_goes_on_elsewhere_keeps_its_multiple(
    cut: int, tiny: Tiny, likes: Callable[[int], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = likes(4)
    config = tiny("method.round_to=auto", f"train.compact_at={cut}")
    with monkeypatch.context() as patch:
        assert start(config, tmp_path / "run", listener=_StopAfter(patch, 40)).stopped
    assert asked == ["cpu"], "once, and not for the check before the run"
    assert read_newest(tmp_path / "run" / "checkpoints")[1]["stage"]["pruner"]["round_to"] == 4
    asked = likes(2)
    result = resume(tmp_path / "run").result
    assert result is not None
    assert asked == []
    assert result.round_to == 4
    assert json.loads((tmp_path / "run" / "result.json").read_text())["round_to"] == 4
    start(tiny("method.round_to=4", f"train.compact_at={cut}"), tmp_path / "four")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "four")


def test_several_processes_take_the_first_ones(
    tiny: Tiny, likes: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pruner in the second of two processes, whose machine likes another multiple than the first one's."""
    asked = likes(2)
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 1}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: tensor.fill_(4))
    config, data = tiny("method.round_to=auto"), load_data("digits")
    network = starting_network(config.model, data.num_classes, config.seed)[0]
    assert make_pruner(config, network, data.example(), total_steps=9).round_to == 4
    assert not asked


@pytest.mark.parametrize("name", ["scp", "scp-target", "slimming", "sfp", "fpgm", "variational", "l1", "random"])
def test_every_method_that_rounds_takes_it(name: str, likes: Callable[[int], list[str]]) -> None:
    likes(4)
    data = load_data("digits")
    network = starting_network(RunConfig().model, 10, 0)[0]
    config = RunConfig(method=MethodConfig(name=name, round_to="auto"))
    pruner = make_pruner(config, network, data.example(), total_steps=9)
    pruner.decide()
    assert pruner.round_to == 4
    assert all(int(mask.sum()) % 4 == 0 for mask in pruner.masks().values())
