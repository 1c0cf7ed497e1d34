"""Runs with `trainer.lag`: weights of each batch, resume in the middle of the pipeline, equality with Ray."""

import pytest

from fixtures.tiny_run import WEIGHTS, differing, metrics_differ, spans
from hybridflow.runtime.observe import read_jsonl

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
@pytest.mark.parametrize(
    "background", ["true", pytest.param("false", marks=pytest.mark.exhaustive)], ids=lambda value: f"background={value}"
)
def test_a_run_resumed_with_batches_begun_equals_an_uninterrupted_one(run, task, background, caplog):
    more = [
        *LAG,
        "algorithm.advantage=remax",
        "trainer.val_every=2",
        "trainer.total_steps=5",
        "actor.mini_batch_size=4",
    ]
    more += [f"trainer.save_in_background={background}", f"data.val_files=['{task}/test.parquet']"]
    with caplog.at_level("INFO"):
        whole = run(*more, name="whole")
        assert "a batch is sampled with weights 4 optimizer steps old, and its last mini-batch is 5" in caplog.text
        assert "share processes, so they run in turn" in caplog.text
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
@pytest.mark.own_run("lag: other lags and layouts")
def test_generation_begins_before_an_update_ends_if_there_is_a_lag(task, tmp_path, run_in_turn):
    long = (
        "data.max_response_length=200",
        "memory.max_tokens_per_micro_batch=4096",
        "rollout.sync_bucket_bytes=100000",
    )
    command = ["train", task / "rl.toml", *long, "algorithm.rollout_weights=token", "trainer.total_steps=4"]
    commands = []
    for lag in (0, 1, 3):
        for name, where in (("local", ()), ("ray", POOLS)):
            changes = (f"trainer.lag={lag}", *where, f"trainer.run_dir={tmp_path}/{name}_{lag}")
            stops = [("--stop-after", 2), ()] if (lag, name) == (3, "ray") else [()]
            commands += [[*command, *changes, *stop] for stop in stops]
    run_in_turn(*commands, shares_cluster=True)
    for lag in (0, 1, 3):
        names = frozenset({"actor.safetensors", "samples"})
        assert differing(tmp_path / f"ray_{lag}", tmp_path / f"local_{lag}", 4, names=names) == set()
        generated, updates = (spans(tmp_path / f"ray_{lag}", name) for name in ("generate_sequences", "update_actor"))
        if lag < 3:  # the resumed run waited for its checkpoint
            assert [generated[step + 1][0] < updates[step][1] for step in range(3)] == [lag > 0] * 3


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("lag: on two and four ranks")
def test_several_training_ranks_with_a_lag_equal_one_in_float64(task, lag_run, tmp_path, run_in_turn):
    exact = ["train", task / "rl.toml", "model.dtype=float64", "trainer.lag=1", "algorithm.rollout_weights=token"]
    exact += ["actor.mini_batch_size=4", "actor.epochs=2", "algorithm.kl_in_loss=true", *POOLS]
    pools = {ranks: f"placement.pools={{learn=[{ranks}],generate=[1]}}" for ranks in (2, 4)}
    run_in_turn(
        *([*exact, pool, f"trainer.run_dir={tmp_path}/{ranks}"] for ranks, pool in pools.items()), shares_cluster=True
    )
    for ranks in pools:
        same = ("actor/", "critic/", "staleness/", "rollout_correction/", "response_length/", "rollout/log_prob_kl")
        assert metrics_differ(lag_run, tmp_path / str(ranks), *same) == []


IN_FLIGHT = """
import os, time
import hybridflow.trainers.build.role_classes as role_classes
from hybridflow.trainers.run.ppo_trainer import PPOTrainer

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
            if self.rollout.version != version or self._engine_lock._num_asking or time.time() > deadline:
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
