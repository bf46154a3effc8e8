"""Dataclasses as a schema: what is refused, and what the message names."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import pytest

from softprune.config.schema import Section, at_least, between, build, field_docs, keys_of
from softprune.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner(Section):
    section: ClassVar[str] = "inner"

    rate: Annotated[float, between(0, 1)] = 0.5
    """How
    much."""
    kind: Literal["step", "cosine"] = "step"
    """Which."""
    epochs: tuple[Annotated[int, at_least(1)], ...] = ()
    """When."""


@dataclass(frozen=True, kw_only=True)
class Outer(Section):
    steps: Annotated[int, at_least(1)] = 1
    inner: Inner = field(default_factory=Inner)


def test_values_become_what_the_annotations_say() -> None:
    built = build(Outer, {"steps": 3, "inner": {"rate": 0, "epochs": [1, 2]}})
    assert built == Outer(steps=3, inner=Inner(rate=0.0, epochs=(1, 2)))
    assert isinstance(built.inner.rate, float)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"stepz": 1}, ["'stepz'", "Did you mean 'steps'?"]),
        ({"inner": {"rat": 1}}, ["'inner.rat'", "Did you mean 'inner.rate'?"]),
        ({"rate": 0.5}, ["'rate'", "Did you mean 'inner.rate'?"]),
        ({"inner": {"zzz": 1}}, ["'inner.zzz'", "Known here: inner.rate, inner.kind, inner.epochs"]),
        ({"steps": "many"}, ["steps must be a whole number", "Got 'many' (text)"]),
        ({"steps": True}, ["steps must be a whole number", "true/false"]),
        ({"steps": 1.5}, ["steps must be a whole number"]),
        ({"steps": 0}, ["steps must be 1 or more", "Got 0"]),
        ({"inner": 3}, ["inner is a section"]),
        ({"inner": {"rate": 1.0}}, ["inner.rate must be at least 0 and less than 1"]),
        ({"inner": {"rate": float("nan")}}, ["inner.rate must be a finite number", "Got nan"]),
        ({"inner": {"rate": float("inf")}}, ["inner.rate must be a finite number", "Got inf"]),
        (
            {"inner": {"kind": "cosin"}},
            ["inner.kind must be one of 'step', 'cosine'", "Did you mean 'cosine'?"],
        ),
        ({"inner": {"epochs": 3}}, ["inner.epochs must be a list"]),
        ({"inner": {"epochs": [3, 0]}}, ["inner.epochs[1] must be 1 or more"]),
    ],
)
def test_errors_name_the_key_the_rule_and_the_nearest(values: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Outer, values)
    for part in parts:
        assert part in str(caught.value)


def test_a_section_made_in_python_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"inner\.rate must be at least 0"):
        Inner(rate=2.0)


def test_keys_and_docstrings_are_found() -> None:
    assert [key for key, _ in keys_of(Outer)] == ["steps", "inner.rate", "inner.kind", "inner.epochs"]
    assert field_docs(Inner) == {"rate": "How much.", "kind": "Which.", "epochs": "When."}
