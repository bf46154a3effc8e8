"""Share compact networks on the Hugging Face Hub, with a model card that reports costs before and after the cut."""

import os
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from softprune import __version__
from softprune.cut import Origin, load, plans_of, save

try:
    from huggingface_hub import HfApi, ModelCardData, hf_hub_download
except ImportError as error:
    raise ImportError('softprune.integrations.hub needs `pip install "softprune[hub]"`.') from error

WEIGHTS = "model.safetensors"

Model = TypeVar("Model", bound=nn.Module)

_CARD = """---
{metadata}
---
# {name}

A compact {network}: [softprune](https://github.com/softprune/softprune) {version} removed channels from it during
training. The outputs of the compact network equal those of the masked network, as verified in float64.

|  | dense | compact | kept |
|---|---:|---:|---:|
{rows}

{origin}```python
from softprune.integrations.hub import from_pretrained

model = from_pretrained("{repo}", dense_network)  # the dense network, with any weights
```
"""


def save_pretrained(
    compact: nn.Module,
    folder: str | os.PathLike[str],
    *,
    repo_id: str | None = None,
    origin: Origin | None = None,
    results: dict[str, tuple[float, float]] | None = None,
    **card: Any,
) -> Path:
    """Save a compact network and its model card to a folder; return the folder.

    Args:
        compact: A compact network, as returned by `pruner.compact()` or `softprune.load`.
        folder: The folder to write to. It is created if it does not exist.
        repo_id: Repository name in the card's example; by default that of the folder.
        origin: The dense network, the data and the input shape; also stored in the file.
        results: (dense, compact) values for the card, such as ``{"top-1 (%)": (76.1, 75.4), "CPU (ms)": (8.8, 6.0)}``.
        card: Additional metadata of the card, such as ``license="mit"`` or ``base_model="timm/resnet18.a1_in1k"``.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save(compact, folder / WEIGHTS, origin=origin)
    history = plans_of(compact)
    figures: dict[str, tuple[float, float]] = {
        "MACs per sample": (history[0].dense_macs, history[-1].macs),
        "parameters": (history[0].dense_params, history[-1].params),
    }
    tags = ["softprune", "pruning", "channel-pruning"]
    repo, where = repo_id or str(folder), ""
    if origin is not None:
        where = f"Dense network: `{origin.model}`, data: {origin.data}, input {origin.input_shape}."
    text = _CARD.format(
        metadata=ModelCardData(library_name="softprune", tags=tags, **card).to_yaml(),
        name=repo.rpartition("/")[2],
        network=history[0].model.rpartition(".")[2],
        version=__version__,
        rows="\n".join(
            f"| {key} | {dense:,} | {left:,} | {left / dense:.1%} |"
            for key, (dense, left) in (figures | (results or {})).items()
        ),
        origin=where,
        repo=repo,
    )
    (folder / "README.md").write_text(text)
    return folder


def push_to_hub(
    compact: nn.Module,
    repo_id: str,
    folder: str | os.PathLike[str],
    *,
    private: bool = False,
    token: str | None = None,
    **card: Any,
) -> str:
    """Save a compact network to `folder` with :func:`save_pretrained`, upload it, and return the repository's URL."""
    save_pretrained(compact, folder, repo_id=repo_id, **card)
    api = HfApi(token=token, library_name="softprune", library_version=__version__)
    url = api.create_repo(repo_id, private=private, exist_ok=True)
    api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=[WEIGHTS, "README.md"])
    return str(url)


def from_pretrained(
    source: str | os.PathLike[str], model: Model, *, revision: str | None = None, token: str | None = None
) -> Model:
    """Load a compact network from a folder or from a repository on the Hub.

    `model` is the dense network, with the same architecture as the one that was pruned and with any weights.
    """
    local = Path(source) / WEIGHTS
    if local.is_file():
        return load(local, model)
    return load(hf_hub_download(str(source), WEIGHTS, revision=revision, token=token), model)
