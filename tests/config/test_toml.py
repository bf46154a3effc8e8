"""What the writer writes, the standard library reads back."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softprune.config import toml

_plain = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",)))
)
_tables = st.recursive(
    st.dictionaries(
        st.text(min_size=1, alphabet="ab.-_ \"'é"), _plain | st.lists(_plain, max_size=3), max_size=4
    ),
    lambda inner: st.dictionaries(st.text(min_size=1, alphabet="abc"), inner, max_size=3),
    max_leaves=6,
)


@given(_tables)
def test_round_trip(values: dict[str, Any]) -> None:
    assert tomllib.loads(toml.dumps(values)) == values


def test_what_toml_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        toml.dumps({"a": None})
