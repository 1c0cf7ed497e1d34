"""Write a new task that runs at once: a commented recipe, a reward function, data and a tiny model.

The task is sums of two digits. Put your own rows, reward and model in their place; the recipe says where. Nothing is
downloaded.
"""

import argparse
import json
import shlex
from importlib.resources import files
from pathlib import Path

from hybridflow.errors import ConfigError

CHARACTERS = "0123456789+="
NEXT = ("hybridflow train recipe.toml", "hybridflow report runs/first", "hybridflow export runs/first trained")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the directory of the task."""
    parser.add_argument("task", type=Path, metavar="DIR", help="directory to make; must not exist, or be empty")


def run(args: argparse.Namespace) -> int:
    """Write the files and print the commands that come next."""
    task: Path = args.task
    try:
        if task.exists() and (not task.is_dir() or any(task.iterdir())):
            raise ConfigError(f"'{task}' exists and is not an empty directory; name another one.")
        _write(task)
    except OSError as error:
        raise ConfigError(f"'{task}' cannot be written: {error.strerror}.") from error
    print(f"wrote {task}: recipe.toml, reward.py, train.jsonl, test.jsonl, model/\nnext:")
    print("\n".join(f"  {command}" for command in (f"cd {shlex.quote(str(task))}", *NEXT)))
    return 0


def _write(task: Path) -> None:
    task.mkdir(parents=True, exist_ok=True)
    for name in ("recipe.toml", "reward.py"):
        text = files("hybridflow").joinpath("cli", "task", name).read_text(encoding="utf-8")
        (task / name).write_text(text, encoding="utf-8")
    rows: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    for a in range(1, 10):
        for b in range(1, 10):
            split = "test" if (a + 2 * b) % 9 == 0 else "train"
            rows[split].append({"prompt": f"{a}+{b}=", "answer": str(a + b)})
    for split, of_split in rows.items():
        lines = "".join(f"{json.dumps(row)}\n" for row in of_split)
        (task / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    import torch

    from hybridflow.models.tiny_model import write_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write_model(task / "model", CHARACTERS, by_characters=True, width=64, layers=1)
