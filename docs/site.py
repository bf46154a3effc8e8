"""Hooks of the documentation site.

The cards of the methods enter the navigation by themselves, and the classes that they name enter the API page. Links to
files of the repository outside docs/ lead to GitHub: the site has no copy of those files. A link to a file that
does not exist stays, and fails the strict build.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CARDS = sorted((ROOT / "docs" / "methods").glob("*.md"))
REPOSITORY = "https://github.com/softprune/softprune/blob/main"
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Append the cards of the methods that the navigation does not name, in alphabetical order."""
    cards = next(section["Methods"] for section in config.nav if "Methods" in section)
    found = (f"methods/{path.name}" for path in CARDS)
    cards += [card for card in found if card not in cards]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links that leave docs/ lead to GitHub in a page, and replace ``softprune.methods.*`` by the pruners that the
    cards name."""
    folder = Path(page.file.abs_src_path).parent

    def replace(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(ROOT / "docs") or not target.exists():
            return match[0]
        return f"[{match[1]}]({REPOSITORY}/{target.relative_to(ROOT)}{match[3] or ''})"

    named = re.findall(r"`softprune\.methods\.(\w+Pruner)`", "".join(card.read_text("utf-8") for card in CARDS))
    listed = "\n\n".join(f"::: softprune.methods.{name}" for name in dict.fromkeys(named))
    return _LINK.sub(replace, markdown).replace("::: softprune.methods.*", listed)
