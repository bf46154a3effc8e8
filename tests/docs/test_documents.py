"""The code in the README and the guides runs as it stands there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.core
import typer.main
from guides import NOTEBOOKS, RECORDS, notebook, outputs

import softprune as sp
from softprune.lab.cli import main
from softprune.lab.cli.app import app
from softprune.lab.config.recipes import RECIPES, load_recipe
from softprune.lab.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "docs/quickstart.md",
    "docs/how-it-works.md",
    "docs/budgets.md",
    "docs/distillation.md",
    "docs/export.md",
    "docs/speed.md",
    "docs/one-shot.md",
    "docs/sites.md",
    "docs/own-model.md",
]
NEEDS = {
    "docs/export.md": ("onnxruntime", "onnxscript"),
    "docs/own-model.md": ("torchvision", "onnxruntime", "onnxscript"),
}
"""Packages of an extra that a document's code needs."""


SHORTER = {
    "docs/own-model.md": {
        "images[:800": "images[:150",
        "epochs = 12": "epochs = 1",
        "5e-4), 4,": "5e-4), 1,",
        "train.dense_epochs=4": "train.dense_epochs=1",
        "batches=[1, 32], repeats=5": "batches=[1, 32], repeats=1",
        "--repeats 5": "--repeats 1",
    },
    "docs/speed.md": {"repeats=5": "repeats=1"},
    "README.md": {"epochs = 10": "epochs = 3"},
}
"""Numbers of a document that a test makes smaller: `benchmarks/guides.py` runs the guides as they stand."""


def document(name: str) -> str:
    """The text of a document, with fewer images and epochs where it trains for long."""
    text = (ROOT / name).read_text()
    for long, short in SHORTER.get(name, {}).items():
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    return text


def python_blocks(text: str) -> list[str]:
    """The Python code blocks of a Markdown text, in order."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.usefixtures("smaller_networks", "same_operators")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "own-model" in name else ()) for name in DOCUMENTS]
)
def test_code_in_documents_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = python_blocks(document(name))
    assert blocks
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package, reason=f"{package}, of an extra, is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n".join(blocks), name, "exec"), namespace)
    if "sp.save(small" in "".join(blocks):
        assert (tmp_path / "small.safetensors").exists()
    if name == "README.md":
        dense, small = (sp.cost(namespace[key], namespace["example"]).macs for key in ("model", "small"))
        assert 0.45 * dense <= small <= 0.5 * dense  # the steps are few


PAGES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", [*PAGES, "README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_between_documents_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / name).parent / target).exists(), target


def shell_commands(text: str) -> list[list[str]]:
    """The `softprune` commands of the last sh block of a Markdown text."""
    block = re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)[-1]
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("softprune ")]


def test_commands_in_documents_are_valid() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    seen = []
    for name in [*PAGES, "README.md"]:
        for block in re.findall(r"^```sh\n(.*?)^```", (ROOT / name).read_text(), flags=re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] != ["softprune"] or words[1].startswith("-"):
                    continue
                context = group.commands[words[1]].make_context(line, words[2:])  # raises for an unknown option
                recipe, settings = context.params.get("recipe"), context.params.get("settings") or []
                named = [
                    f"{key}.name={context.params[key]}"
                    for key in ("model", "data", "method")
                    if context.params.get(key)
                ]
                if words[1] == "train" and recipe in RECIPES:
                    load_recipe(recipe, [*named, *settings])
                seen.append(words[1])
    assert {"train", "resume", "report", "compare", "export", "bench"} <= set(seen)


@pytest.mark.slow
@pytest.mark.usefixtures("smaller_networks")
def test_the_commands_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS["docs/own-model.md"]:
        pytest.importorskip(package)
    text = document("docs/own-model.md")
    monkeypatch.chdir(tmp_path)
    exec(python_blocks(text)[0], {"__name__": "__main__"})
    commands = shell_commands(text)
    assert [command[0] for command in commands] == ["train", "evaluate", "export", "bench", "report"]
    train = commands[0]
    train[train.index("--epochs") + 1] = "1"  # fewer than the guide has, to be quick
    for command in commands:
        monkeypatch.setattr("sys.argv", ["softprune", *command])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, command
    result = RunFolder("runs/mine").read_result()
    compact = next(row for row in result.table if row.name == "compact")
    assert 0.45 <= compact.macs / result.dense.macs <= 0.5
    assert (tmp_path / "runs/mine/compact.onnx").is_file()


def test_the_site_builds_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SoftPruner" in (tmp_path / "site" / "api" / "index.html").read_text()
    assert "not included in the" not in done.stderr


@pytest.mark.parametrize("name", RECORDS)
def test_the_outputs_in_a_guide_are_the_recorded_ones(name: str) -> None:
    _, _, record = (ROOT / "benchmarks" / "records" / f"{RECORDS[name]}.txt").read_text().partition("\n")
    assert outputs((ROOT / name).read_text()) == record, f"run `python benchmarks/guides.py {name}`"
    assert record


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_its_guide_whose_code_runs(name: str) -> None:
    assert name in DOCUMENTS or name == "docs/yolo.md"  # tests/integrations/test_ultralytics.py runs that one
    made = notebook((ROOT / name).read_text())
    assert (ROOT / "examples" / f"{NOTEBOOKS[name]}.ipynb").read_text() == made, "run `python benchmarks/guides.py`"
