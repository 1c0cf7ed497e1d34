"""Runs with `placement.lend`: training ranks generate prompts that wait for memory in the rollout engine."""

import json
import os

import pytest

from hybridflow.observability import read_jsonl

POOLS = (
    *("controller.backend=ray", "controller.cpus_per_worker=0.5"),
    *("placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate"),
)
LITTLE_MEMORY = (  # of keys and values: for one group, of 3 responses of up to 60 tokens
    *("data.max_response_length=60", "memory.max_tokens_per_micro_batch=4096", "rollout.kv_cache_bytes=400000"),
    *("data.val_files=[]", "model.dtype=float64", "trainer.total_steps=4"),
)
LEND = "placement.lend=true"


def lent(run):
    """Return the number of lent groups of each step."""
    return [row["sampling/lent_groups"] for row in read_jsonl(run / "metrics.jsonl")]


def calls(run, where):
    """Return the calls of a method in training, in order."""
    rows = read_jsonl(run / "trace" / "calls.jsonl")
    return [row for row in rows if row["kind"] == "call" and row["where"] == where]


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_that_lends_has_the_samples_and_weights_of_one_that_does_not(tiny, task, tmp_path, run_in_turn):
    command = ["train", task / "rl.toml", *POOLS, *LITTLE_MEMORY]
    run_in_turn(
        [*command, f"trainer.run_dir={tmp_path}/alone"],
        [*command, LEND, f"trainer.run_dir={tmp_path}/lent"],
        shares_cluster=True,
    )
    alone, own = (tiny.results_of(tmp_path / name, 4) for name in ("alone", "lent"))
    assert max(lent(tmp_path / "lent")) > 0
    assert own["samples"] == alone["samples"]
    assert own["actor.safetensors"] == alone["actor.safetensors"]
    assert len(calls(tmp_path / "lent", "LendingActorWorker.generate_sequences")) > 0
    events = [row["event"] for row in read_jsonl(tmp_path / "lent" / "schedule.jsonl")]
    assert events.count("give") == len(calls(tmp_path / "lent", "LendingActorWorker.generate_sequences"))


HELD = """
import json, os, signal, sys, time
from pathlib import Path
import hybridflow.trainers.role_classes as role_classes
from hybridflow.cli.main import main
from hybridflow.controller.ray.local_cluster import LocalCluster

commands, killed, marker = json.loads(sys.argv[1])

def die_once():
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)

class Slow:
    # A step takes 5 ms, so that prompts wait in the engine while the learner is idle.
    def between_steps(self):
        time.sleep(0.005)
        if killed == "engine" and any(row["event"] == "give" for row in self._schedule._rows):
            die_once()
        super().between_steps()

class SlowGiving(Slow, role_classes.GivingWorker): ...
class SlowInFlight(Slow, role_classes.InFlightGivingWorker): ...

class Learner(role_classes.LendingActorWorker):
    def _generate(self, *arguments, **options):
        if killed == "learner":
            die_once()
        return super()._generate(*arguments, **options)

role_classes.GivingWorker, role_classes.InFlightGivingWorker = SlowGiving, SlowInFlight
role_classes.LendingActorWorker = Learner
with LocalCluster(4, object_store_bytes=512 * 2**20):
    print(json.dumps([main(arguments) for arguments in commands]))
"""


@pytest.fixture
def run_slowly(fork_server):
    """Return a function that runs commands with slow rollout engines; it returns their exit codes and the errors."""

    def run(*commands, killed="", marker=""):
        argument_lists = [[str(part) for part in command] for command in commands]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        program = ["-c", HELD, json.dumps([argument_lists, killed, str(marker)])]
        process = fork_server.start(program, environment=environment)
        try:
            out, err = process.communicate()
        finally:
            process.discard()
        assert process.returncode == 0, out[-2000:] + err[-4000:]
        return json.loads(out.splitlines()[-1]), err

    return run


def prompts_of(run):
    """Return the prompts of each step, in order."""
    return [[row["prompt"] for row in read_jsonl(run / "samples.jsonl") if row["step"] == step] for step in range(1, 5)]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lag", "more"),
    [(1, ("trainer.save_in_background=true",)), (2, ()), (2, ("rollout.on_new_weights=retract",))],
)
def test_lent_groups_of_a_run_with_a_lag_have_newer_weights(task, run, run_slowly, tmp_path, lag, more):
    changes = [*LITTLE_MEMORY, f"trainer.lag={lag}", "algorithm.rollout_weights=token", "trainer.log_samples=99"]
    command = ["train", task / "rl.toml", *changes, *POOLS, LEND, *more, f"trainer.run_dir={tmp_path}/lent"]
    statuses, errors = run_slowly([*command, "--stop-after", "2"], command)
    assert statuses == [0, 0], errors[-3000:]
    rows = read_jsonl(tmp_path / "lent" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["staleness/max"] <= lag for row in rows)
    assert all(row["response_length/min"] >= 1 for row in rows)
    mixed = [row for row in rows[1:] if 0 < row["staleness/age_0"] < 1]
    assert mixed
    assert all(row["sampling/lent_groups"] > 0 for row in mixed)
    prompts = prompts_of(tmp_path / "lent")
    assert prompts == prompts_of(run("local", *changes))
    assert [len(of_step) for of_step in prompts] == [24] * 4


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("killed", ["learner", "engine"])
def test_a_run_killed_while_it_lends_resumes_to_the_same_weights(tiny, task, run, run_slowly, tmp_path, killed):
    changes = [*LITTLE_MEMORY, "trainer.save_every=1"]
    command = ["train", task / "rl.toml", *changes, *POOLS, LEND, f"trainer.run_dir={tmp_path}/lent"]
    statuses, errors = run_slowly(command, command, killed=killed, marker=tmp_path / "killed")
    assert (tmp_path / "killed").exists()
    assert statuses == [75, 0], errors[-3000:]
    assert "died before" in errors
    whole, resumed = (tiny.results_of(path, 4) for path in (run("local", *changes), tmp_path / "lent"))
    assert resumed["actor.safetensors"] == whole["actor.safetensors"]
    assert resumed["samples"] == whole["samples"]
    assert max(lent(tmp_path / "lent")) > 0


def test_lending_in_one_process_is_an_error(task, tmp_path, hybridflow):
    outcome = hybridflow("train", task / "rl.toml", LEND, *POOLS[2:], f"trainer.run_dir={tmp_path / 'run'}")
    assert outcome.status != 0
    assert "placement.pools is set, but controller.backend='local' has one process; use backend = 'ray'" in outcome.err
