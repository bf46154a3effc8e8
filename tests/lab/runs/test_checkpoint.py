"""Checkpoints: whole or absent, checked on reading, the one before kept."""

import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from softprune.errors import CheckpointError
from softprune.lab.runs import checkpoint


def _state(step: int) -> dict[str, object]:
    return {"step": step, "weights": {"a": torch.full((50,), float(step))}, "text": "x", "rows": [{"b": 1.5}]}


def test_the_newest_two_are_kept_and_read_back(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        checkpoint.save_checkpoint(tmp_path, step, _state(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000010.ckpt", "step-0000000100.ckpt"]
    path, state = checkpoint.read_newest(tmp_path)
    assert path.name == "step-0000000100.ckpt"
    assert state["step"] == 100
    assert torch.equal(state["weights"]["a"], torch.full((50,), 100.0))


@pytest.mark.parametrize("damage", ["flip", "version", "truncate", "empty", "foreign"])
def test_a_damaged_newest_falls_back_and_says_so(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint.save_checkpoint(tmp_path, 1, _state(1))
    newest = checkpoint.save_checkpoint(tmp_path, 2, _state(2))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    damaged = {"flip": bytes(content), "truncate": bytes(content[:-7]), "empty": b"", "foreign": b"PK\x03\x04" * 99}
    damaged["version"] = newest.read_bytes().replace(b"softprune checkpoint 3 ", b"softprune checkpoint x ")
    newest.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING):
        assert checkpoint.read_newest(tmp_path)[0].name == "step-0000000001.ckpt"
    assert "Trying the previous checkpoint" in caplog.text
    assert newest.read_bytes() == damaged[damage], "who only reads changes nothing"
    # The next save keeps the good one.
    checkpoint.save_checkpoint(tmp_path, 2, _state(2))
    assert checkpoint.read_newest(tmp_path)[1]["step"] == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_without_checkpoints_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Got none in .*, and no valid one\. Restore"):
        checkpoint.read_newest(tmp_path)


def test_a_checkpoint_of_another_version_is_left_alone(tmp_path: Path) -> None:
    path = checkpoint.save_checkpoint(tmp_path, 1, _state(1))
    path.write_bytes(path.read_bytes().replace(b"softprune checkpoint 3 ", b"softprune checkpoint 2 "))
    with pytest.raises(CheckpointError, match="Got version 2"):
        checkpoint.read_newest(tmp_path)
    assert path.exists()


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = checkpoint.save_checkpoint(tmp_path, 1, _state(1))
    content = path.read_bytes()
    places = [*range(0, len(content), 97), *range(len(content) - 120, len(content))]
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 0x11
        path.write_bytes(changed)
        with pytest.raises(CheckpointError):
            checkpoint.read_checkpoint(path)


def test_other_content_with_a_right_checksum_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save_checkpoint(tmp_path, 1, _state(1))
    for content in ([1, 2], {"a": Path}):
        checkpoint.save_checkpoint(tmp_path, 1, content)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match="A checkpoint must hold"):
            checkpoint.read_checkpoint(path)


def numpy_draw() -> list[float]:
    return np.random.standard_normal(3).tolist()  # noqa: NPY002


def test_random_states_go_back(tmp_path: Path) -> None:
    device = torch.device("cpu")
    state = checkpoint.random_state(device)
    checkpoint.save_checkpoint(tmp_path, 1, {"random": state})
    expected = (torch.rand(3), random.random(), numpy_draw())
    checkpoint.set_random_state(checkpoint.read_newest(tmp_path)[1]["random"], device)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert numpy_draw() == expected[2]
