"""Fixtures for `hybridflow` commands on a tiny task, run in this process, in a separate one, or on a Ray cluster."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from fixtures import tiny_run
from fixtures.planted_faults import without_faults
from hybridflow.cli.main import main

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


@pytest.fixture
def hybridflow(capfd, caplog, restores_the_process) -> Callable[..., Outcome]:
    """Return a function that runs a `hybridflow` command in this process."""

    def run(*arguments: str | Path) -> Outcome:
        capfd.readouterr()
        caplog.clear()
        status = main([str(argument) for argument in arguments])
        return Outcome(status, *capfd.readouterr(), caplog.text)

    return run


@pytest.fixture
def run(task, tmp_path, hybridflow) -> Callable[..., Path]:
    """Return `run`, which trains in this process with changes, by default for one step, and returns the directory.

    It checks for this `status`; with `problem` also for these words in the errors.
    """

    def train(*changes, name="run", command="train", status=0, problem="", recipe="rl.toml"):
        quick = ("trainer.total_steps=1", "data.val_files=[]")
        if command == "train":
            quick = (*quick, "reward.processes=0")
        outcome = hybridflow(command, task / recipe, f"trainer.run_dir={tmp_path / name}", *quick, *changes)
        assert outcome.status == status, outcome.err
        assert problem in outcome.err
        return tmp_path / name

    return train


@pytest.fixture
def refuse(task, tmp_path, hybridflow) -> Callable[..., str]:
    """Return a function that runs a command, checks that it fails with `status`, and returns its error message."""

    def run(*changes, command="train", recipe="rl.toml", run_dir=tmp_path / "run", status=2):
        outcome = hybridflow(command, task / recipe, f"trainer.run_dir={run_dir}", *changes)
        assert outcome.status == status, outcome.err
        assert "error: " in outcome.err
        assert "Traceback" not in outcome.err
        return outcome.err

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
import contextlib, json, os, sys
from hybridflow.cli.main import main
from hybridflow.controller.ray.local_cluster import LocalCluster
commands, own_cluster, program = json.loads(sys.argv[1])
exec(program)
with LocalCluster(16, object_store_bytes=512 * 2**20) if own_cluster else contextlib.nullcontext():
    status = max((os.environ.update(variables), main(arguments))[1] for arguments, variables in commands)
sys.exit(status)
"""


@pytest.fixture(scope="session")
def run_in_turn(fork_server: "ForkServer", request: pytest.FixtureRequest) -> Callable[..., str]:
    """Return a function that runs `hybridflow` commands one after another in one separate process.

    It returns what they wrote to stderr. With `shares_cluster=True` they use the cluster of the session; with
    `forks_workers=False` one of their own, whose workers no fork server starts; otherwise each run on Ray has its own.
    `program`: Python that runs before. A command may have `faults(...)`.
    """

    def run(
        *commands: Sequence[str | Path],
        shares_cluster: bool = False,
        forks_workers: bool = True,
        program: str = "",
    ) -> str:
        lists = [[str(part) for part in command] for command in commands]
        if shares_cluster and forks_workers:
            import ray

            request.getfixturevalue("ray_backend")
            address = f"controller.address={ray.get_runtime_context().gcs_address}"
            for arguments in lists:
                arguments += [address] if "controller.backend=ray" in arguments else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        arguments = json.dumps(
            [[without_faults(each) for each in lists], shares_cluster and not forks_workers, program]
        )
        done = fork_server.run(["-c", SEQUENTIAL, arguments], environment=environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stderr

    return run
