"""Where a run's network and its first weights come from."""

import argparse
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from softprune.errors import ConfigError, FileFormatError, SoftpruneError
from softprune.lab.config.settings import ModelConfig, RunConfig
from softprune.lab.data import load_data
from softprune.lab.runs.checkpoint import save_checkpoint
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.networks import (
    build_network,
    check_outputs,
    load_weights,
    named_config,
    read_weights,
    starting_network,
)


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (starting_network(ModelConfig(), 10, seed)[0].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_weights_come_from_safetensors_and_state_dicts(tmp_path: Path) -> None:
    state = starting_network(ModelConfig(), 10, 5)[0].state_dict()
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "plain.pt")
    torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "ddp.pt")
    torch.save({"model_state_dict": state, "epoch": 3}, tmp_path / "nested.pt")
    torch.save({f"_orig_mod.{name}": value for name, value in state.items()}, tmp_path / "compiled.pt")
    torch.save({f"_orig_mod.module.{name}": value for name, value in state.items()}, tmp_path / "both.pt")
    torch.save({"net": state, "acc": 93.1, "optimizer": {"state": {}}}, tmp_path / "named.pt")
    for file in ("w.safetensors", "plain.pt", "ddp.pt", "nested.pt", "named.pt", "compiled.pt", "both.pt"):
        loaded = starting_network(ModelConfig(weights=str(tmp_path / file)), 10, 0)[0].state_dict()
        assert all(torch.equal(loaded[name], state[name]) for name in state), file


def test_weights_come_from_the_checkpoints_of_other_tools(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    network = starting_network(ModelConfig(), 10, 5)[0]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.half())  # so that half precision keeps it
    state = network.state_dict()
    lightning = {f"model.{name}": value for name, value in state.items()}
    files = {
        "average.pt": torch.optim.swa_utils.AveragedModel(network).state_dict(),
        "lightning.pt": {"state_dict": lightning | {"loss.weight": torch.ones(3)}, "epoch": 3},
        "timm.pt": {"state_dict": state, "args": argparse.Namespace(lr=0.1)},
        "half.pt": {name: value.half() for name, value in network.half().state_dict().items()},
        "old.pt": {f"net.{name}": value for name, value in state.items() if "num_batches" not in name},
    }
    for file, content in files.items():
        torch.save(content, tmp_path / file)
        with caplog.at_level("INFO"):
            loaded = starting_network(ModelConfig(weights=str(tmp_path / file)), 10, 0)[0].state_dict()
        assert all(torch.equal(loaded[name], state[name]) for name in state), file
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"of {tmp_path / 'lightning.pt'} only 'model' is used, not loss.weight"]
    torch.save(lightning | {f"teacher.{name}": value for name, value in state.items()}, tmp_path / "two.pt")
    with pytest.raises(
        FileFormatError, match=r"hold the network once. Got .*two.pt with it under 'model.', 'teacher.'"
    ):
        starting_network(ModelConfig(weights=str(tmp_path / "two.pt")), 10, 0)


def test_files_that_hold_no_state_dict_say_what_to_save(tmp_path: Path) -> None:
    network = starting_network(ModelConfig(), 10, 0)[0]
    torch.save(network, tmp_path / "module.pt")
    torch.save({"net": network.state_dict(), "critic": network.state_dict()}, tmp_path / "two.pt")
    endless: dict[str, object] = {"epoch": 3}
    endless["model"] = endless
    torch.save(endless, tmp_path / "endless.pt")
    torch.save([torch.zeros(3)], tmp_path / "list.pt")
    torch.save({7: torch.zeros(3), "a": torch.zeros(3)}, tmp_path / "number.pt")
    (tmp_path / "page.pt").write_text("<html>404</html>")
    for file, says in (
        ("page.pt", "page.pt, which is damaged or holds other objects"),
        ("module.pt", r"module.pt, which is damaged or holds other objects.*save model\.state_dict\(\) instead\.$"),
        ("two.pt", "one state_dict, .* under 'state_dict', 'model_state_dict' or 'model'. Got the keys critic, net in"),
        ("endless.pt", "'model'. Got the keys epoch, model in"),
        ("list.pt", "'model'. Got list in"),
        ("number.pt", "'model'. Got the keys 7, a in"),
    ):
        with pytest.raises(SoftpruneError, match=says):
            starting_network(ModelConfig(weights=str(tmp_path / file)), 10, 0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            {"history": {"cuts": ["a plan"]}, "model": {}},
            "must be of a dense network. Got the run .*, whose network was cut",
        ),
        ({"model": {}}, "must hold what softprune saved for this network. Got KeyError"),
    ],
)
def test_runs_that_hold_no_weights_of_a_dense_network(tmp_path: Path, content: dict[str, object], says: str) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    folder.checkpoints.mkdir()
    save_checkpoint(folder.checkpoints, 1, content)
    with pytest.raises(SoftpruneError, match=says):
        read_weights(folder.path)


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code ran",)


