"""The recipe reference (docs/recipes.md), generated from the configuration's dataclasses."""

import dataclasses
from typing import Any

from softprune.config import toml
from softprune.config.recipes import config_to_dict
from softprune.config.schema import field_docs, hints_of, type_in_words
from softprune.config.settings import RunConfig
from softprune.config.shipped import recipe_names, recipe_title

_INTRODUCTION = """\
# Recipes

A recipe is a TOML file with a run's differences from the defaults below. `softprune train NAME` takes one
that ships with softprune, `softprune train my.toml` one of yours, and `--set optimizer.lr=0.05` changes one
setting for one run. The resolved configuration is written to `config.toml` in the run's folder.

This page is generated from the dataclasses in `softprune.config.settings` by `python -m
softprune.config.reference`; a test keeps the two in step.
"""


def render_reference() -> str:
    """The page as Markdown."""
    defaults = config_to_dict(RunConfig())
    docs, hints = field_docs(RunConfig), hints_of(RunConfig)
    sections = [
        field.name for field in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(hints[field.name])
    ]
    top = {name: default for name, default in defaults.items() if name not in sections}
    parts = [_INTRODUCTION, "## Recipes that ship with softprune\n", _recipe_table(), "## Top level\n"]
    parts.append(_section_table(RunConfig, top))
    for name in sections:
        parts += [f"## [{name}]\n\n{docs[name]}\n", _section_table(hints[name], defaults[name])]
    return "\n".join(parts)


def _section_table(section: Any, defaults: dict[str, Any]) -> str:
    docs, hints = field_docs(section), hints_of(section)
    lines = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for name, default in defaults.items():
        shown = (
            toml.dumps({"x": default}).removeprefix("x = ").strip() if not isinstance(default, dict) else "{}"
        )
        cells = [f"`{name}`", f"`{shown}`", type_in_words(hints[name]), docs.get(name, "")]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _recipe_table() -> str:
    lines = ["| recipe | what it is |", "|---|---|"]
    lines += [f"| `{name}` | {recipe_title(name)} |" for name in recipe_names()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from pathlib import Path

    Path("docs/recipes.md").write_text(render_reference(), encoding="utf-8")
