"""One self-contained page from a template.

Jinja escapes everything that comes from a record. The content security policy names the hashes of the page's own style
sheet and script, so that nothing else can run, and the page cannot fetch.
"""

import base64
import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from softprune.errors import printable
from softprune.io import write_atomically
from softprune.lab.config.recipes import flat_settings
from softprune.lab.report import text
from softprune.lab.report.scales import num

HUES = 7
KEPT = f"\n\t{text.THIN}"
"""What is no printable character to Python and stands in pages."""


class Column(NamedTuple):
    """A column of a table with a row per record."""

    label: str
    value: Callable[[Any], Any]
    text: Callable[[Any], str]
    kind: str = "n"
    """The class of its cells; "spare": there is no room for it on a phone."""

    @property
    def head(self) -> tuple[str, str]:
        return self.label, self.kind


def style_of(index: int) -> str:
    """Colour and dash of an experiment: seven hues, dashed from the eighth experiment on."""
    return f"g{index % HUES} dash{index // HUES}" if index >= HUES else f"g{index % HUES}"


def write_page(target: Path, template: str, /, *, then: str, **context: Any) -> Path:
    """Write a page with style sheet, script and content security policy; `then` is the remedy if that fails."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _environment().get_template(template)
    html = page.render(policy=policy, style=Markup(style), script=Markup(script), **context)
    write_atomically(target, html.encode(errors="replace"), then=then)  # the name of a folder may be no text
    return target


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("softprune.lab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    own: dict[str, Callable[..., Any]] = {
        "flatten": lambda record: flat_settings(record.model_dump(mode="json")),
        "n": lambda value: num(value, 2),
        "exact": repr,
    }
    environment.filters |= dict(inspect.getmembers(text, inspect.isfunction)) | own
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.globals |= {"cut": text.cut, "style_of": style_of}
    return environment


def _shown(value: Any) -> Any:
    """Return text without control characters, such as those that change the direction of writing."""
    return printable(value, KEPT) if isinstance(value, str) and not isinstance(value, Markup) else value


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
