"""HTML and SVG as strings that are escaped unless they were made here.

``el`` is the only way markup comes into being: text and attribute values are escaped, and only a
``Markup`` (the result of another ``el``) passes through untouched. A run named ``<script>`` therefore
prints as its name wherever it appears.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_VOID = frozenset({"meta", "br", "hr", "input", "link"})


class Markup(str):
    """Text that is already HTML. Made by ``el``, ``join`` and ``raw`` only."""

    __slots__ = ()


Child = Markup | str | int | None
Attribute = str | int | float | bool | None


def raw(text: str) -> Markup:
    """Trust ``text`` as HTML. For the package's own assets, never for anything read from a record."""
    return Markup(text)


def join(parts: Iterable[Child], separator: str = "") -> Markup:
    """Concatenate children, escaping those that are not markup yet."""
    return Markup(separator.join(_child(part) for part in parts))


def el(tag: str, *children: Child, **attributes: Attribute) -> Markup:
    """One element. ``class_`` and ``for_`` lose the underscore, ``stroke_width`` becomes ``stroke-width``.

    An attribute that is ``None`` or ``False`` is left out; ``True`` writes the bare name.
    """
    head = [tag]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        name = key.rstrip("_").replace("_", "-")
        head.append(name if value is True else f'{name}="{escape(_plain(value))}"')
    opening = f"<{' '.join(head)}>"
    if tag in _VOID:
        return Markup(opening)
    return Markup(f"{opening}{join(children)}</{tag}>")


def num(value: float, digits: int = 1) -> str:
    """A coordinate: at most ``digits`` decimals, no trailing zeros, no negative zero."""
    text = f"{value:.{digits}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _plain(value: str | int | float | bool) -> str:
    return num(value, 2) if isinstance(value, float) else str(value)


def _child(child: Child) -> str:
    if child is None:
        return ""
    return child if isinstance(child, Markup) else escape(str(child))
