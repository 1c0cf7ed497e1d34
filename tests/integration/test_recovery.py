"""Runs that lose workers go on, and their results equal those of undisturbed runs bit for bit."""

import json
import re
from types import SimpleNamespace

import pytest
from support.faults import fired_faults

from fixtures.planted_faults import faults
from fixtures.tiny_run import differing, metrics_differ, results_of
from hybridflow.runtime.observe import read_jsonl

pytestmark = [pytest.mark.ray, pytest.mark.runs]

ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.5", "recovery.backoff_s=0")
POOLS = ("placement.pools={learn=[2],generate=[2]}", "placement.roles.rollout=generate")
STEPS = 4

RUNS = {
    "grpo": (),
    "ppo": (),
    "lag": ("trainer.lag=2", "actor.old_log_probs_from=rollout"),
}
"""Changes of each undisturbed run."""

FAULTS = {
    "start": ("grpo", "1: kill rollout/0 in start", "2: kill actor_rollout/0 in forward"),
    "backward": ("grpo", "2: kill actor_rollout/1 in backward"),
    "generate": ("grpo", "3: kill rollout/0 in generate"),
    "corrupt": ("grpo", "2: corrupt actor_rollout/0 in sync_send"),
    "stop": ("grpo", "3: stop rollout/1 in generate"),
    "save": ("grpo", "3: kill actor_rollout/1 in save"),
    "two": ("ppo", "2: kill critic/0 in backward", "2: kill rollout/1 in generate"),
    "again": ("ppo", "3: kill actor_rollout/0 in optimizer", "3: kill actor_rollout/1 in start"),
    "lag_generate": ("lag", "2: kill rollout/0 in generate"),
    "lag_backward": ("lag", "3: kill actor_rollout/0 in backward"),
    "standby": ("grpo", "2: kill rollout/0 in generate", "3: kill actor_rollout/1 in optimizer"),
}
"""Faults of each disturbed run, and the run that it must equal. A "start" after step 1 is that of a new process."""

KEYS = {"standby": ("recovery.standby=true",)}
"""Changes of a disturbed run that its undisturbed run has not."""

DAMAGED = ("3: corrupt actor_rollout/0 in save", "4: kill actor_rollout/1 in backward")
"""Faults of a run that saves a checkpoint of step 2: the snapshot of step 3 is damaged when step 4 needs it."""

OFFLINE = {"sft": ("sft.toml", "2: kill actor/1 in backward"), "dpo": ("pairs.toml", "3: kill actor/0 in optimizer")}
"""Recipe and fault of each kind of offline training."""


def fired(run):
    return sorted(row["fault"] for row in fired_faults(run))


def require_same_results(disturbed, undisturbed, step):
    """Compare all results but the metrics of weights that new processes get."""
    assert differing(disturbed, undisturbed, step) <= {"metrics"}
    metrics = [
        [{n: v for n, v in row.items() if "weight_sync/" not in n} for row in results_of(run, step)["metrics"]]
        for run in (disturbed, undisturbed)
    ]
    assert metrics[0] == metrics[1]


def test_a_recovered_run_has_the_results_of_an_undisturbed_one(ray_two_run, recovered_run):
    assert fired(recovered_run) == ["2: kill actor_rollout/1 in optimizer"]
    require_same_results(recovered_run, ray_two_run, 6)


def test_a_recovery_is_in_the_metrics_the_trace_and_a_file(recovered_run):
    (row,) = read_jsonl(recovered_run / "recoveries.jsonl")
    assert (row["step"], row["from_step"], row["action"], row["faults"]) == (2, 1, "restart", ["infrastructure"])
    assert "actor_rollout" in row["restarted"]
    metrics = {each["step"]: each for each in read_jsonl(recovered_run / "metrics.jsonl")}
    assert metrics[2]["recovery/failures"] == 1
    assert metrics[2]["recovery/repeated_steps"] == 0
    assert "recovery/failures" not in metrics[3]
    (event,) = (row for row in read_jsonl(recovered_run / "trace" / "calls.jsonl") if row["kind"] == "recovery")
    assert event["where"] == "restart"
    assert event["worker"].startswith("actor_rollout")


