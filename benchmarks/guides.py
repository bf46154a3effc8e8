"""Run the Python blocks of guides in an empty folder, record what they print, and make notebooks of the guides.

    python benchmarks/guides.py                     # only the notebooks
    python benchmarks/guides.py README.md docs/own-model.md docs/quantise.md    # the last one needs torchao

Writes the outputs after the blocks of these guides and into records/, and all examples/*.ipynb with the same blocks.
"""

import contextlib
import io
import json
import os
import platform
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDS = {"README.md": "readme", "docs/own-model.md": "own_model", "docs/quantise.md": "quantise"}
"""Guides -> the record of their outputs."""
NOTEBOOKS = {"docs/quickstart.md": "quickstart", "docs/own-model.md": "own_images", "docs/yolo.md": "yolo"}
"""Guides -> the notebook that is made of them, up to what is done on the command line."""
_BLOCK = re.compile(
    r"^```(?P<kind>python|py)\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE
)


def outputs(page: str) -> str:
    """Return the outputs that the page shows after its Python blocks, as the record has them."""
    shown = [match["output"] or "" for match in _BLOCK.finditer(page)]
    return "".join(f"[block {number}]\n{text}" for number, text in enumerate(shown, 1) if text)


def run(page: str) -> str:
    """Run the blocks in the current folder; return the page with their outputs."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    parts, position = [], 0
    for match in _BLOCK.finditer(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(match["code"], "guide", "exec"), namespace)
        text = printed.getvalue()
        block = f"```{match['kind']}\n{match['code']}```\n" + (f"\n```text\n{text}```\n" if text else "")
        parts += [page[position : match.start()], block]
        position = match.end()
        sys.stdout.write(text)
    return "".join([*parts, page[position:]])


def notebook(page: str) -> str:
    """Return the guide as a Jupyter notebook."""
    page = re.sub(r"\]\((?!https?:|\.\./|#)", "](../docs/", page.partition("## On the command line")[0])
    cells, position = [], 0

    def add(kind: str, text: str, **fields: object) -> None:
        if text.strip():
            source = text.strip().splitlines(keepends=True)
            cells.append({"cell_type": kind, "id": str(len(cells)), "metadata": {}, "source": source, **fields})

    for match in (match for match in _BLOCK.finditer(page) if match["kind"] == "python"):
        shown = (match["output"] or "").splitlines(keepends=True)
        stream = [{"name": "stdout", "output_type": "stream", "text": shown}] if shown else []
        add("markdown", page[position : match.start()])
        add("code", match["code"], execution_count=None, outputs=stream)
        position = match.end()
    add("markdown", page[position:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def record(name: str) -> None:
    """Run a guide and write its outputs."""
    import torch
    from vision import declare_operators

    declare_operators()
    begin, page = time.perf_counter(), (ROOT / name).read_text()
    with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
        Path("results").symlink_to(ROOT / "results")
        page = run(page)
    head = (
        f"python benchmarks/guides.py {name}: {time.perf_counter() - begin:.0f} s, torch {torch.__version__}, "
        f"{platform.machine()}, {os.cpu_count()} CPU cores\n"
    )
    (ROOT / "benchmarks" / "records" / f"{RECORDS[name]}.txt").write_text(head + outputs(page))
    (ROOT / name).write_text(page)


def main() -> None:
    for name in sys.argv[1:]:
        record(name)
    for name, target in NOTEBOOKS.items():
        (ROOT / "examples" / f"{target}.ipynb").write_text(notebook((ROOT / name).read_text()))


if __name__ == "__main__":
    main()
