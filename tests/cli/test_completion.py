import os
import shutil
import subprocess
import sys

import pytest

from hybridflow.cli.completion import SHELLS
from hybridflow.cli.main import COMMANDS, main

pytestmark = [pytest.mark.runs, pytest.mark.own_run("grpo: a shell asks a process for completions")]

ASK = """
import contextlib, os, sys
class Left(BaseException): ...
def leave(status):
    raise Left
os._exit = leave
from hybridflow.cli.main import command
for number, line in enumerate(sys.argv[1:]):
    os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(number)}
    with contextlib.suppress(Left):
        command()
heavy = {"torch", "ray", "transformers"} & sys.modules.keys()
assert not heavy, heavy
"""


def completions(directory, *lines):
    """Return the completions of lines, as a shell gets them in a directory."""
    variables = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "COMP_TYPE": "9"}
    subprocess.run([sys.executable, "-c", ASK, *lines], cwd=directory, env={**os.environ, **variables}, check=True)
    return [(directory / str(number)).read_text().split("\n") for number in range(len(lines))]


def test_commands_options_recipes_keys_and_runs_are_completed(tmp_path):
    for name in ("recipe.toml", "notes.txt", "runs/first/run.json", "runs/second/run.json", "runs/empty/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    expected = {
        "hybridflow dia": ["diagnose"],
        "hybridflow diagnose --st": ["--steps"],
        "hybridflow report ru": ["runs/"],
        "hybridflow report runs/": ["runs/empty/", "runs/first", "runs/second"],
        "hybridflow compare runs/first runs/s": ["runs/second"],
        "hybridflow report missing/": [""],
    }
    lines = ["hybridflow ", "hybridflow train rec", "hybridflow train recipe.toml actor.optimizer.", *expected]
    commands, recipes, keys, *others = completions(tmp_path, *lines)
    assert set(COMMANDS) <= set(commands)
    assert recipes[0] == "recipe.toml"
    assert all(each.startswith("recovery.") for each in recipes[1:])
    assert "actor.optimizer.lr=" in keys
    assert dict(zip(expected, others, strict=True)) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_takes_the_script(shell, capsys, tmp_path):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "hybridflow" in script
    if shutil.which(shell):
        subprocess.run([shell, "-c", script], check=True, capture_output=True, cwd=tmp_path)
