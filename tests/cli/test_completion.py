import os
import shutil
import subprocess
import sys

import pytest

from hybridflow.cli.completion import SHELLS
from hybridflow.cli.main import COMMANDS, main


@pytest.fixture
def complete(tmp_path):
    """Return a function that asks for completions of a line, as a shell does in a directory with a recipe and runs."""
    (tmp_path / "recipe.toml").touch()
    (tmp_path / "notes.txt").touch()
    for name in ("runs/first", "runs/second", "runs/empty"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("first", "second"):
        (tmp_path / "runs" / name / "run.json").touch()

    def complete(line):
        variables = {
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"),
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "COMP_TYPE": "9",
        }
        program = "from hybridflow.cli.main import command; command()"
        command = [sys.executable, "-c", program]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, **variables}, check=True, capture_output=True)
        return (tmp_path / "answer").read_text().split("\n")

    return complete


def test_commands_options_recipes_keys_and_runs_are_completed(complete):
    assert set(COMMANDS) <= set(complete("hybridflow "))
    assert complete("hybridflow dia") == ["diagnose"]
    assert complete("hybridflow diagnose --st") == ["--steps"]
    assert complete("hybridflow train rec") == [
        "recipe.toml",
        *(["recovery."] * 0),
        *complete("hybridflow train recov"),
    ]
    assert "actor.optimizer.lr=" in complete("hybridflow train recipe.toml actor.optimizer.")
    assert complete("hybridflow report ru") == ["runs/"]
    assert complete("hybridflow report runs/") == ["runs/empty/", "runs/first", "runs/second"]
    assert complete("hybridflow compare runs/first runs/s") == ["runs/second"]
    assert complete("hybridflow report missing/") == [""]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_takes_the_script(shell, capsys, tmp_path):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "hybridflow" in script
    if shutil.which(shell):
        subprocess.run([shell, "-c", script], check=True, capture_output=True, cwd=tmp_path)


def test_completion_imports_no_heavy_package():
    variables = {"_ARGCOMPLETE": "1", "COMP_LINE": "hybridflow train ", "COMP_POINT": "17", "COMP_TYPE": "9"}
    variables["_ARGCOMPLETE_STDOUT_FILENAME"] = os.devnull
    program = (
        "import sys, os\nexit_of = os._exit\n"
        "def leave(status):\n"
        "    print(*[name for name in ('torch', 'ray', 'transformers') if name in sys.modules], flush=True)\n"
        "    exit_of(status)\n"
        "os._exit = leave\nfrom hybridflow.cli.main import command\ncommand()"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "")
