"""The recipe reference (docs/recipes.md), generated from the configuration."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from softprune.config.recipes import config_to_dict, inline_toml, recipe_files, title_of
from softprune.config.schema import annotation_of, is_section, type_in_words
from softprune.config.settings import RunConfig

_INTRODUCTION = """\
# Recipes

A recipe is a TOML file with what differs from the defaults below. `softprune train NAME` takes one that comes with
softprune, `softprune train my.toml` one of yours, and `--set optimizer.lr=0.05` changes one setting for one run. The
resolved configuration is written to `config.toml` in the folder of the run.

`python -m softprune.config.reference` generates this page from `softprune.config.settings`.
"""


def render_reference() -> str:
    """Return the page as Markdown."""
    defaults = config_to_dict(RunConfig())
    fields = RunConfig.model_fields
    sections = {name: field.annotation for name, field in fields.items() if is_section(field.annotation)}
    top = {name: default for name, default in defaults.items() if name not in sections}
    parts = [_INTRODUCTION, "## Recipes that come with softprune\n", _recipe_table(), "## Top level\n"]
    parts.append(_section_table(RunConfig, top))
    for name, section in sections.items():
        parts += [
            f"## [{name}]\n\n{_description(RunConfig, name)}\n",
            _section_table(section, defaults[name]),
        ]
    return "\n".join(parts)


def _section_table(section: Any, defaults: dict[str, Any]) -> str:
    lines = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for name, default in defaults.items():
        values = type_in_words(annotation_of(section, name))
        cells = [f"`{name}`", f"`{inline_toml(default)}`", values, _description(section, name)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _description(section: type[BaseModel], name: str) -> str:
    return " ".join((section.model_fields[name].description or "").split())


def _recipe_table() -> str:
    lines = ["| recipe | what it is |", "|---|---|"]
    lines += [f"| `{name}` | {title_of(file)} |" for name, file in recipe_files().items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path("docs/recipes.md").write_text(render_reference(), encoding="utf-8")
