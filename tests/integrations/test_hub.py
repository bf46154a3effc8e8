"""Compact networks in a folder of the Hub's layout, with a card."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import softprune as sp

hub = pytest.importorskip("softprune.integrations.hub", reason="huggingface_hub is not installed", exc_type=ImportError)
pytestmark = pytest.mark.quick

EXAMPLE = torch.randn(2, 1, 8, 8)


@pytest.fixture
def compact() -> torch.nn.Module:
    torch.manual_seed(0)
    model = sp.models.build("digits_net", 10)
    pruner = sp.SoftPruner(model, EXAMPLE)
    with torch.no_grad():
        for site in pruner.sites:
            model.get_submodule(site.name).bias[::2] = -3.0
            model.get_submodule(site.name).weight[::2] = 0.1
    return pruner.compact().eval()


def test_the_code_of_the_guide_writes_a_card_and_gives_the_network_back(
    compact: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs/integrations.md").read_text()
    (block,) = (code for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if "hub" in code)
    namespace: dict[str, Any] = {"compact": compact, "sp": sp}
    exec(block, namespace)
    assert torch.equal(namespace["again"](EXAMPLE), compact(EXAMPLE))
    card = Path("digits-net-50/README.md").read_text()
    macs = sp.cost(compact, EXAMPLE).macs
    assert card.startswith("---\n")
    assert "library_name: softprune" in card
    for part in (f"{macs:,}", "| top-1 (%) | 97.5 | 97.0 | 99.5% |", "`digits_net`"):
        assert part in card


def test_a_repository_receives_the_files_and_gives_them(
    compact: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Api:
        def __init__(self, **options: Any) -> None:
            calls.append(options["token"])

        def create_repo(self, repo_id: str, **options: Any) -> str:
            calls.append((repo_id, options))
            return f"https://huggingface.co/{repo_id}"

        def upload_folder(self, **options: Any) -> None:
            calls.append(options)

    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(hub, "hf_hub_download", lambda repo_id, name, **options: str(tmp_path / name))
    url = hub.push_to_hub(compact, "me/net", tmp_path, private=True, token="t")
    assert url == "https://huggingface.co/me/net"
    assert calls[:2] == ["t", ("me/net", {"private": True, "exist_ok": True})]
    assert calls[2]["folder_path"] == tmp_path
    assert 'from_pretrained("me/net"' in (tmp_path / "README.md").read_text()
    again = hub.from_pretrained("me/net", sp.models.build("digits_net", 10))
    assert torch.equal(again(EXAMPLE), compact(EXAMPLE))
