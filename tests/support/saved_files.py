"""Read and rewrite the files of saved networks, with a right checksum."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import safe_open

from softprune.cut.saved import DOCUMENT, signed


def document_of(file: Path) -> dict[str, Any]:
    with safe_open(file, "pt") as stored:
        return json.loads(stored.metadata()[DOCUMENT])


def rewrite(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the document of a saved network, and sign it again."""
    document, weights = document_of(file), safetensors.torch.load_file(file)
    edit(document)
    file.write_bytes(signed(weights, document))
