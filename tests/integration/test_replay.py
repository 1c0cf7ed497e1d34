"""`hybridflow replay` learns a step of a run again: with the same bits, or under changed keys on the same samples."""

import random
import re
import shutil
from types import SimpleNamespace

import pytest

from hybridflow.observability import read_jsonl

pytestmark = pytest.mark.slow

STEPS = 10
ON_RAY = (
    *("controller.backend=ray", "controller.cpus_per_worker=0.5", "placement.pools={learn=[2],generate=[2]}"),
    *("placement.roles.rollout=generate", "trainer.total_steps=3"),
)
MORE = {
    "lag": ("trainer.lag=2", "actor.old_log_probs_from=rollout"),
    "stream": ("trainer.stream=true", "actor.epochs=1", "actor.mini_batch_size=0"),
    "filtered": ("algorithm.filter_groups=true",),
    "lora": ("lora.rank=4",),
    "auto": ("memory.max_tokens_per_micro_batch=auto",),
}
"""Changes of further kinds of runs, which are replayed in one process."""

NAN = """
from hybridflow.algorithms import grpo_advantages

def advantage(scores, group_ids):
    advantages, returns = grpo_advantages(scores=scores, group_ids=group_ids, norm_by_std=True)
    if scores.mean() > 0.6:
        advantages[int(scores.argmax())] = float("nan")
    return advantages, returns
"""


@pytest.fixture(scope="module")
def runs(tiny, task, tmp_path_factory, run_in_turn):
    directory = tmp_path_factory.mktemp("replay")
    commands = []
    for name, arguments in tiny.commands(task).items():
        commands.append([*arguments, "trainer.save_every=4", f"trainer.total_steps={STEPS}"])
        commands[-1].append(f"trainer.run_dir={directory}/{name}")
    for name, changes in MORE.items():
        commands.append([*tiny.commands(task)["grpo"], *changes, "trainer.save_every=2", "trainer.total_steps=5"])
        commands[-1].append(f"trainer.run_dir={directory}/{name}")
    run_in_turn(*commands)
    return SimpleNamespace(**{path.name: path for path in directory.iterdir()})


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_ten_steps_of_a_run_are_learned_again_with_the_same_bits(runs, run_in_turn, name):
    """A step that differs would end its command with status 1. Checkpoints are those of steps 8 and 10."""
    steps = random.Random(1).sample(range(1, STEPS + 1), STEPS)
    before = {path: path.read_bytes() for path in getattr(runs, name).rglob("*") if path.is_file()}
    run_in_turn(*(["replay", getattr(runs, name), "--step", step] for step in steps))
    assert {path: path.read_bytes() for path in getattr(runs, name).rglob("*") if path.is_file()} == before


def test_steps_of_other_kinds_of_runs_are_learned_again_with_the_same_bits(runs, run_in_turn):
    run_in_turn(*(["replay", getattr(runs, name), "--step", step] for name in MORE for step in (1, 4)))


@pytest.mark.ray
def test_steps_of_runs_on_ray_are_learned_again_with_the_same_bits(tiny, task, tmp_path, run_in_turn):
    commands = []
    for name, step in (("grpo", 2), ("ppo", 3)):
        commands.append([*tiny.commands(task)[name], *ON_RAY, f"trainer.run_dir={tmp_path}/{name}"])
        commands.append(["replay", tmp_path / name, "--step", step])
    run_in_turn(*commands, shares_cluster=True)


def test_a_changed_key_is_compared_on_the_same_samples(runs, hybridflow):
    shown = hybridflow("replay", runs.grpo, "--step", 10, "actor.optimizer.lr=1e-2", "--samples", 3)
    assert (shown.status, shown.err) == (0, "")
    metrics, _, samples = shown.out.partition("\n\nsamples that the change moved most")
    assert metrics.startswith("step 10, from the checkpoint of step 8\nall metrics are those of the run, bit for bit\n")
    rows = {line.split()[0]: line.split()[1:] for line in metrics.splitlines()[4:]}
    assert rows["metric"] == ["as", "in", "the", "run", "changed"]
    assert rows["actor/lr"] == ["0.001", "0.01"]
    assert not any(name.startswith("response_length") for name in rows)
    assert len(samples.splitlines()) == 2 + 3
    learned = next(row for row in read_jsonl(runs.grpo / "metrics.jsonl") if row["step"] == 10)
    assert rows["actor/loss"][0] == f"{learned['actor/loss']:.6g}"


