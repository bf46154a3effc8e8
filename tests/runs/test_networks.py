"""Where a run's network and its first weights come from."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from softprune.config.settings import ModelConfig
from softprune.errors import ConfigError, FileFormatError
from softprune.runs.networks import build_network, initial_network, load_weights


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (initial_network(ModelConfig(), 10, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_weights_come_from_safetensors_and_state_dicts(tmp_path: Path) -> None:
    state = initial_network(ModelConfig(), 10, 5).state_dict()
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "plain.pt")
    torch.save(
        {"state_dict": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "ddp.pt"
    )
    for file in ("w.safetensors", "plain.pt", "ddp.pt"):
        loaded = initial_network(ModelConfig(weights=str(tmp_path / file)), 10, 0).state_dict()
        assert all(torch.equal(loaded[name], state[name]) for name in state), file


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code ran",)


def test_bad_weights_are_refused_and_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = initial_network(ModelConfig(), 10, 0)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(ConfigError, match="does not exist"):
        load_weights(network, tmp_path / "nowhere.pt")
    torch.save(initial_network(ModelConfig(), 7, 0).state_dict(), tmp_path / "seven.pt")
    with pytest.raises(FileFormatError, match=r"of another shape: classifier\.weight"):
        load_weights(network, tmp_path / "seven.pt")
    (tmp_path / "torn.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(FileFormatError, match="must be readable"):
        load_weights(network, tmp_path / "torn.safetensors")
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(FileFormatError):
        load_weights(network, tmp_path / "evil.pt")
    assert "code ran" not in capsys.readouterr().out
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_a_factory_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_nets.py").write_text(
        "from torch import nn\ndef small(num_classes): return nn.Linear(3, num_classes)\ndef no(): pass\n"
    )
    network = build_network("my_own_nets:small", 4)
    assert network.out_features == 4
    for name, message in [
        ("my_own_nets:large", "must be importable"),
        ("my_own_nets:no", "must take num_classes"),
        ("nowhere_at_all:f", "must be importable"),
        ("vgg61", "Did you mean"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_network(name, 4)
