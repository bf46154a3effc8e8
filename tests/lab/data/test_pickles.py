"""Pickles are read as data: nothing that they name is run unless it is on the list."""

import contextlib
import os
import pickle
import tracemalloc

import numpy as np
import pytest

from softprune.errors import DataError
from softprune.lab.data.pickles import read_pickle


class _Runs:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_what_python_3_writes(tmp_path, protocol):
    path = tmp_path / "file"
    content = {b"data": np.arange(12, dtype=np.uint8).reshape(3, 4), b"n": [1, 2], b"": b"", "t": "x\xe9"}
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    got = read_pickle(path)
    assert got.keys() == content.keys()
    assert np.array_equal(got[b"data"], content[b"data"])
    assert got[b"n"] == [1, 2]
    assert got[b""] == b""
    assert got["t"] == "x\xe9"


def test_code_in_a_pickle_is_not_run(tmp_path):
    path, proof = tmp_path / "file", tmp_path / "proof"
    path.write_bytes(pickle.dumps(_Runs(os.mkdir, str(proof))))
    with pytest.raises(DataError, match="mkdir"):
        read_pickle(path)
    assert not proof.exists()


@pytest.mark.parametrize(
    "content",
    [
        _Runs(eval, "1"),
        _Runs(getattr, "x", "upper"),
        _Runs(bytes, 10**12),
        _Runs(np.empty(0).__reduce__()[0], np.ndarray, (10**12,), b"b"),
        _Runs(np.load, "x"),
    ],
    ids=["eval", "getattr", "huge bytes", "huge array", "np.load"],
)
def test_refused_calls(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match="plain data"):
        read_pickle(path)


def test_a_file_does_not_change_what_it_may_call(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"c_codecs\nencode\n}S'name'\nI1\nsb.")
    with pytest.raises(DataError, match="a state for something else than an array"):
        read_pickle(path)


def test_truncated_and_missing(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps({"data": np.zeros(1000)})[:-50])
    with pytest.raises(DataError, match="damaged"):
        read_pickle(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_pickle(tmp_path / "nothing")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}r\xff\xff\xff\x7f.",  # an entry of the memo beyond all others
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
        b"\x80\x05\x96" + b"\x00" * 5 + b"\x01\x00\x00.",
        b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f.",
    ],
    ids=["memo", "bytes", "bytearray", "frame"],
)
def test_lengths_in_a_file_decide_no_memory(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    tracemalloc.start()
    with contextlib.suppress(DataError):
        assert read_pickle(path) == {}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6