def test_bad_weights_are_refused_and_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def load(file: str) -> None:
        starting_network(ModelConfig(weights=str(tmp_path / file)), 10, 0)[0]

    with pytest.raises(ConfigError, match="does not exist"):
        load("nowhere.pt")
    state = starting_network(ModelConfig(), 10, 0)[0].state_dict()
    torch.save({**state, "classifier.weight": state["classifier.weight"][:, :3].clone()}, tmp_path / "narrow.pt")
    with pytest.raises(FileFormatError, match=r"of another shape: classifier\.weight \(1\)\. .* compact network"):
        load("narrow.pt")
    (tmp_path / "torn.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(FileFormatError, match="must be readable"):
        load("torn.safetensors")
    (tmp_path / "empty.pt").touch()
    with pytest.raises(FileFormatError, match=r"Got .*empty\.pt: EOFError\. Save or download the file again\.$"):
        load("empty.pt")
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(FileFormatError):
        load("evil.pt")
    assert "code ran" not in capsys.readouterr().out


def layers(**parts: nn.Module) -> nn.Module:
    return nn.ModuleDict(parts)


def test_weights_of_another_network_are_refused_with_what_is_wrong() -> None:
    network = layers(body=nn.BatchNorm1d(3), head=nn.Linear(4, 3), other=nn.Linear(4, 7, bias=False))
    state = network.state_dict()
    fewer = {name: value for name, value in state.items() if name != "head.bias"}
    for wrong, says in (
        (fewer, r"missing: head\.bias \(1\)\."),
        ({**state, "more": torch.zeros(1)}, r"unknown: more \(1\)\."),
        ({**state, "head.bias": torch.zeros(3, dtype=torch.int64)}, r"of another dtype: head\.bias \(1\)\."),
        # None of these is a classifier for other classes.
        ({**state, "other.weight": torch.zeros(5, 4)}, r"of another shape: other\.weight \(1\)\."),
        ({**state, "body.weight": torch.zeros(5)}, r"of another shape: body\.weight \(1\)\."),
        ({**state, "head.bias": torch.tensor(0.0)}, r"of another shape: head\.bias \(1\)\."),
    ):
        with pytest.raises(FileFormatError, match=f"like this one. Got a file; {says} Check model.name"):
            load_weights(network, wrong, "a file", num_classes=3)


def test_a_classifier_for_other_classes_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = starting_network(ModelConfig(), 7, 5)[0].state_dict()
    torch.save(trained, tmp_path / "seven.pt")
    loaded = starting_network(ModelConfig(weights=str(tmp_path / "seven.pt")), 10, 0)[0].state_dict()
    fresh = starting_network(ModelConfig(), 10, 0)[0].state_dict()
    for name, value in loaded.items():
        assert torch.equal(value, fresh[name] if name.startswith("classifier") else trained[name]), name
    assert "softprune" in caplog.text
    assert "7 classes instead of 10: not loaded, and initialised at random: classifier.weight" in caplog.text
    state = layers(head=nn.Conv2d(4, 7, 1)).state_dict()
    assert not load_weights(layers(head=nn.Conv2d(4, 10, 1)), state, "a file", 10)


def test_a_classifier_that_is_missing_starts_at_random(caplog: pytest.LogCaptureFixture) -> None:
    def made() -> nn.Module:
        return layers(first=nn.Conv2d(4, 3, 1), last=nn.BatchNorm1d(5), head=nn.Linear(4, 3))

    trained, network = made().state_dict(), made()
    start = {name: value.clone() for name, value in network.state_dict().items()}
    backbone = {f"module.encoder.{name}": value for name, value in trained.items() if "head" not in name}
    assert not load_weights(network, backbone, "a file", 3)
    assert "a file has no classifier: initialised at random: head.weight, head.bias" in caplog.text
    for name, value in network.state_dict().items():
        assert torch.equal(value, (start if "head" in name else trained)[name]), name
    without = {name: value for name, value in trained.items() if "first" not in name}  # it has three outputs, too
    with pytest.raises(FileFormatError, match=r"missing: first.weight, first.bias \(2\)\."):
        load_weights(network, without, "a file", 3)


_FACTORIES = """
import torch
from torch import nn

def like_torchvision(*, weights=None, num_classes=1000, width=4):
    if weights is not None and num_classes != 1000:
        raise ValueError("The parameter 'num_classes' expected value 1000")
    return made(weights, num_classes, width)

def like_timm(pretrained=False, **kwargs):
    return made(pretrained, kwargs.get("num_classes", 1000), kwargs.get("width", 4))

def made(trained, num_classes, width):
    network = nn.Sequential(nn.Linear(3, width), nn.Linear(width, num_classes))
    if trained:
        nn.init.constant_(network[0].weight, 2.0)
    return network

def gone(pretrained=False, num_classes=3):
    if pretrained:
        raise OSError("no route to the hub")
    return made(False, num_classes, 4)

def plain(num_classes):
    return made(False, num_classes, 4)
"""


def test_trained_weights_of_torchvision_and_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "factories_like.py").write_text(_FACTORIES)
    for name in ("like_torchvision", "like_timm"):
        config = ModelConfig(name=f"factories_like:{name}", pretrained=True, options={"width": 6})
        network, after = starting_network(config, 5, 0)[0], torch.get_rng_state()
        assert network[0].weight.shape == (6, 3)
        assert (network[0].weight == 2).all()
        assert network[1].out_features == 5
        # The head and the training start as they do without the trained weights.
        fresh = starting_network(ModelConfig(name=config.name, options={"width": 6}), 5, 0)[0]
        assert torch.equal(network[1].weight, fresh[1].weight)
        assert torch.equal(torch.get_rng_state(), after)
    for name, message in [("gone", "no route to the hub"), ("plain", "needs a factory with the keyword")]:
        with pytest.raises(ConfigError, match=message):
            starting_network(ModelConfig(name=f"factories_like:{name}", pretrained=True), 5, 0)[0]
    with pytest.raises(ConfigError, match="needs a factory"):
        starting_network(ModelConfig(pretrained=True), 10, 0)[0]
    with pytest.raises(ConfigError, match=r"model\.options are arguments of a factory"):
        starting_network(ModelConfig(options={"width": 6}), 10, 0)[0]


