"""The recipes that the package has, by the name of an algorithm or by their path in a checkout."""

import re
from importlib.resources import files
from pathlib import Path

PACKAGED = Path(str(files("hybridflow").joinpath("recipes")))
ALGORITHMS = PACKAGED / "algorithms"


def packaged_recipe(name: str | Path) -> Path | None:
    """Return the file of a name such as "dapo", or of a path such as recipes/countdown_grpo.toml; None for another."""
    text = str(name)
    if re.fullmatch(r"[A-Za-z0-9_-]+", text):
        file = ALGORITHMS / f"{text.replace('-', '_')}.toml"
    elif text.startswith("recipes/") and ".." not in Path(text).parts:
        file = PACKAGED / text.removeprefix("recipes/")
    else:
        return None
    return file if file.is_file() else None


def algorithm_names() -> list[str]:
    """Return the names of the recipes of algorithms."""
    return sorted(path.stem for path in ALGORITHMS.glob("*.toml"))
