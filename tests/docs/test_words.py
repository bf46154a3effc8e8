"""Code, messages and documents use the words of docs/glossary.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WORDS = {
    r"anew": "again",
    r"by lot": "at random",
    r"mend(s|ed|ing)?": "fix, repair",
    r"go(es|ing)? on with": "resume, continue",
    r"so many": "the number",
    r"(some|no)body": "name who, or use the passive",
    r"the house": "the project",
    r"rooms|(later|this|each|every) room": "package",
    r"behind": "after",
    r"silent(ly)? channels?|silences?": "dead",
    r"ballast": "dead kept channel",
    r"settles?|settled|settlement": "finalise",
    r"in earnest": "for real",
    r"by way of": "as, for",
    r"go on": "continue",
}
"""A pattern that is not used any more, and what to write."""

CHECKED = ["src/softprune", "docs", "examples", "benchmarks", "README.md", "CONTRIBUTING.md"]


def _files() -> list[Path]:
    found = []
    for name in CHECKED:
        path = ROOT / name
        found += [path] if path.is_file() else sorted(path.rglob("*"))
    kinds = (".py", ".md", ".toml", ".html", ".js")
    return [file for file in found if file.is_file() and file.suffix in kinds]


def _private_words(file: Path) -> list[str]:
    found = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        for pattern, instead in WORDS.items():
            if match := re.search(rf"(?<![\w-])(?:{pattern})(?![\w-])", line, re.IGNORECASE):
                place = f"{file.relative_to(ROOT)}:{number}"
                found.append(f"{place}: {match[0]!r}: write {instead!r}")
    return found


def test_no_word_of_a_private_vocabulary() -> None:
    files = _files()
    assert len(files) > 200
    found = [line for file in files for line in _private_words(file)]
    assert not found, "\n".join(found)


def test_private_words_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "page.md").write_text("A channel behind the layer.\nA --go-on flag.\n")
    assert len(_private_words(tmp_path / "page.md")) == 1


def test_the_glossary_explains_each_word_once() -> None:
    words = re.findall(r"^\*\*(.+?)\*\*", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert len(words) > 30
    assert len(set(words)) == len(words)
