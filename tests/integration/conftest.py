"""Fixtures for a tiny task and `hybridflow` commands on it, run in this process or in a separate one."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from fixtures import tiny_run
from hybridflow.cli.main import main
from hybridflow.runtime import capture_random_state, restore_random_state

if TYPE_CHECKING:
    from fixtures.forked import Forked, ForkServer


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Return the module tests/fixtures/tiny_run.py."""
    return tiny_run


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str
    log: str


@contextlib.contextmanager
def restored_process() -> Iterator[None]:
    """Restore process-wide settings that a command changes: threads, determinism and random state."""
    threads, random_state = torch.get_num_threads(), capture_random_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    restore_random_state(random_state)


@pytest.fixture
def hybridflow(capfd, caplog) -> Iterator[Callable[..., Outcome]]:
    """Yield a function that runs a `hybridflow` command in this process."""

    def run(*arguments: str | Path) -> Outcome:
        capfd.readouterr()
        caplog.clear()
        status = main([str(argument) for argument in arguments])
        return Outcome(status, *capfd.readouterr(), caplog.text)

    with restored_process():
        yield run


@pytest.fixture
def run(task, tmp_path, hybridflow) -> Callable[..., Path]:
    """Return a function that trains with changes in the directory `name` and returns the directory."""

    def train(name, *changes):
        outcome = hybridflow("train", task / "rl.toml", f"trainer.run_dir={tmp_path / name}", *changes)
        assert outcome.status == 0, outcome.err
        return tmp_path / name

    return train


RECIPES = {"train": "rl.toml", "sft": "sft.toml", "dpo": "pairs.toml", "reward-model": "pairs.toml"}


@pytest.fixture(scope="session")
def finished_run(task, tmp_path_factory) -> Callable[..., Path]:
    """Return `finished_run`, which runs a command with its changes once per session and returns the run directory.

    Example: `finished_run("train", "trainer.total_steps=2")`. Tests share the directory and must not write to it.
    """
    runs: dict[tuple[str, ...], Path] = {}

    def run(*arguments: str) -> Path:
        if arguments not in runs:
            command, *changes = arguments
            runs[arguments] = directory = tmp_path_factory.mktemp("finished") / "run"
            with restored_process():
                assert main([command, f"{task}/{RECIPES[command]}", f"trainer.run_dir={directory}", *changes]) == 0
        return runs[arguments]

    return run


@pytest.fixture
def start(fork_server: "ForkServer") -> "Iterator[Callable[..., Forked]]":
    """Yield a function that starts `python -m hybridflow ARGUMENTS`; kill remaining processes after the test."""
    processes = []

    def run(*arguments: str | Path, **environment: str) -> "Forked":
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        processes.append(fork_server.start(["-m", "hybridflow", *arguments], environment=environment))
        return processes[-1]

    yield run
    for process in processes:
        process.discard()


SEQUENTIAL = """
import contextlib, json, sys
from hybridflow.cli.main import main
from hybridflow.controller.ray.local_cluster import LocalCluster
commands, shares_cluster, forks_workers = json.loads(sys.argv[1])
if forks_workers:
    from fixtures.forked import fork_ray_workers
    fork_ray_workers()
with LocalCluster(16, object_store_bytes=512 * 2**20) if shares_cluster else contextlib.nullcontext():
    status = max(main(arguments) for arguments in commands)
sys.exit(status)
"""


@pytest.fixture(scope="session")
def run_in_turn(fork_server: "ForkServer") -> Callable[..., str]:
    """Return a function that runs `hybridflow` commands one after another in one separate process.

    It returns what they wrote to stderr.

    With `shares_cluster=True` they use one existing Ray cluster, whose workers the fork server starts (see
    `fork_ray_workers`) unless `forks_workers` is False; otherwise each run starts and stops its own.
    """

    def run(
        *commands: Sequence[str | Path], shares_cluster: bool = False, forks_workers: bool = True, **environment: str
    ) -> str:
        argument_lists = [[str(part) for part in command] for command in commands]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FORK_SERVER": fork_server.address, **environment}
        program = ["-c", SEQUENTIAL, json.dumps([argument_lists, shares_cluster, shares_cluster and forks_workers])]
        process = fork_server.start(program, environment=environment)
        try:
            out, err = process.communicate()
        finally:
            process.discard()
        assert process.returncode == 0, out[-2000:] + err[-4000:]
        return err

    return run


@pytest.fixture(scope="session")
def uninterrupted(tiny, task, tmp_path_factory) -> SimpleNamespace:
    """Return the directories of six-step runs `grpo` and `ppo`, and of stopped runs `grpo_after_3` and `ppo_after_1`.

    They run in a separate process: in this one, the shape checks draw from Python's random number generator, whose
    state is part of a checkpoint.
    """
    runs = tmp_path_factory.mktemp("uninterrupted")
    commands = []
    for name, stop in (("grpo", 3), ("ppo", 1)):
        arguments = tiny.commands(task)[name]
        commands.append([*arguments, f"trainer.run_dir={runs}/{name}"])
        commands.append([*arguments, f"trainer.run_dir={runs}/{name}_after_{stop}", "--stop-after", str(stop)])
    arguments = json.dumps([commands, False, False])
    program = [sys.executable, "-c", SEQUENTIAL, arguments]  # with a string hash seed unlike the forks'
    subprocess.run(program, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return SimpleNamespace(**{directory.name: directory for directory in runs.iterdir()})
