"""TOML that was damaged or crafted ends in a ConfigError; what is written reads back the same."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softprune.errors import ConfigError
from softprune.lab.config.recipes import inline_toml, load_recipe, read_config, read_toml

_plain = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",)))
)
_values = st.recursive(
    _plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.- \"'é", min_size=1), inner, max_size=3),
    max_leaves=6,
)


@given(_values)
def test_inline_values_read_back_the_same(value: Any) -> None:
    text = inline_toml(value)
    assert "\n" not in text
    assert tomllib.loads(f"x = {text}") == {"x": value}


CRAFTED = {
    "huge": b"seed = " + b"9" * 5000,
    "huge hexadecimal": b"seed = 0x" + b"f" * 5000,
    "over 64 bits": b"seed = 9223372036854775808",
    "over 64 bits in a list": b"[schedule]\nmilestones = [1, 99999999999999999999]",
    "deep list": b"seed = " + b"[" * 5000 + b"]" * 5000,
    "deep table": b".".join([b"a"] * 5000) + b" = 1",
    "nine levels": b"seed = " + b"[" * 9 + b"]" * 9,
    "latin-1": b'name = "caf\xe9"',
    "utf-16": 'name = "x"'.encode("utf-16"),
    "surrogate": b'name = "\xed\xa0\x80"',
    "escaped surrogate": b'name = "\\ud800"',
    "control character": b'name = "\x1b[31m"',
    "nul": b"\x00" * 100,
}


@pytest.mark.parametrize("content", CRAFTED.values(), ids=CRAFTED)
def test_crafted_files_are_config_errors(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    for read in (read_toml, read_config, lambda file: load_recipe(str(file))):
        with pytest.raises(ConfigError, match=r"config\.toml") as caught:
            read(path)
        str(caught.value).encode()
        assert len(str(caught.value)) < 800
        assert "\x1b" not in str(caught.value)


def test_text_has_no_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b'[model]\nname = "\\u001b[31m"')
    with pytest.raises(ConfigError, match=r"model\.name must have no control characters\. Got '\\x1b\[31m'"):
        read_config(path)


@pytest.mark.parametrize(
    "override",
    [
        f"seed={'9' * 5000}",
        f"seed=0x{'f' * 5000}",
        "seed=99999999999999999999",
        f"method.options.x={'[' * 5000}",
        f"method.options.{'a.' * 5000}x=1",
        "name=\udce9",
        "method.options.\udce9=1",
        "optimizer.lr=1\noptimizer.momentum=0",
        "seed=2020-01-01",
        "method.options.x=2020-01-01",
    ],
)
def test_crafted_overrides_are_config_errors(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("digits", [override])
    str(caught.value).encode()
    assert len(str(caught.value)) < 800
