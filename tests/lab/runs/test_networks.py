"""Where a run's network and its first weights come from."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from softprune.errors import ConfigError, FileFormatError
from softprune.lab.config.settings import ModelConfig, RunConfig
from softprune.lab.data import load_data
from softprune.lab.runs.checkpoint import save_checkpoint
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.networks import build_network, check_outputs, load_weights, read_weights, starting_network


def test_weights_come_from_the_files_that_are_accepted(tmp_path: Path) -> None:
    network = starting_network(ModelConfig(), 10, 5)[0]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.half())  # so that half precision keeps it
    state = network.state_dict()
    save_file(state, tmp_path / "w.safetensors")
    files = {
        "plain.pt": state,
        "ddp.pt": {"state_dict": {f"module.{name}": value for name, value in state.items()}, "epoch": 3},
        "model.pt": {"model": state, "optimizer": {"state": {}}},
        "nested.pt": {"model_state": state},
        "half.pt": {name: value.half() if value.is_floating_point() else value for name, value in state.items()},
    }
    for file, content in files.items():
        torch.save(content, tmp_path / file)
    for file in ("w.safetensors", *files):
        loaded, is_trained = starting_network(ModelConfig(weights=str(tmp_path / file)), 10, 0)
        assert is_trained
        assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items()), file


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code ran",)


def test_other_files_are_refused_with_those_that_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = starting_network(ModelConfig(), 10, 0)[0]
    state = network.state_dict()
    contents = {
        "module": network,
        "evil": _Evil(),
        "pickle": pickle.dumps(_Evil()),
        "list": [torch.zeros(3)],
        "two": {"net": state, "critic": state},
        "page": b"<html>404</html>",
        "empty": b"",
    }
    for name, content in contents.items():
        path = tmp_path / f"{name}.pt"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(FileFormatError, match=rf"a PyTorch file with a state_dict .*Got {path}"):
            read_weights(path)
    assert "code ran" not in capsys.readouterr().out
    with pytest.raises(FileFormatError, match="No such file"):
        read_weights(tmp_path / "nowhere.pt")
    with pytest.raises(ConfigError, match="A run must be a folder"):
        read_weights(tmp_path)


def test_weights_of_another_network_are_refused() -> None:
    network = nn.ModuleDict({"body": nn.BatchNorm1d(3), "head": nn.Linear(4, 3), "other": nn.Linear(4, 7)})
    state = network.state_dict()
    for wrong, says in (
        ({name: value for name, value in state.items() if name != "head.bias"}, "Missing"),
        ({**state, "more": torch.zeros(1)}, "Unexpected"),
        # None of these is a classifier for other classes.
        ({**state, "other.weight": torch.zeros(5, 4)}, "size mismatch for other"),
        ({**state, "body.weight": torch.zeros(5)}, "size mismatch for body"),
        ({**state, "head.weight": torch.zeros(5, 3)}, "size mismatch for head"),
        ({**state, "head.bias": torch.tensor(0.0)}, "size mismatch for head"),
    ):
        with pytest.raises(FileFormatError, match=rf"Got a file: [\s\S]*{says}"):
            load_weights(network, wrong, "a file", num_classes=3)


def test_a_run_whose_network_was_cut_gives_no_weights(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    folder.checkpoints.mkdir()
    save_checkpoint(folder.checkpoints, 1, {"history": {"cuts": ["a plan"]}, "model": {}})
    with pytest.raises(FileFormatError, match="must be those of a dense network"):
        read_weights(folder.path)


def test_a_classifier_for_other_classes_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = starting_network(ModelConfig(), 7, 5)[0].state_dict()
    torch.save(trained, tmp_path / "seven.pt")
    loaded = starting_network(ModelConfig(weights=str(tmp_path / "seven.pt")), 10, 0)[0].state_dict()
    fresh = starting_network(ModelConfig(), 10, 0)[0].state_dict()
    for name, value in loaded.items():
        assert torch.equal(value, fresh[name] if name.startswith("classifier") else trained[name]), name
    assert "softprune" in caplog.text
    assert "7 classes instead of 10, so these are initialised at random: classifier.weight" in caplog.text
    seven, ten = (nn.Sequential(nn.Conv2d(4, classes, 1)) for classes in (7, 10))
    for head in (seven, ten):
        head[0].register_buffer("scale", torch.tensor(1.0))  # a number, as a quantised layer has
    assert not load_weights(ten, seven.state_dict(), "a file", 10)


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
    with pytest.raises(ConfigError, match=r"model\.options are for factories only"):
        starting_network(ModelConfig(options={"width": 6}), 10, 0)[0]


def test_a_factory_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_nets.py").write_text(
        "from torch import nn\ndef small(num_classes): return nn.Linear(3, num_classes)\ndef no(): pass\n"
        "def bad(num_classes): return [] + num_classes\ndef number(num_classes): return num_classes\n"
    )
    network = build_network("my_own_nets:small", 4)
    assert network.out_features == 4
    for name, message in [
        ("my_own_nets:large", "no attribute 'large'"),
        ("my_own_nets:no", "unexpected keyword argument 'num_classes'"),
        ("my_own_nets:bad", r"TypeError: .*, raised in line 4 of .*my_own_nets\.py by .*:bad\(num_classes=4\)"),
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
    check_outputs(network, data, "It", "build another")
    assert network.training
    assert network[2].num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), state)
    for wrong, found in (
        (Pair(), "Got tuple for 2 images"),
        (nn.Flatten(), r"Got \(2, 64\)"),
        (nn.Conv2d(3, 3, 1), "1x8x8"),
    ):
        with pytest.raises(ConfigError, match=rf"It must .*{found}[\s\S]*build another"):
            check_outputs(wrong, data, "It", "build another")
