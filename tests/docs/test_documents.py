"""The code in the README and the guides runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest

import softprune as sp

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "docs/quickstart.md",
    "docs/how-it-works.md",
    "docs/budgets.md",
    "docs/export.md",
    "docs/bench.md",
]
NEEDS = {"docs/export.md": ("onnxruntime", "onnxscript")}
"""Packages of an extra that a document's code needs."""


def python_blocks(text: str) -> list[str]:
    """The Python code blocks of a Markdown text, in order."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_code_in_documents_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = python_blocks((ROOT / name).read_text())
    assert blocks
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package, reason=f"{package}, of an extra, is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n".join(blocks), name, "exec"), namespace)
    if "small" in namespace:
        assert (tmp_path / "small.safetensors").exists()
    if name == "README.md":
        dense, small = (sp.cost(namespace[key], namespace["example"]).macs for key in ("model", "small"))
        assert 0.49 * dense <= small <= 0.5 * dense


@pytest.mark.parametrize("name", [*DOCUMENTS, "docs/integrations.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_between_documents_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / name).parent / target).exists(), target
