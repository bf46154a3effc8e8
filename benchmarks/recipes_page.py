"""The recipe reference (docs/recipes.md), generated from the configuration.

python benchmarks/recipes_page.py
"""

import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from softprune.lab.config.recipes import RECIPES, config_to_dict, title_of
from softprune.lab.config.settings import RunConfig

_INTRODUCTION = """\
# Recipes

A recipe is a TOML file with what differs from the defaults below. `softprune train NAME` takes one that comes with
softprune, `softprune train my.toml` one of yours, and `--set optimizer.lr=0.05` changes one setting for one run. The
resolved configuration is written to `config.toml` in the folder of the run.

A complete recipe, `flowers.toml`, for a pretrained network and a folder of images:

```toml
# ResNet-18 with ImageNet weights, pruned to half of its MACs while it learns the classes of the folder.
name = "flowers-resnet18-half"        # name in tables, and of the folder runs/NAME
seed = 0

[model]
name = "torchvision.models:resnet18"  # or a name from `softprune models`, or module:factory of your own
pretrained = true                     # torchvision's weights; the head is new, since the classes differ

[data]
name = "folder"                       # flowers/train/CLASS/*.jpg and flowers/val/CLASS/*.jpg
dir = "flowers"
image_size = 224
holdout = 500                         # the best epoch is chosen on these training images, not on the test set
batch_size = 64
erasing = 0.25

[train]
epochs = 30
dense_baseline = true                 # also train without pruning, to compare with
label_smoothing = 0.1

[optimizer]
name = "adamw"
lr = 0.0005
weight_decay = 0.05

[schedule]
kind = "cosine"
warmup_epochs = 2.0

[method]
name = "scp"
target = { macs = 0.5 }               # at most half of the MACs; also params, channels, latency

[records]
checkpoint_seconds = 300
```

`softprune train flowers.toml --dry-run` checks it, `softprune train flowers.toml` trains it.

`python benchmarks/recipes_page.py` generates this page from `softprune.lab.config.settings`.
"""


def render_reference() -> str:
    """Return the page as Markdown."""
    defaults = config_to_dict(RunConfig())
    fields = RunConfig.model_fields
    sections = {name: field.annotation for name, field in fields.items() if hasattr(field.annotation, "model_fields")}
    top = {name: default for name, default in defaults.items() if name not in sections}
    parts = [_INTRODUCTION, "## Recipes that come with softprune\n", _recipe_table(), "## Top level\n"]
    parts.append(_section_table(RunConfig, top))
    for name, section in sections.items():
        purpose = " ".join((section.__doc__ or "").partition("\n\n")[0].split())
        parts += [f"## [{name}]\n\n{purpose}\n", _section_table(section, defaults[name])]
    return "\n".join(parts)


def _section_table(section: Any, defaults: dict[str, Any]) -> str:
    lines = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for name, default in defaults.items():
        values = _values(section.model_fields[name])
        cells = [f"`{name}`", f"`{json.dumps(default)}`", values, _description(section, name)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _values(field: Any) -> str:
    """Return what a setting can be, such as "a number, more than 0"."""
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    rules = [(name, getattr(rule, name)) for rule in field.metadata for name in words if hasattr(rule, name)]
    bounds = " and ".join(f"{words[name]} {bound}" for name, bound in rules)
    return ", ".join(filter(None, [_in_words(field.annotation), bounds]))


def _in_words(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_in_words, inner))
    kinds = {tuple: "a list", dict: "a table", bool: "true or false", int: "a whole number", float: "a number"}
    return kinds.get(origin or annotation, "text" if annotation is str else _in_words(inner[0]) if inner else "a value")


def _description(section: type[BaseModel], name: str) -> str:
    return " ".join((section.model_fields[name].description or "").split())


def _recipe_table() -> str:
    lines = ["| recipe | what it is |", "|---|---|"]
    lines += [f"| `{name}` | {title_of(file)} |" for name, file in RECIPES.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "recipes.md").write_text(render_reference(), encoding="utf-8")
