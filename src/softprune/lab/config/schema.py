"""The base of all sections of a recipe, and pydantic's errors as a ConfigError with rule, value and remedy."""

import difflib
import re
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeGuard, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from softprune.errors import ConfigError, nearest, show, storable, toml_type
from softprune.log import get_logger

logger = get_logger(__name__)


class Section(BaseModel):
    """A section of a recipe: immutable, and checked when it is made in Python or read from TOML.

    The annotations are the rules, and the docstring under a field is its description in docs/recipes.md.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    section: ClassVar[str]
    """The key of the section in a recipe; empty for the top level."""
    removed: ClassVar[Mapping[str, Any]] = {}
    """Settings of earlier versions, with their defaults. Files that have them can be read; others are reported."""
    root: ClassVar[type["Section"] | None] = None
    """The top level, for suggestions when a key stands in the wrong section."""

    def __init_subclass__(cls, section: str = "", **options: Any) -> None:
        cls.section = section
        super().__init_subclass__(**options)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            # TypeErrors and the like of pydantic mean nothing to who writes recipes.
            raise _to_config_error(error.errors()[0], type(self)) from None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_removed(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not cls.removed.keys() & values.keys():
            return values
        for key, default in cls.removed.items():
            if values.get(key, default) != default:
                what = f"{_join(cls.section, key)} = {show(values[key])}"
                logger.warning("softprune: %s is a setting of an earlier version, and has no effect", what)
        return {key: value for key, value in values.items() if key not in cls.removed}

    @field_validator("*", mode="after")
    @classmethod
    def _check_text(cls, value: Any, info: ValidationInfo) -> Any:
        # Names are printed to terminals, and are parts of paths.
        if isinstance(value, str) and storable(value) != value:
            key = _join(cls.section, info.field_name or "")
            raise ConfigError(f"{key} must have no control characters. Got {show(value)}.")
        return value

    def replace(self, **changes: Any) -> Self:
        """Return a copy with ``changes``, checked as a new section is."""
        return type(self)(**{**dict(self), **changes})


FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Accept a list, which is what TOML has, where a tuple is declared."""

Count = Annotated[int, Ge(0)]
PositiveCount = Annotated[int, Ge(1)]
Amount = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Lt(1)]
Globs = Annotated[tuple[str, ...], FromList]
Epochs = Annotated[tuple[PositiveCount, ...], FromList]
_Plain = bool | int | float | str
Options = dict[str, _Plain | list[_Plain] | dict[str, _Plain]]


def _to_config_error(error: ErrorDetails, section: type[Section]) -> ConfigError:
    """The first error of a section, in the words of a recipe."""
    if "error" in error.get("ctx", {}):
        return ConfigError(str(error["ctx"]["error"]))  # from a section inside, or a rule over several keys
    if error["type"] == "extra_forbidden":
        return unknown_key(_join(section.section, *map(str, error["loc"])), section.root or section)
    key, annotation = _locate(error["loc"], section)
    value = error["input"]
    if is_section(_bare(annotation)):
        return ConfigError(f"{key} is a section: write [{key}] or {key}.NAME = ... Got {show(value)}.")
    if error["type"] == "finite_number":
        return ConfigError(f"{key} must be a finite number. Got {show(value)}.")
    rule = type_in_words(annotation)
    may_be_text = isinstance(value, str) and get_origin(_bare(annotation)) is not tuple
    hint = nearest(value, re.findall('"(.*?)"', rule)) if may_be_text else ""  # the rule quotes choices
    if get_origin(_bare(annotation)) is dict and not isinstance(value, dict):
        hint = f" Write {key}.NAME = ... for each of its values."
    kind = "" if hint else f" ({toml_type(value)})"
    return ConfigError(f"{key} must be {rule}. Got {show(value)}{kind}.{hint}")


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _locate(location: tuple[int | str, ...], section: type[Section]) -> tuple[str, Any]:
    """The dotted key and the annotation at a location of pydantic, whose last parts may name a union's member."""
    key, annotation = section.section, Annotated[section, None]
    for part in location:
        inner = _bare(annotation)
        if is_section(inner) and part in inner.model_fields:
            key, annotation = _join(key, str(part)), annotation_of(inner, str(part))
        elif get_origin(inner) is tuple and isinstance(part, int):
            key, annotation = f"{key}[{part}]", get_args(inner)[0]
        elif get_origin(inner) is dict:
            key, annotation = f"{key}.{part}", get_args(inner)[1]
        else:
            break
    return key, annotation


def annotation_of(section: type[BaseModel], name: str) -> Any:
    """The annotation of a field with its rules."""
    field = section.model_fields[name]
    return Annotated[field.annotation, *field.metadata, None]


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    """Whether an annotation is a section with keys of its own."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def type_in_words(annotation: Any) -> str:
    """An annotation in the words of TOML, such as "a number, more than 0"."""
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        return ", ".join([type_in_words(annotation), *filter(None, [_bounds(metadata)])])
    origin = get_origin(annotation)
    if origin is Literal:
        choices = [f'"{c}"' if isinstance(c, str) else str(c) for c in get_args(annotation)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if origin is tuple:
        return f"a list ({type_in_words(get_args(annotation)[0])} each)"
    if origin in (dict, list):
        return "a table" if origin is dict else "a list"
    if origin in (Union, types.UnionType):
        options = [type_in_words(option) for option in get_args(annotation)]
        return (", or " if any("," in option for option in options) else " or ").join(options)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}
    return words.get(annotation, "a table" if is_section(annotation) else "a value")


def _bounds(rules: list[Any]) -> str:
    words = {Ge: ("at least", "ge"), Gt: ("more than", "gt"), Le: ("at most", "le"), Lt: ("less than", "lt")}
    parts = [f"{words[type(rule)][0]} {getattr(rule, words[type(rule)][1])}" for rule in rules if type(rule) in words]
    return " and ".join(parts)


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that can be set below ``section``, dotted, with its annotation, in the order of the file."""
    for name, field in section.model_fields.items():
        if is_section(field.annotation):
            yield from keys_of(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", annotation_of(section, name)


def unknown_key(key: str, root: type[Section]) -> ConfigError:
    """The error for a key that ``root`` does not have, with the closest one that it has."""
    known = [_join(root.section, name) for name, _ in keys_of(root)]
    below = [name for name in known if name.startswith(f"{key}.")]
    if below:
        return ConfigError(
            f"The keys of a section are set one by one, such as {below[0]}=... Got {key!r}, which is the section of "
            f"{', '.join(below)}."
        )
    section, _, last = key.rpartition(".")
    top = list(dict.fromkeys(name.partition(".")[0] for name in known))  # keys and sections
    inside = [name for name in known if name.rpartition(".")[0] == section] if section else top
    # A key in the wrong section (`train.lr`) is nearer by its last part than by its spelling.
    meant = [name for name in known if name.rpartition(".")[2] == last]
    # So is a key of a table without its section (`target.macs`).
    meant = meant or [_join(name, last) for name in known if section and name.endswith(f".{section}")]
    if not 1 <= len(meant) <= 3:
        close = difflib.get_close_matches(last, [name.rpartition(".")[2] for name in inside], n=1)
        meant = [_join(section, name) for name in close]
    if meant:
        hint = f" Did you mean {' or '.join(map(repr, meant))}?"
    else:
        hint = (nearest(key, known) if not inside else "") or f" Known here: {', '.join(inside or top)}."
    return ConfigError(f"A recipe must only have keys that exist. Got {show(key)}.{hint}")
