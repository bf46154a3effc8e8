"""Dataclasses as a schema: check values against the annotations, and say the nearest valid key or value.

A section of a configuration is a keyword-only dataclass that derives from :class:`Section`. Its annotations
are the rules: plain types, ``Literal`` for a choice, ``Annotated[float, more_than(0)]`` for a range. A
section checks itself when it is made, so that configurations built in Python and those read from TOML fail
the same way.
"""

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from softprune.errors import ConfigError, nearest

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must satisfy besides its type; ``text`` completes the sentence "KEY must be ..."."""

    text: str
    holds: Callable[[Any], bool]


def at_least(low: float) -> Rule:
    """The value is ``low`` or more."""
    return Rule(f"{low:g} or more", lambda value: value >= low)


def more_than(low: float) -> Rule:
    """The value is above ``low``."""
    return Rule(f"more than {low:g}", lambda value: value > low)


def between(low: float, high: float) -> Rule:
    """The value lies in [``low``, ``high``)."""
    return Rule(f"at least {low:g} and less than {high:g}", lambda value: low <= value < high)


class Section:
    """Base of the configuration's dataclasses: every field is checked on construction."""

    section: ClassVar[str] = ""
    """The section's key in the TOML file, for messages; empty for the top level."""

    def __post_init__(self) -> None:
        hints = hints_of(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            key = f"{self.section}.{field.name}" if self.section else field.name
            value = check(key, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Rules that involve several fields; override where a section has any."""


def hints_of(section: type) -> dict[str, Any]:
    """The field annotations of a dataclass, with ``Annotated`` kept."""
    return get_type_hints(section, include_extras=True)


def check(key: str, value: Any, annotation: Any) -> Any:
    """``value`` as ``annotation`` demands (a list becomes a tuple, an int a float), or a ConfigError naming
    ``key``."""
    rules: tuple[Rule, ...] = ()
    if get_origin(annotation) is Annotated:
        annotation, *extras = get_args(annotation)
        rules = tuple(extra for extra in extras if isinstance(extra, Rule))
    value = _check_type(key, value, annotation)
    for rule in rules:
        if not rule.holds(value):
            raise ConfigError(f"{key} must be {rule.text}. Got {value!r}.")
    return value


def _check_type(key: str, value: Any, annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin is Literal:
        return _check_choice(key, value, get_args(annotation))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong_type(key, value, annotation)
        inner = get_args(annotation)[0]
        return tuple(check(f"{key}[{index}]", item, inner) for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong_type(key, value, annotation)
        inner = get_args(annotation)[1]
        return {str(name): check(f"{key}.{name}", item, inner) for name, item in value.items()}
    if origin in (Union, types.UnionType):
        return _check_union(key, value, annotation)
    if annotation is Any:
        return value
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # bool is an int to Python, but `epochs = true` is a mistake.
    if not isinstance(value, annotation) or (isinstance(value, bool) and annotation is int):
        raise _wrong_type(key, value, annotation)
    if annotation is float and not math.isfinite(value):
        raise ConfigError(f"{key} must be a finite number. Got {value}.")
    return value


def _check_choice(key: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return value
    listed = ", ".join(repr(choice) for choice in choices)
    raise ConfigError(
        f"{key} must be one of {listed}. Got {value!r}.{nearest(str(value), map(str, choices))}"
    )


def _check_union(key: str, value: Any, annotation: Any) -> Any:
    for option in get_args(annotation):
        try:
            return check(key, value, option)
        except ConfigError:
            continue
    raise _wrong_type(key, value, annotation)


def _wrong_type(key: str, value: Any, annotation: Any) -> ConfigError:
    return ConfigError(f"{key} must be {type_in_words(annotation)}. Got {value!r} ({_toml_type(value)}).")


def type_in_words(annotation: Any) -> str:
    """An annotation as a reader of TOML would say it."""
    if get_origin(annotation) is Annotated:
        annotation, *extras = get_args(annotation)
        rules = [extra.text for extra in extras if isinstance(extra, Rule)]
        return ", ".join([type_in_words(annotation), *rules])
    origin = get_origin(annotation)
    if origin is Literal:
        choices = [f'"{c}"' if isinstance(c, str) else str(c) for c in get_args(annotation)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if origin is tuple:
        return f"a list ({type_in_words(get_args(annotation)[0])} each)"
    if origin is dict:
        return "a table"
    if origin in (Union, types.UnionType):
        options = [type_in_words(option) for option in get_args(annotation)]
        return (", or " if any("," in option for option in options) else " or ").join(options)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}
    return words.get(annotation, "a table" if dataclasses.is_dataclass(annotation) else "a value")


def _toml_type(value: Any) -> str:
    words = {bool: "true/false", int: "a whole number", float: "a number", str: "text"}
    if isinstance(value, Mapping):
        return "a table"
    return words.get(type(value), "a list" if isinstance(value, list | tuple) else type(value).__name__)


def keys_of(section: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every settable key below ``section``, dotted, with its annotation, in file order."""
    for name, annotation in hints_of(section).items():
        if get_origin(annotation) is ClassVar or name.startswith("_"):
            continue
        key = f"{prefix}{name}"
        if dataclasses.is_dataclass(annotation):
            assert isinstance(annotation, type)
            yield from keys_of(annotation, f"{key}.")
        else:
            yield key, annotation


def build(section: type[T], values: Mapping[str, Any], prefix: str = "", root: type | None = None) -> T:
    """A dataclass from nested mappings, refusing unknown keys."""
    root = root or section
    hints = {f.name: hints_of(section)[f.name] for f in dataclasses.fields(section)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise unknown_key(key, root)
        annotation = hints[name]
        if dataclasses.is_dataclass(annotation):
            assert isinstance(annotation, type)
            if not isinstance(value, Mapping):
                raise ConfigError(f"{key} is a section: write [{key}] or {key}.NAME = ... Got {value!r}.")
            arguments[name] = build(annotation, value, f"{key}.", root)
        else:
            arguments[name] = check(key, value, annotation)
    try:
        return section(**arguments)
    except ValueError as error:
        if issubclass(section, Section):
            raise
        # A section that another room owns knows its class's name but not where in the file it is.
        raise ConfigError(f"[{prefix.rstrip('.')}] {error}") from error


def unknown_key(key: str, root: type) -> ConfigError:
    """The error for a key that is nowhere in ``root``, with the closest one that is."""
    known = [name for name, _ in keys_of(root)]
    below = [name for name in known if name.startswith(f"{key}.")]
    if below:
        return ConfigError(
            f"One key of a section is set at a time, such as {below[0]}=... Got {key!r}, which is the section of "
            f"{', '.join(below)}."
        )
    section, _, last = key.rpartition(".")
    # A key in the wrong section (`train.lr`) is nearer by its last part than by its spelling.
    moved = [name for name in known if name.rpartition(".")[2] == last]
    inside = [name for name in known if name.rpartition(".")[0] == section]
    if not section:
        inside = list(dict.fromkeys(name.partition(".")[0] for name in known))  # the names of sections, too
    if 1 <= len(moved) <= 3:
        hint = f" Did you mean {' or '.join(map(repr, moved))}?"
    elif inside:
        close = difflib.get_close_matches(last, [name.rpartition(".")[2] for name in inside], n=1)
        hint = f" Did you mean {f'{section}.{close[0]}'.lstrip('.')!r}?" if close else ""
    else:
        hint = nearest(key, known)
    if not hint:
        hint = f" Known here: {', '.join(inside or sorted({name.partition('.')[0] for name in known}))}."
    return ConfigError(f"Every key must be one that the configuration knows. Got {key!r}.{hint}")


def field_docs(section: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, by field name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs
