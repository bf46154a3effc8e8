"""The page around the sections: one file that needs nothing else, and lets nothing else run.

The content security policy names the hashes of the page's own style sheet and script. Anything that found its
way into the page in spite of the escaping would not run, and the page cannot fetch.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from importlib.resources import files

from softprune.report.markup import Markup, el, join, raw


def document(title: str, sections: Iterable[Markup], footer: Markup) -> str:
    """The whole HTML text, complete without JavaScript; the script adds read-outs, sorting and pickers."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="generator", content="softprune"),
        el("title", title),
        raw(f"<style>{style}</style>"),
    )
    body = el(
        "body",
        el("a", "Skip to the figures", href="#main", class_="skip"),
        el("main", join(sections, "\n"), id="main"),
        el("footer", footer),
        raw(f"<script>{script}</script>"),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
