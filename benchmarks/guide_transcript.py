"""Follow the guide on a fresh clone, from `git clone` to the ONNX file, and record every command with its time.

    python benchmarks/guide_transcript.py [--source URL]

Everything happens in an empty temporary folder with a new virtual environment. The commands are those of the last sh
block of docs/own-model.md; the images are made by its first Python block. Writes
benchmarks/records/guide_transcript.txt.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "guide_transcript.txt"

# torchvision's wheels on PyPI are built for CUDA and do not import beside a CPU-only torch: see benchmarks/vision.py.
HOOK = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            from vision import declare_operators
            declare_operators()

sys.meta_path.insert(0, Finder())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=str(ROOT), help="what to clone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="guide-") as empty:
        transcript = Transcript(Path(empty))
        transcript.run("git clone -q SOURCE softprune", SOURCE=options.source)
        transcript.run("python3 -m venv venv")
        transcript.run('venv/bin/pip install -qq -c softprune/constraints.txt "./softprune[vision,onnx]"')
        page = (Path(empty) / "softprune" / "docs" / "own-model.md").read_text()
        images = re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        commands = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[-1]
        assert images is not None
        (Path(empty) / "make_images.py").write_text(images[1])
        transcript.declare_operators()
        transcript.run("venv/bin/python make_images.py")
        for command in commands.replace("\\\n", " ").splitlines():
            transcript.run("venv/bin/" + re.sub(" +", " ", command))
        transcript.run("ls -l runs/mine/compact.onnx")
        transcript.write()


class Transcript:
    """Commands, their output and their times.

    Args:
        folder: The folder that commands are run in.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: list[str] = []
        self._seconds = 0.0
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
            "COLUMNS": "80",
        }

    def run(self, command: str, **hidden: str) -> None:
        """Run a shell command; stop if it fails. ``hidden`` are words of it that the transcript leaves as they are."""
        real = command
        for word, value in hidden.items():
            real = real.replace(word, value)
        begin = time.perf_counter()
        done = subprocess.run(
            real,
            shell=True,
            cwd=self._folder,
            env=self._environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        seconds = time.perf_counter() - begin
        self._seconds += seconds
        shown = textwrap.wrap(command, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        text = done.stdout.replace(str(self._folder), "~")
        self._lines += ["$ " + " \\\n".join(shown), *text.rstrip().splitlines(), f"# {seconds:.1f} s", ""]
        print("\n".join(self._lines[-3:]))
        if done.returncode:
            raise SystemExit(f"{command} failed with {done.returncode}:\n{done.stdout}")

    def declare_operators(self) -> None:
        """Make torchvision importable where its compiled operators do not fit the torch that pip chose."""
        python = self._folder / "venv" / "bin" / "python"
        ask = [str(python), "-c", "import torchvision"]
        if subprocess.run(ask, env=self._environment, capture_output=True, check=False).returncode == 0:
            return
        find = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = Path(subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip())
        (site / "vision.py").write_text((ROOT / "benchmarks" / "vision.py").read_text())
        (site / "declare_vision.py").write_text(HOOK)
        (site / "declare_vision.pth").write_text("import declare_vision\n")
        self._lines += [
            "# Here pip chose a CPU-only torch and a torchvision built for CUDA, which do not fit: the operators",
            "# that torchvision misses are declared, as benchmarks/vision.py does for the tests.",
            "",
        ]

    def write(self) -> None:
        """Write the record."""
        head = [
            f"python benchmarks/guide_transcript.py: {self._seconds:.0f} s in all",
            f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPU cores",
            "",
        ]
        RECORD.write_text("\n".join([*head, *self._lines]).rstrip() + "\n")
        print(f"{RECORD.relative_to(ROOT)} written")


if __name__ == "__main__":
    sys.exit(main())