def test_a_factory_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_nets.py").write_text(
        "from torch import nn\ndef small(num_classes): return nn.Linear(3, num_classes)\ndef no(): pass\n"
        "def bad(num_classes): return [] + num_classes\ndef number(num_classes): return num_classes\n"
        "def gone(num_classes): return {}[num_classes]\n"
    )
    network = build_network("my_own_nets:small", 4)
    assert network.out_features == 4
    for name, message in [
        ("my_own_nets:large", "has no 'large'"),
        ("torch:BatchNorm2d", "torch has no 'BatchNorm2d'. Did you mean 'torch.nn:BatchNorm2d'?"),
        ("my_own_nets:no", "called with num_classes. Got .* unexpected keyword argument 'num_classes'"),
        (
            "my_own_nets:bad",
            r"TypeError: can only .*, raised in line 4 of .*my_own_nets\.py by .*:bad\(num_classes=4\)",
        ),
        ("my_own_nets:number", "must return an nn.Module. Got int from 'my_own_nets:number'"),
        ("my_own_nets:gone", r"Got KeyError: 4, raised in line 6 of .*my_own_nets\.py by .*:gone\(num_classes=4\)"),
        ("nowhere_at_all:f", "must be importable"),
        ("vgg61", "Did you mean"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_network(name, 4)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_outputs_are_checked_and_the_random_state_stays() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    data, state = load_data("digits"), torch.get_rng_state()
    check_outputs(network, data, "It", "build another", training=True)
    assert network.training
    assert network[2].num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ConfigError, match=r"It must return .* \(batch, 10\)\. Got tuple for 2 images; build another"):
        check_outputs(Pair(), data, "It", "build another")


def test_names_of_a_command_replace_those_of_a_run(tmp_path: Path) -> None:
    model = ModelConfig(name="nets:small", options={"width": 6})
    config = RunConfig(model=model, seed=3)
    folder = RunFolder.create(tmp_path / "run", config)
    assert named_config(folder, "nets:small") == config
    assert named_config(folder, needs=("data", "method")) == config
    with pytest.raises(ConfigError, match=r"Got model\.name = 'nets:small' in .*; .* add `--model nets:small`"):
        named_config(folder)
    other = named_config(folder, "resnet20", "cifar10", "l1")
    assert other == config.replace(
        model=ModelConfig(name="resnet20"),
        data=config.data.replace(name="cifar10"),
        method=config.method.replace(name="l1"),
    )
