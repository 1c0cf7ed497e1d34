"""Runs with `placement.lend`: training ranks generate prompts that wait for memory in the rollout engine."""

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


@pytest.mark.ray
@pytest.mark.slow
def test_scratch(tiny, task, tmp_path, run_in_turn):
    base = ["train", task / "rl.toml", *LITTLE_MEMORY, LEND]
    lag = ["trainer.lag=2", "algorithm.rollout_weights=token"]
    two = [POOLS[0], POOLS[1], "placement.pools={learn=[2],generate=[2]}", POOLS[3]]
    runs = {
        "a": [*base, *POOLS],
        "lag": [*base, *POOLS, *lag, "trainer.save_every=1"],
        "flight": [*base, *POOLS, *lag, "rollout.on_new_weights=retract", "trainer.save_every=2"],
        "two": [*base, *two],
        "remax": [*base, *two, *lag, "algorithm.advantage=remax"],
    }
    import traceback

    try:
        run_in_turn(*[[*c, f"trainer.run_dir={tmp_path}/{n}"] for n, c in runs.items()], shares_cluster=True)
    finally:
        for name in runs:
            try:
                print(name, lent(tmp_path / name))
                for row in read_jsonl(tmp_path / name / "metrics.jsonl"):
                    print(
                        {
                            k: round(v, 3)
                            for k, v in row.items()
                            if k.startswith(
                                ("staleness/", "timing_s", "perf/actor_rollout", "perf/rollout", "sampling")
                            )
                        }
                    )
                for who in ("LendingActorWorker.generate_sequences", "GivingWorker.give_waiting"):
                    print(who, len(calls(tmp_path / name, who)))
                s = tmp_path / name / "schedule.jsonl"
                print(s.read_text()[:600] if s.exists() else "no schedule")
            except Exception:
                traceback.print_exc()
