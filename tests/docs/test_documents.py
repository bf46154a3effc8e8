"""The code in the README and the guides runs as it stands there."""

import re
from pathlib import Path

import pytest

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
    # The loop is shown at full length; three epochs show that it works.
    code = "\n".join(blocks).replace("range(10)", "range(3)")
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile(code, name, "exec"), namespace)
    if "small" in namespace:
        assert (tmp_path / "small" / "weights.safetensors").exists()


@pytest.mark.parametrize("name", [*DOCUMENTS, "docs/integrations.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_between_documents_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / name).parent / target).exists(), target