@pytest.fixture(scope="module")
def runs(tiny, task, tmp_path_factory, run_in_turn):
    directory = tmp_path_factory.mktemp("recovery")
    common = [*ON_RAY, *POOLS, f"trainer.total_steps={STEPS}", "controller.heartbeat_timeout_s=5"]
    of = {"grpo": tiny.commands(task)["grpo"], "ppo": tiny.commands(task)["ppo"]}
    commands = [[*of.get(name, of["grpo"]), *common, *more, f"name={name}"] for name, more in RUNS.items()]
    for name, (like, *entries) in FAULTS.items():
        changes = [*RUNS[like], *KEYS.get(name, ()), faults(*entries), f"name={name}"]
        commands.append([*of.get(like, of["grpo"]), *common, *changes])
    commands.append([*of["grpo"], *common, "trainer.save_every=2", faults(*DAMAGED), "name=damaged"])
    for kind, (recipe, fault) in OFFLINE.items():
        command = [kind, f"{task}/{recipe}", *ON_RAY, "controller.num_workers=2", "trainer.total_steps=3"]
        commands += [[*command, f"name={kind}"], [*command, faults(fault), f"name={kind}_faulty"]]
    places = [[each.replace("name=", f"trainer.run_dir={directory}/") for each in command] for command in commands]
    log = run_in_turn(*places, shares_cluster=True)
    return SimpleNamespace(log=log, **{path.name: path for path in directory.iterdir()})


@pytest.mark.exhaustive
@pytest.mark.own_run("recovered: with other faults")
@pytest.mark.parametrize("name", FAULTS)
def test_a_run_that_loses_workers_has_the_results_of_an_undisturbed_one(runs, name):
    like, *entries = FAULTS[name]
    assert fired(getattr(runs, name)) == sorted(entries)
    recovered = read_jsonl(getattr(runs, name) / "recoveries.jsonl")
    (start,) = json.loads((getattr(runs, name) / "run.json").read_text())["starts"]
    failed_starts = start.get("failed_starts", [])
    assert len(failed_starts) == sum(fault.startswith("1: ") for fault in entries)
    assert len(failed_starts) + sum(len(row["errors"]) for row in recovered) == len(entries)
    assert all(row["action"] == "restart" for row in recovered)
    if name == "backward":  # the rollout engine only forgets the unfinished step
        assert "rollout" not in recovered[0]["restarted"]
    if name == "standby":
        taken = [line for line in runs.log.splitlines() if "standbys take the places of" in line]
        assert [line.rpartition(" ")[2] for line in taken] == ["rollout", "actor_rollout+reward+reference"]
    require_same_results(getattr(runs, name), getattr(runs, like), STEPS)


@pytest.mark.exhaustive
@pytest.mark.own_run("recovered: from a checkpoint")
def test_a_run_with_a_damaged_snapshot_goes_back_to_a_checkpoint(runs):
    assert fired(runs.damaged) == sorted(DAMAGED)
    (row,) = read_jsonl(runs.damaged / "recoveries.jsonl")
    assert (row["step"], row["from_step"], row["action"]) == (4, 2, "restart")
    (warning,) = (line for line in runs.log.splitlines() if "is damaged" in line)
    assert re.search(r"step 3 cannot be restored: .*/step_000003/actor/\S+ is damaged: its SHA-256 is", warning)
    assert "start again" not in warning
    metrics = {each["step"]: each for each in read_jsonl(runs.damaged / "metrics.jsonl")}
    assert (metrics[3]["recovery/failures"], metrics[3]["recovery/repeated_steps"]) == (1, 1)
    require_same_results(runs.damaged, runs.grpo, STEPS)


@pytest.mark.exhaustive
@pytest.mark.own_run("recovered: of other commands")
@pytest.mark.parametrize("kind", OFFLINE)
def test_offline_training_that_loses_a_worker_has_the_same_results(runs, kind):
    faulty, fault = getattr(runs, f"{kind}_faulty"), OFFLINE[kind][1]
    assert fired(faulty) == [fault]
    (row,) = read_jsonl(faulty / "recoveries.jsonl")
    step = int(fault.partition(":")[0])
    assert (row["step"], row["from_step"], row["action"]) == (step, step - 1, "restart")
    assert "actor" in row["restarted"]
    require_same_results(faulty, getattr(runs, kind), 3)


@pytest.mark.own_run("recovered: it runs out of memory")
def test_training_out_of_memory_goes_on_with_smaller_micro_batches(task, grpo_run, tmp_path, run_in_turn):
    command = ["train", f"{task}/rl.toml", *ON_RAY, "controller.num_workers=2", "trainer.total_steps=2"]
    command += ["model.dtype=float64", "actor.mini_batch_size=4", "actor.epochs=2", "algorithm.kl_in_loss=true"]
    small = tmp_path / "small"
    run_in_turn(
        [*command, f"trainer.run_dir={small}", faults("2: memory actor_rollout/1 in backward")], shares_cluster=True
    )
    (row,) = read_jsonl(small / "recoveries.jsonl")
    assert (row["action"], row["faults"]) == ("smaller", ["memory"])
    budgets = json.loads((small / "token_budgets.json").read_text())["budgets"]
    assert budgets == {"actor_rollout": 50, "reference": 50}
    names = ("actor/loss", "actor/grad_norm", "actor/entropy", "critic/score/mean")
    assert metrics_differ(small, grpo_run, *names, steps=2) == []
