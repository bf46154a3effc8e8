"""What the header of a saved network holds, and which headers are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_files import rewrite
from torch import Tensor, nn

import softprune as sp
from softprune.cut import Origin, apply_plan, make_plan, read_origin
from softprune.cut.saved import LARGEST_INPUT, signed
from softprune.errors import FileFormatError, ModelError
from softprune.graph import trace


def dense() -> nn.Sequential:
    """Two convolutions of the same shapes."""
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1)).eval()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = dense()
    plan = make_plan(trace(model, torch.randn(2, 3, 4, 4)), model, {})
    return sp.save(apply_plan(plan, model), tmp_path / "net", origin=Origin("a", "b", (3, 4, 4)))


def header_of(content: bytes) -> tuple[bytes, bytes]:
    """The header as text, and the data."""
    end = 8 + int.from_bytes(content[:8], "little")
    return content[8:end], content[end:]


@pytest.mark.parametrize("length", range(8))
def test_a_header_is_sorted_aligned_and_no_longer_than_that(length: int) -> None:
    text, _ = header_of(signed({"weight": torch.zeros(1)}, {"b": "x" * length, "a": 1}))
    metadata = json.loads(text)["__metadata__"]
    assert list(metadata) == ["format", "sha256", "softprune"]
    assert metadata["softprune"] == f'{{"a":1,"b":"{"x" * length}"}}'
    assert len(text) % 8 == 0
    assert len(text) - len(text.rstrip()) < 8


def test_the_checksum_is_of_the_header_too(file: Path) -> None:
    text, data = header_of(file.read_bytes())
    header = json.loads(text)
    header["0.weight"], header["3.weight"] = header["3.weight"], header["0.weight"]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(FileFormatError, match="does not match its checksum"):
        sp.load(file, dense())


@pytest.mark.parametrize("origin", [None, [], "vgg16", {}])
def test_an_origin_must_be_an_object_with_its_keys(file: Path, origin: object) -> None:
    assert read_origin(file) == Origin("a", "b", (3, 4, 4))
    rewrite(file, lambda document: document.update(origin=origin))
    assert read_origin(file) is None


@pytest.mark.parametrize(
    ("key", "value", "makes_sense"),
    [
        ("model", 1, False),
        ("data", None, False),
        ("input_shape", "344", False),
        ("input_shape", [3, "4"], False),
        ("input_shape", [3, 0], False),
        ("input_shape", [True, 4], False),
        ("input_shape", [1] * 9, False),
        ("input_shape", [1] * 8, True),
        ("input_shape", [LARGEST_INPUT], True),
        ("input_shape", [], True),
    ],
)
def test_an_origin_that_makes_no_sense_is_none(file: Path, key: str, value: Any, makes_sense: bool) -> None:
    rewrite(file, lambda document: document["origin"].update({key: value}))
    assert (read_origin(file) is not None) == makes_sense


@pytest.mark.parametrize("plans", [[], {}, {"0": 1}, "x", None])
def test_a_file_needs_a_list_of_plans(file: Path, plans: Any) -> None:
    rewrite(file, lambda document: document.update(plans=plans))
    with pytest.raises(FileFormatError, match="has no plans in its metadata"):
        sp.load(file, dense())


def test_counts_may_not_be_stored_as_floats(file: Path) -> None:
    def as_float(tensors: dict[str, Tensor]) -> None:
        tensors["1.num_batches_tracked"] = torch.tensor(0.0)

    rewrite(file, tensors=as_float)
    with pytest.raises(FileFormatError, match=r"'1\.num_batches_tracked' is torch\.int64\. Got torch\.float32"):
        sp.load(file, dense())


def test_a_buffer_on_the_meta_device_is_refused(file: Path) -> None:
    model = dense()
    model[1].running_mean = torch.empty(3, device="meta")
    with pytest.raises(ModelError, match=r"'1\.running_mean' on the meta device"):
        sp.load(file, model)


def test_a_missing_file_is_not_taken_for_another_one(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"No such file or directory\.$"):
        sp.load(tmp_path / "none", dense())
