"""The recipe for eight bits: ONNX Runtime wherever it is installed, and PyTorch's own where torchao is."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

GUIDE = Path(__file__).parents[2] / "docs/quantise.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_eight_bits_cost_no_more_than_two_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason=f"{package}, of an extra, is not installed")
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text().replace("epochs, batch = 20", "epochs, batch = 6")
    kinds = "(?:python|py)" if importlib.util.find_spec("torchao") else "python"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(rf"^```{kinds}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        exec(compile(block, GUIDE.name, "exec"), namespace)
    before, *after = (float(value) for value in re.findall(r": ([\d.]+)%", capsys.readouterr().out))
    assert before > 90
    assert after
    assert min(after) > before - 2
