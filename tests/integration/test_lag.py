"""Runs with `trainer.lag`: weights of each batch, resume in the middle of the pipeline, equality with Ray."""

import json
import logging
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.checkpoint import open_checkpoint
from hybridflow.observability import read_jsonl

WEIGHTS = "checkpoints/step_000006/actor.safetensors"
LAG = ("trainer.lag=2", "algorithm.rollout_weights=token")


def test_a_batch_is_sampled_with_weights_that_are_lag_steps_old(run, caplog):
    with caplog.at_level(logging.INFO):
        rows = read_jsonl(run("run", *LAG, "actor.mini_batch_size=4") / "metrics.jsonl")[1:]
    updates = 2  # 8 prompts in mini-batches of 4
    assert [row["staleness/max"] for row in rows] == [updates * age for age in (0, 1, 2, 2, 2, 2)]
    assert [row["staleness/mean"] for row in rows] == [updates * age for age in (0, 1, 2, 2, 2, 2)]
    assert [row["staleness/off_policy_updates"] for row in rows] == [1, 3, 5, 5, 5, 5]
    assert [row["staleness/age_0"] for row in rows] == [1, 0, 0, 0, 0, 0]
    assert [row["staleness/age_2_to_3"] for row in rows] == [0, 1, 0, 0, 0, 0]
    assert [row["staleness/age_4_to_7"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert [row["sampling/queue_length"] for row in rows] == [2, 2, 2, 2, 1, 0]
    assert all(row["timing_s/queue_wait"] > 0 for row in rows[1:])
    assert all(0 <= row["perf/actor_rollout_idle_share"] < 1 for row in rows)
    assert [row["training/epoch"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert rows[0]["rollout_correction/weight_max"] == pytest.approx(1, abs=1e-4)
    assert rows[2]["rollout_correction/weight_max"] > 1.001
    assert "a batch is sampled with weights 4 optimizer steps old, and its last mini-batch is 5 steps" in caplog.text
    assert "share processes, so they run in turn" in caplog.text


@pytest.mark.parametrize("background", [False, True])
def test_a_run_resumed_with_batches_begun_equals_an_uninterrupted_one(tiny, run, tmp_path, background):
    more = [
        *LAG,
        "algorithm.advantage=remax",
        "trainer.val_every=2",
        f"trainer.save_in_background={background}".lower(),
    ]
    run("whole", *more)
    for stop in (["--stop-after", "1"], ["--stop-after", "4"], []):
        run("resumed", *more, *stop)
        if stop:
            files = {path.name for path in (tmp_path / "resumed" / "checkpoints").glob(f"*{stop[1]}/batch*")}
            begun = [f"batch_{int(stop[1]) + ahead:06d}" for ahead in (0, 1)]
            assert files == {f"{name}{kind}.safetensors" for name in begun for kind in ("", "_greedy")}
    whole, resumed = (tiny.results_of(tmp_path / name, 6) for name in ("whole", "resumed"))
    names = ("actor.safetensors", "actor.json", "metrics", "samples")  # random states differ, see `uninterrupted`
    assert all(whole[name] == resumed[name] for name in names)


def test_validation_changes_nothing_in_a_run_with_a_lag(tiny, run):
    changes = (*LAG, "trainer.total_steps=4", "trainer.log_samples=24")
    results = tiny.results_of(run("validated", *changes, "trainer.val_every=1"), 4)
    expected = tiny.results_of(run("plain", *changes, "data.val_files=[]"), 4)
    assert all(results[name] == expected[name] for name in ("actor.safetensors", "samples"))
    before_training, *rows = results["metrics"]
    assert all("val/accuracy" in row for row in (before_training, *rows))
    for row, plain in zip(rows, expected["metrics"], strict=True):
        assert "val/accuracy" not in plain
        assert {name: row[name] for name in plain} == plain


def test_resuming_with_another_lag_is_an_error(task, run, tmp_path, hybridflow):
    run("run", *LAG, "--stop-after", "2")
    outcome = hybridflow("train", task / "rl.toml", f"trainer.run_dir={tmp_path / 'run'}", *LAG, "trainer.lag=1")
    assert outcome.status != 0
    assert "trainer.lag was 2 and is 1" in outcome.err


@pytest.mark.parametrize("how", ["wait", "retract"])
def test_a_lag_of_all_steps_is_an_error(task, tmp_path, hybridflow, how):
    changes = [*LAG, "trainer.lag=6", f"rollout.on_new_weights={how}", *POOLS]
    outcome = hybridflow("train", task / "rl.toml", f"trainer.run_dir={tmp_path / 'run'}", *changes)
    assert outcome.status != 0
    assert "trainer.lag=6 samples all 6 batches of the run with the initial weights; use a lag below 6" in outcome.err


POOLS = (
    *("controller.backend=ray", "controller.cpus_per_worker=0.5"),
    *("placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate"),
)


def spans(run, method):
    """Return the times of the calls of a method in training, in order."""
    calls = [row for row in read_jsonl(run / "trace" / "calls.jsonl") if row["kind"] == "call"]
    return [(call["start"], call["end"]) for call in calls if call["where"].endswith(f".{method}")]


@pytest.mark.ray
@pytest.mark.slow
def test_runs_with_a_lag_on_ray_equal_those_in_one_process(tiny, task, tmp_path, run_in_turn):
    commands = []
    for lag in (0, 1, 3):
        for name, more in (("local", ()), ("ray", POOLS)):
            changes = [f"trainer.lag={lag}", "algorithm.rollout_weights=token", "trainer.val_every=2", *more]
            stops = [["--stop-after", "2"], []] if (lag, name) == (3, "ray") else [[]]
            command = ["train", task / "rl.toml", f"trainer.run_dir={tmp_path}/{name}_{lag}", *changes]
            commands += [[*command, *stop] for stop in stops]
    run_in_turn(*commands, shares_cluster=True)
    for lag in (0, 1, 3):
        local, ray = (tiny.results_of(tmp_path / f"{name}_{lag}", 6) for name in ("local", "ray"))
        assert ray["actor.safetensors"] == local["actor.safetensors"]
        assert ray["samples"] == local["samples"]
        generated = spans(tmp_path / f"ray_{lag}", "generate_sequences")
        updates = spans(tmp_path / f"ray_{lag}", "update_actor")
        assert len(generated) == len(updates) == 6
        if lag < 3:  # the resumed run waited for its checkpoint
            begins_before_the_update_ends = [generated[step + 1][0] < updates[step][1] for step in range(5)]
            assert begins_before_the_update_ends == [lag > 0] * 5


LONG_GENERATION = (
    *("data.max_response_length=200", "memory.max_tokens_per_micro_batch=4096"),
    *("actor.old_log_probs_from=rollout", "rollout.sync_bucket_bytes=100000"),
)


@pytest.fixture(scope="module")
def in_pools(task, tmp_path_factory, run_in_turn):
    """Return the directories of runs on two pools with long responses, by their lag."""
    directory = tmp_path_factory.mktemp("in_pools")
    command = ["train", task / "rl.toml", *POOLS, *LONG_GENERATION]
    run_in_turn(
        *([*command, f"trainer.lag={lag}", f"trainer.run_dir={directory}/{lag}"] for lag in (0, 1)),
        shares_cluster=True,
    )
    return {lag: directory / str(lag) for lag in (0, 1)}


@pytest.mark.ray
@pytest.mark.slow
def test_the_trace_of_a_run_with_a_lag_shows_generation_during_updates(in_pools):
    def overlaps(run):
        generated, updates = spans(run, "generate_sequences"), spans(run, "update_actor")
        assert len(generated) == len(updates) == 6
        return sum(start < end_of and end > start_of for start, end in generated for start_of, end_of in updates)

    assert overlaps(in_pools[1]) > 0
    assert overlaps(in_pools[0]) == 0


@pytest.mark.ray
@pytest.mark.slow
def test_metrics_of_a_lag_are_there_on_ray(in_pools):
    for lag, run in in_pools.items():
        for row in read_jsonl(run / "metrics.jsonl")[1:]:
            for role in ("actor_rollout", "rollout", "reward"):
                assert 0 <= row[f"perf/{role}_idle_share"] < 1
            assert ("timing_s/weight_sync" in row) == (row["step"] > 1)  # all ranks load the initial weights
            assert row.get("sampling/queue_length") == (float(row["step"] < 6) if lag else None)
            assert ("timing_s/queue_wait" in row) == bool(lag)
            assert row.get("staleness/age_1") == (float(row["step"] > 1) if lag else None)


@pytest.mark.ray
@pytest.mark.slow
def test_several_training_ranks_with_a_lag_equal_one_in_float64(task, tmp_path, run_in_turn):
    exact = ["train", task / "rl.toml", "model.dtype=float64", "trainer.lag=1", "algorithm.rollout_weights=token"]
    exact += ["trainer.total_steps=4", "actor.mini_batch_size=4", "algorithm.kl_in_loss=true", "data.val_files=[]"]
    layouts = {1: (), **{ranks: (*POOLS, f"placement.pools={{learn=[{ranks}],generate=[1]}}") for ranks in (2, 4)}}
    run_in_turn(
        *([*exact, *layout, f"trainer.run_dir={tmp_path}/{ranks}"] for ranks, layout in layouts.items()),
        shares_cluster=True,
    )
    rows = {ranks: read_jsonl(tmp_path / str(ranks) / "metrics.jsonl") for ranks in layouts}
    same = ("actor/", "critic/", "staleness/", "rollout_correction/", "response_length/", "rollout/log_prob_kl")
    names = [name for name in rows[1][0] if name.startswith(same) and not name.endswith(("computed", "shared_prompts"))]
    assert rows[1][3]["rollout_correction/weight_max"] > 1.001
    weights = {
        ranks: open_checkpoint(tmp_path / str(ranks) / "checkpoints/step_000004").load("actor", "model")
        for ranks in layouts
    }
    for ranks in (2, 4):
        for one, several in zip(rows[1], rows[ranks], strict=True):
            for name in names:
                assert several[name] == pytest.approx(one[name], rel=1e-9, abs=1e-12), (ranks, name)
        for name, weight in weights[1].items():
            torch.testing.assert_close(weights[ranks][name], weight, rtol=1e-9, atol=1e-9)


IN_FLIGHT = """
import json, os, sys, time
import hybridflow.trainers.role_classes as role_classes
from hybridflow.cli.main import main
from hybridflow.controller.ray.local_cluster import LocalCluster
from hybridflow.trainers.ppo_trainer import PPOTrainer

COLUMNS = ("group_ids", "responses", "response_mask", "rollout_log_probs", "rollout_versions", "finish_reasons")
step, save = PPOTrainer.step, PPOTrainer.save

def recorded_step(self, next_prompts):
    batch = step(self, next_prompts)
    batch.get(COLUMNS).select(meta_info_keys=()).save_to_disk(self.run.path / f"tokens_{self.global_step}.safetensors")
    return batch

def releasing_save(self):  # before a checkpoint no weights come
    released = self.run.path / "released"
    released.touch()
    save(self)
    released.unlink()

PPOTrainer.step, PPOTrainer.save = recorded_step, releasing_save

class Held(role_classes.InFlightRolloutWorker):
    # After three steps, the last batch waits for new weights, as if steps were slow.
    def between_steps(self):
        began = self.__dict__.setdefault("began", {})  # batch -> steps and version when it began
        for batch in self._begun._prompts:
            began.setdefault(batch, (self._schedule.num_steps, self.rollout.version, time.time() + 30))
        steps, version, deadline = max(began.values())
        released = self.config.rollout.replay or self.config.trainer.run_dir + "/released"
        while len(self._begun._prompts) == 1 and self._schedule.num_steps > steps + 2 and not os.path.exists(released):
            if self.rollout.version != version or self._turn._num_asking or time.time() > deadline:
                break
            time.sleep(0.005)
        super().between_steps()

role_classes.InFlightRolloutWorker = Held
from fixtures.forked import fork_ray_workers
fork_ray_workers()
with LocalCluster(4, object_store_bytes=512 * 2**20):
    sys.exit(max(main(arguments) for arguments in json.loads(sys.argv[1])))
"""


def tokens_of(run):
    """Return the bytes of the tokens, log-probs, versions and ends of all rows, by step."""
    return {step: (run / f"tokens_{step}.safetensors").read_bytes() for step in range(6)}


IN_FLIGHT_RUNS = {
    "retract": (3, ("rollout.weight_sync=disk", "placement.pools={learn=[1],generate=[1]}")),  # validated when saved
    "keep-kv": (
        4,
        (
            *("rollout.weight_sync=ipc", "placement.pools={learn=[1],generate=[2]}", "rollout.schedule=expected"),
            *("trainer.stream=true", "model.dtype=float64"),
        ),
    ),
}
"""The step after which the run stops to be resumed, and its other changes, by `rollout.on_new_weights`."""


@pytest.fixture(scope="module")
def in_flight_runs(task, tmp_path_factory, fork_server):
    """Return the directories of the runs in which weights came while sequences ran, with their replays."""
    directory, commands = tmp_path_factory.mktemp("in_flight"), []
    for how, (stop, more) in IN_FLIGHT_RUNS.items():
        changes = ["trainer.lag=2", f"rollout.on_new_weights={how}", "algorithm.rollout_weights=token", *more]
        command = ["train", task / "rl.toml", *changes, "trainer.val_every=3", "placement.roles.rollout=generate"]
        run, replay = (f"trainer.run_dir={directory}/{how}/{name}" for name in ("run", "replay"))
        recorded = [*command, "controller.backend=ray", "controller.cpus_per_worker=0.5", run]
        command += [f"rollout.replay={directory}/{how}/run", "rollout.weight_sync=broadcast"]  # in one process: none
        both = recorded, [*command, replay]
        commands += [arguments for each in both for arguments in ([*each, "--stop-after", stop], each)]  # resumed once
        if "trainer.stream=true" in more:
            commands.append([*command, "trainer.stream=false", f"trainer.run_dir={directory}/{how}/whole"])
    argument_lists = [[str(part) for part in command] for command in commands]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FORK_SERVER": fork_server.address}
    process = fork_server.start(["-c", IN_FLIGHT, json.dumps(argument_lists)], environment=environment)
    try:
        out, err = process.communicate()
    finally:
        process.discard()
    assert process.returncode == 0, out[-2000:] + err[-4000:]
    return {how: directory / how for how in IN_FLIGHT_RUNS}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("how", IN_FLIGHT_RUNS)
def test_sequences_go_on_with_new_weights_and_a_replay_gives_the_same_bits(tiny, in_flight_runs, how):
    runs = in_flight_runs[how]
    rows = read_jsonl(runs / "run" / "metrics.jsonl")[1:]
    assert len(rows) == 6
    assert all(row["staleness/max"] <= 2 for row in rows)
    assert any(row["staleness/mean"] % 1 > 0 for row in rows), "no batch with tokens of several versions"
    assert all(row.get("weight_sync/probe_diff_max", 0) < 1e-4 for row in rows)
    assert tokens_of(runs / "replay") == tokens_of(runs / "run")
    run, replay = (tiny.results_of(runs / name, 6) for name in ("run", "replay"))
    assert replay["actor.safetensors"] == run["actor.safetensors"]
    assert replay["samples"] == run["samples"]
    staleness = [
        [row["staleness/mean"] for row in read_jsonl(runs / n / "metrics.jsonl")[1:]] for n in ("run", "replay")
    ]
    assert staleness[0] == staleness[1]
    if (runs / "whole").exists():  # whole batches of these samples train to the same weights, up to rounding
        weights, expected = (load_file(runs / name / WEIGHTS) for name in ("whole", "run"))
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-11)


ATTACKED = """
import os, signal, sys, time
from pathlib import Path
import hybridflow.trainers.role_classes as role_classes
from hybridflow.cli.main import main
from hybridflow.controller import Dispatch, register
from hybridflow.weight_sync import WeightReceiver

class Attacked(role_classes.InFlightRolloutWorker):
    def between_steps(self):
        groups = self._begun._groups._running.values()
        if self.rollout.version > 2 and any(0 < len(group.done) < group.group_size for group in groups):
            if "KILL" in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
        super().between_steps()

    @register(Dispatch.ONE_TO_ALL)
    def receive_weights(self, step, *args):
        result = super().receive_weights(step, *args)
        if step is WeightReceiver.start and args[0].version > 1 and "SYNC" in os.environ:
            Path(os.environ["SYNC"]).touch()
            time.sleep(3)
        return result

role_classes.InFlightRolloutWorker = Attacked
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.ray
@pytest.mark.slow
def test_attacked_runs_with_updates_in_flight_resume_with_each_prompt_once(task, finished_run, fork_server, tmp_path):
    run, processes = tmp_path / "run", []
    command = ["train", task / "rl.toml", f"trainer.run_dir={run}", "trainer.save_every=1", "trainer.log_samples=24"]
    command += [*LAG, "rollout.on_new_weights=retract", "trainer.val_before_train=false", *POOLS]
    command += ["recovery.max_restarts=0"]

    def start(*changes, **environment):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        processes.append(fork_server.start(["-c", ATTACKED, *map(str, command), *changes], environment=environment))
        return processes[-1]

    def signalled_in_a_sync(number):
        in_sync = tmp_path / f"sync_{number}"
        process, end = start(SYNC=str(in_sync)), time.monotonic() + 300
        while not in_sync.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(number)
        return process

    try:
        assert signalled_in_a_sync(signal.SIGKILL).wait(300) == -signal.SIGKILL
        steps = [row["step"] for row in read_jsonl(run / "metrics.jsonl")]
        died = start(KILL="1")  # the engine dies when half of a group is generated
        _, err = died.communicate(300)
        assert died.returncode == 75, err
        assert "rollout/0" in err
        assert f"continuing '{run}' after step {steps[-1]}" in err
        terminated = signalled_in_a_sync(signal.SIGTERM)
        _, err = terminated.communicate(300)
        assert terminated.returncode == 0, err
        assert "SIGTERM: this step will be finished, then a checkpoint is saved" in err
        finished = start("rollout.on_new_weights=keep-kv")
        _, err = finished.communicate(300)
        assert finished.returncode == 0, err
    finally:
        for process in processes:
            process.discard()
    names = ("step", "prompt")
    whole = finished_run("train", "trainer.log_samples=24")
    wanted, found = (
        [[row[name] for name in names] for row in read_jsonl(directory / "samples.jsonl")] for directory in (whole, run)
    )
    assert found == wanted
    assert len(wanted) == 6 * 24


@pytest.mark.ray
@pytest.mark.slow
def test_a_reward_that_never_returns_ends_a_run_with_running_batches(task, in_flight_runs, tmp_path, hybridflow):
    (tmp_path / "reward.py").write_text("import time\n\ndef score(**_):\n    time.sleep(10000)\n")
    changes = [*LAG, "rollout.on_new_weights=retract", "placement.pools={learn=[1],generate=[1]}", POOLS[-1]]
    changes += [f"rollout.replay={in_flight_runs['retract']}/run", "trainer.val_before_train=false"]
    changes += [f"trainer.run_dir={tmp_path}/run", f"reward.function={tmp_path}/reward.py:score"]
    outcome = hybridflow("train", task / "rl.toml", *changes, "reward.timeout_s=0.3")
    assert outcome.status == 1
    assert "took longer than reward.timeout_s=0.3" in outcome.err


def test_a_replay_without_a_schedule_is_an_error_before_a_worker_starts(task, tmp_path, hybridflow):
    changes = ["trainer.lag=2", "rollout.on_new_weights=retract", "algorithm.rollout_weights=token", *POOLS[2:]]
    changes += [f"trainer.run_dir={tmp_path / 'run'}", f"rollout.replay={tmp_path}"]
    outcome = hybridflow("train", task / "rl.toml", *changes)
    assert outcome.status != 0
    assert "schedule.jsonl not found" in outcome.err
    outcome = hybridflow("train", task / "rl.toml", *changes[:-2], "rollout.on_new_weights=wait", changes[-1])
    assert "needs rollout.on_new_weights = 'retract' or 'keep-kv', and a separate pool" in outcome.err


def test_a_replay_of_the_run_itself_is_an_error_that_keeps_its_schedule(task, tmp_path, hybridflow):
    (tmp_path / "run").mkdir()
    schedule = tmp_path / "run" / "schedule.jsonl"
    schedule.write_text('{"step": 1, "rank": 0, "event": "load", "number": 0, "engine_steps": null}\n')
    before = schedule.read_text()
    changes = ["trainer.lag=2", "rollout.on_new_weights=retract", "algorithm.rollout_weights=token", *POOLS]
    changes += [f"trainer.run_dir={tmp_path / 'run'}", f"rollout.replay={tmp_path}/../{tmp_path.name}/run"]
    outcome = hybridflow("train", task / "rl.toml", *changes)
    assert outcome.status != 0
    assert "is trainer.run_dir, whose schedule this run writes; set another trainer.run_dir" in outcome.err
    assert schedule.read_text() == before


def test_greedy_baselines_are_an_error_with_updates_in_flight(task, tmp_path, hybridflow):
    changes = ["trainer.lag=2", "rollout.on_new_weights=retract", "algorithm.rollout_weights=token", *POOLS]
    outcome = hybridflow(
        "train", task / "rl.toml", *changes, f"trainer.run_dir={tmp_path / 'run'}", "algorithm.advantage=remax"
    )
    assert "rollout.on_new_weights='retract' is not supported with algorithm.advantage='remax'" in outcome.err
