"""Run the Python blocks of docs/own-model.md in an empty folder and record what each of them prints.

    python benchmarks/own_model.py

Writes benchmarks/records/own_model.txt, and the same output after each block of the page.
"""

import contextlib
import io
import os
import platform
import re
import sys
import tempfile
import time
from pathlib import Path

import torch
from vision import declare_operators

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "own-model.md"
RECORD = ROOT / "benchmarks" / "records" / "own_model.txt"
_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE)


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
            exec(compile(match["code"], PAGE.name, "exec"), namespace)
        text = printed.getvalue()
        block = f"```python\n{match['code']}```\n" + (f"\n```text\n{text}```\n" if text else "")
        parts += [page[position : match.start()], block]
        position = match.end()
        sys.stdout.write(text)
    return "".join([*parts, page[position:]])


def main() -> None:
    declare_operators()
    begin, folder = time.perf_counter(), Path.cwd()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        page = run(PAGE.read_text())
        os.chdir(folder)
    head = (
        f"python benchmarks/own_model.py: {time.perf_counter() - begin:.0f} s, torch {torch.__version__}, "
        f"{platform.machine()}, {os.cpu_count()} CPU cores\n"
    )
    RECORD.write_text(head + outputs(page))
    PAGE.write_text(page)
    print(f"{RECORD.relative_to(ROOT)} and {PAGE.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