@pytest.mark.parametrize(
    "change", ["actor.policy_loss=gspo", "algorithm.kl_coef=0", "actor.clip_ratio_high=0.5", "model.dtype=float64"]
)
def test_other_losses_and_precisions_learn_from_the_same_samples(runs, hybridflow, change):
    changes = [change, *["actor.loss_aggregation=seq-mean-token-mean"] * ("gspo" in change)]
    shown = hybridflow("replay", runs.grpo, "--step", 9, *changes)
    assert shown.status == 0, shown.err
    assert "all metrics are those of the run" in shown.out


@pytest.mark.parametrize(
    "change", ["data.train_batch_size=4", "rollout.temperature=0.5", "trainer.seed=3", "algorithm.filter_groups=true"]
)
def test_a_key_that_changes_the_samples_is_refused(runs, hybridflow, change):
    shown = hybridflow("replay", runs.grpo, "--step", 9, change)
    assert shown.status == 2
    assert f"{change!r} cannot be changed in a replay, which learns from the samples of the step" in shown.err


@pytest.mark.parametrize("step", [0, -1, STEPS + 1, STEPS + 2])
def test_a_step_that_the_run_has_not_is_refused(runs, hybridflow, step):
    shown = hybridflow("replay", runs.grpo, f"--step={step}")
    assert shown.status == 2
    assert f"step {step} cannot be replayed" in shown.err
    assert f"use 1 to {STEPS + 1}" in shown.err or f"use 1 to {STEPS}" in shown.err


def test_a_step_that_the_run_did_not_complete_is_not_called_equal(tiny, task, tmp_path, hybridflow):
    run = tmp_path / "run"
    assert hybridflow(*tiny.commands(task)["grpo"], f"trainer.run_dir={run}", "--stop-after", 1).status == 0
    shown = hybridflow("replay", run, "--step", 2)
    assert shown.status == 0
    assert "the run has no metrics of this step to compare with" in shown.out
    assert "bit for bit" not in shown.out


def test_a_replay_starts_before_a_damaged_checkpoint(runs, tmp_path, hybridflow):
    run = tmp_path / "run"
    shutil.copytree(runs.grpo, run)
    (run / "checkpoints" / "step_000008" / "actor.safetensors").write_bytes(b"")
    shown = hybridflow("replay", run, "--step", 9)
    assert shown.status == 0
    assert "step 9, from the begin of the run\nall metrics are those of the run" in shown.out
    assert "the replay starts before step 8" in shown.log


def test_a_run_of_another_command_is_refused(task, tmp_path, hybridflow):
    changes = ("trainer.total_steps=1", "data.val_files=[]", f"trainer.run_dir={tmp_path}/sft")
    assert hybridflow("sft", task / "sft.toml", *changes).status == 0
    shown = hybridflow("replay", tmp_path / "sft", "--step", 1)
    assert shown.status == 2
    assert "is not a run of `hybridflow train`" in shown.err


def test_a_directory_that_is_no_run_is_refused(tmp_path, hybridflow):
    shown = hybridflow("replay", tmp_path, "--step", 1)
    assert shown.status == 2
    assert "is not the directory of a run" in shown.err


def test_a_step_that_is_not_that_of_the_run_is_reported(tiny, task, tmp_path, hybridflow):
    run = tmp_path / "run"
    assert hybridflow(*tiny.commands(task)["grpo"], "trainer.total_steps=2", f"trainer.run_dir={run}").status == 0
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(r'"actor/loss": [^,]*', '"actor/loss": 0.5', text))
    shown = hybridflow("replay", run, "--step", 2)
    assert shown.status == 1
    assert "step 1 differs from the run in 1 metrics: actor/loss\nstep 2 differs" in shown.out
    assert [path.name for path in run.iterdir() if path.name.startswith("replay")] == []


def test_a_step_that_was_refused_names_its_sample(tiny, task, tmp_path, hybridflow):
    (tmp_path / "mine.py").write_text(NAN)
    run = tmp_path / "run"
    changes = [f"algorithm.advantage={tmp_path}/mine.py:advantage", "trainer.save_every=1", f"trainer.run_dir={run}"]
    failed = hybridflow(*tiny.commands(task)["grpo"], *changes)
    assert failed.status == 1
    (row,) = re.findall(r"row (\d+): loss nan", failed.err)
    step = max((row["step"] for row in read_jsonl(run / "metrics.jsonl")), default=0) + 1
    shown = hybridflow("replay", run, "--step", step)
    assert shown.status == 1
    assert re.search(rf"\nrow {row}: score 1, prompt '.+', response '.+'", shown.err)
