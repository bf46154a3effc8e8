"""The recipes and sweeps that ship with softprune: their files, names and titles."""

from importlib import resources
from pathlib import Path


def recipe_folder() -> Path:
    """The folder of the recipes that ship with softprune."""
    return _folder("recipes")


def recipe_names() -> list[str]:
    """Names of the recipes that ship with softprune."""
    return _names(recipe_folder())


def recipe_title(name: str) -> str:
    """The comment at the head of a recipe that ships with softprune."""
    title = []
    for line in _lines(recipe_folder(), name):
        if not line.startswith("#"):
            break
        title.append(line.lstrip("# "))
    return " ".join(title)


def sweep_folder() -> Path:
    """The folder of the sweeps that ship with softprune."""
    return _folder("sweeps")


def sweep_names() -> list[str]:
    """Names of the sweeps that ship with softprune."""
    return _names(sweep_folder())


def sweep_title(name: str) -> str:
    """The first comment of a sweep that ships with softprune."""
    return _lines(sweep_folder(), name)[0].lstrip("# ")


def _folder(name: str) -> Path:
    return Path(str(resources.files("softprune"))) / name


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def _lines(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.toml").read_text(encoding="utf-8").splitlines()
