"""A tiny task, and `hybridflow` run on it: in this process, or in one of its own."""

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridflow.cli.main import main
from hybridflow.runtime import capture_random_state, restore_random_state


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """The functions and constants of tests/fixtures/tiny_run.py."""
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "fixtures" / "tiny_run.py")))


@pytest.fixture(scope="session")
def task(tiny, tmp_path_factory) -> Path:
    """A directory with model, data, reward and the recipes `rl.toml` and `sft.toml`."""
    return tiny.write_task(tmp_path_factory.mktemp("task"))


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str
    log: str


@pytest.fixture
def hybridflow(capfd, caplog) -> Iterator[Callable[..., Outcome]]:
    """Runs a command in this process, and puts back afterwards what it set for the process."""
    threads, random_state = torch.get_num_threads(), capture_random_state()
    deterministic = torch.are_deterministic_algorithms_enabled()

    def run(*arguments: str | Path) -> Outcome:
        capfd.readouterr()
        caplog.clear()
        status = main([str(argument) for argument in arguments])
        return Outcome(status, *capfd.readouterr(), caplog.text)

    yield run
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    restore_random_state(random_state)


def _take_sigint() -> None:
    """A background job of a script ignores Ctrl-C, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `python -m hybridflow ARGUMENTS` as a process of its own; what still runs at the end is killed."""
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "hybridflow", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            preexec_fn=_take_sigint,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


IN_TURN = """
import json, sys
from hybridflow.cli.main import main
sys.exit(max(main(arguments) for arguments in json.loads(sys.argv[1])))
"""


@pytest.fixture(scope="session")
def uninterrupted(tiny, task, tmp_path_factory) -> SimpleNamespace:
    """Runs of six steps, `grpo` and `ppo`, and those that were stopped, `grpo_after_3` and `ppo_after_1`.

    Made in one process that is not this one: in this one the checks of tensor shapes draw from Python's random
    numbers, whose state is part of a checkpoint.
    """
    runs = tmp_path_factory.mktemp("uninterrupted")
    commands = []
    for name, stop in (("grpo", 3), ("ppo", 1)):
        arguments = tiny.commands(task)[name]
        commands.append([*arguments, f"trainer.run_dir={runs}/{name}"])
        commands.append([*arguments, f"trainer.run_dir={runs}/{name}_after_{stop}", "--stop-after", str(stop)])
    program = [sys.executable, "-c", IN_TURN, json.dumps(commands)]
    subprocess.run(program, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return SimpleNamespace(**{directory.name: directory for directory in runs.iterdir()})
