"""Runs with `trainer.lag`: weights of each batch, resume in the middle of the pipeline, equality with Ray."""

import pytest

from fixtures.tiny_run import WEIGHTS, differing, metrics_differ, spans
from hybridflow.observability import read_jsonl

LAG = ("trainer.lag=2", "algorithm.rollout_weights=token")
POOLS = (
    *("controller.backend=ray", "controller.cpus_per_worker=0.5"),
    *("placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate"),
)


@pytest.mark.runs
def test_a_batch_is_sampled_with_weights_that_are_lag_steps_old(lag_run):
    rows = read_jsonl(lag_run / "metrics.jsonl")[1:]
    updates = 4  # two epochs of 8 prompts in mini-batches of 4
    ages = [0, *[updates] * 5]
    assert [row["staleness/max"] for row in rows] == [row["staleness/mean"] for row in rows] == ages
    assert [row["staleness/off_policy_updates"] for row in rows] == [age + updates - 1 for age in ages]
    assert [row["staleness/age_0"] for row in rows] == [1, 0, 0, 0, 0, 0]
    assert [row["staleness/age_4_to_7"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert [row["sampling/queue_length"] for row in rows] == [1, 1, 1, 1, 1, 0]
    assert all(row["timing_s/queue_wait"] > 0 for row in rows[1:])
    assert all(0 <= row["perf/actor_rollout_idle_share"] < 1 for row in rows)
    assert [row["training/epoch"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert rows[0]["rollout_correction/weight_max"] == pytest.approx(1, abs=1e-4)
    assert rows[2]["rollout_correction/weight_max"] > 1.001


@pytest.mark.runs
@pytest.mark.own_run("resumed: with batches begun")
def test_a_run_resumed_with_batches_begun_equals_an_uninterrupted_one(run, task):
    more = [*LAG, "algorithm.advantage=remax", "trainer.val_every=2", "trainer.total_steps=5"]
    more += ["actor.mini_batch_size=4", f"data.val_files=['{task}/test.parquet']"]
    whole = run(*more, name="whole")
    rows = read_jsonl(whole / "metrics.jsonl")[1:]
    assert [row["staleness/max"] for row in rows] == [0, 2, 4, 4, 4]
    assert [row["sampling/queue_length"] for row in rows] == [2, 2, 2, 1, 0]
    for stop in (1, 3, 0):
        resumed = run(*more, *([f"--stop-after={stop}"] if stop else []))
        if stop:
            files = {path.name for path in (resumed / "checkpoints").glob(f"*{stop}/batch*")}
            begun = [f"batch_{stop + ahead:06d}" for ahead in (0, 1)]
            assert files == {f"{name}{kind}.safetensors" for name in begun for kind in ("", "_greedy")}
    assert differing(resumed, whole, 5, names=WEIGHTS) == set()


@pytest.mark.runs
@pytest.mark.ray
@pytest.mark.own_run("lag: in two pools")
def test_a_run_with_a_lag_on_two_pools_equals_that_in_one_process(task, lag_run, tmp_path, run_in_turn):
    exact = (*("model.dtype=float64", "actor.mini_batch_size=4", "actor.epochs=2", "algorithm.kl_in_loss=true"),)
    lag = ("trainer.lag=1", "algorithm.rollout_weights=token", "trainer.save_every=1", "trainer.keep_checkpoints=9")
    run_in_turn(
        ["train", task / "rl.toml", *exact, *lag, *POOLS, f"trainer.run_dir={tmp_path}/run"], shares_cluster=True
    )
    names = WEIGHTS - {"metrics"}
    assert differing(tmp_path / "run", lag_run, 6, names=names) == set()
    assert metrics_differ(lag_run, tmp_path / "run", "staleness/", "sampling/", "actor/", "rollout_correction/") == []
    for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]:
        assert all(0 <= row[f"perf/{role}_idle_share"] < 1 for role in ("actor_rollout", "rollout", "reward"))
        assert ("timing_s/weight_sync" in row) == (row["step"] > 1)  # all ranks load the initial weights
    generated, updates = (spans(tmp_path / "run", name) for name in ("generate_sequences", "update_actor"))
    assert len(generated) == len(updates) == 6


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("lag: other lags")
def test_generation_begins_before_an_update_ends_if_there_is_a_lag(task, tmp_path, run_in_turn):
    command = ["train", task / "rl.toml", *POOLS, "algorithm.rollout_weights=token", "trainer.total_steps=4"]
    command += ["data.max_response_length=200", "memory.max_tokens_per_micro_batch=4096"]
    run_in_turn(
        *([*command, f"trainer.lag={lag}", f"trainer.run_dir={tmp_path}/{lag}"] for lag in (0, 1)), shares_cluster=True
    )
    for lag in (0, 1):
        generated, updates = (spans(tmp_path / str(lag), name) for name in ("generate_sequences", "update_actor"))
        assert [generated[step + 1][0] < updates[step][1] for step in range(3)] == [lag > 0] * 3


IN_FLIGHT = """
import os, time
import hybridflow.trainers.role_classes as role_classes
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
"""
TIMEOUT = "import time\n\ndef score(**_):\n    time.sleep(10000)\n"


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("lag: with weights that come in flight")
def test_sequences_go_on_with_new_weights_and_a_replay_gives_the_same_bits(task, tmp_path, run_in_turn, hybridflow):
    command = ["train", task / "rl.toml", *LAG, "rollout.on_new_weights=retract", "rollout.weight_sync=disk"]
    command += ["placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate", "trainer.val_every=3"]
    recorded = [*command, *POOLS[:2], f"trainer.run_dir={tmp_path}/run"]
    replayed = [*command, f"rollout.replay={tmp_path}/run", "rollout.weight_sync=broadcast"]
    replay = [*replayed, f"trainer.run_dir={tmp_path}/replay"]
    each_resumed_once = [[*run, *stop] for run in (recorded, replay) for stop in (["--stop-after", 3], [])]
    run_in_turn(*each_resumed_once, shares_cluster=True, program=IN_FLIGHT)
    rows, again = (read_jsonl(tmp_path / name / "metrics.jsonl")[1:] for name in ("run", "replay"))
    assert len(rows) == 6
    assert all(row["staleness/max"] <= 2 for row in rows)
    assert any(row["staleness/mean"] % 1 > 0 for row in rows), "no batch with tokens of several versions"
    assert all(row.get("weight_sync/probe_diff_max", 0) < 1e-4 for row in rows)
    assert [row["staleness/mean"] for row in rows] == [row["staleness/mean"] for row in again]
    assert (
        differing(tmp_path / "replay", tmp_path / "run", 6, names=frozenset({"actor.safetensors", "samples"})) == set()
    )
    for step in range(6):
        tokens = [(tmp_path / name / f"tokens_{step}.safetensors").read_bytes() for name in ("run", "replay")]
        assert tokens[0] == tokens[1]
    (tmp_path / "reward.py").write_text(TIMEOUT)  # a reward that never returns ends a run with running batches
    changes = [f"trainer.run_dir={tmp_path}/timeout", f"reward.function={tmp_path}/reward.py:score"]
    outcome = hybridflow(*replayed, *changes, "trainer.val_before_train=false", "reward.timeout_s=0.3")
    assert outcome.status == 1
    assert "took longer than reward.timeout_s=0.3" in outcome.err
