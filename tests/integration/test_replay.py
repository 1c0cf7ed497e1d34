"""`hybridflow replay` learns a step of a run again: with the same bits, or under changed keys on the same samples."""

import re
import shutil

import pytest

from hybridflow.runtime.observe import read_jsonl

pytestmark = [pytest.mark.runs, pytest.mark.own_run("grpo: it is learned again")]

ON_RAY = (
    *("controller.backend=ray", "controller.cpus_per_worker=0.5", "placement.pools={learn=[2],generate=[2]}"),
    *("placement.roles.rollout=generate", "trainer.total_steps=3"),
)
NAN = """
from hybridflow.algorithms import grpo_advantages

def advantage(scores, group_ids):
    advantages, returns = grpo_advantages(scores=scores, group_ids=group_ids, norm_by_std=True)
    if scores.mean() > 0.6:
        advantages[int(scores.argmax())] = float("nan")
    return advantages, returns
"""


@pytest.mark.parametrize(("name", "step"), [("grpo", 2), ("ppo", 4), ("lag", 5), ("streamed", 1), ("lora", 6)])
def test_a_step_is_learned_again_with_the_same_bits(request, hybridflow, name, step):
    """A step that differs would end its command with status 1."""
    run = request.getfixturevalue(f"{name}_run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    shown = hybridflow("replay", run, "--step", step)
    assert (shown.status, shown.err) == (0, "")
    assert "all metrics are those of the run, bit for bit" in shown.out
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("changes", [("algorithm.filter_groups=true",), ("memory.max_tokens_per_micro_batch=auto",)])
def test_a_run_that_filters_or_measures_is_learned_again_with_the_same_bits(run, hybridflow, changes):
    directory = run(*changes, "actor.mini_batch_size=4", "trainer.total_steps=2", "trainer.save_every=2")
    assert hybridflow("replay", directory, "--step", 2).status == 0


def test_a_step_is_learned_again_under_the_keys_of_its_start(run, hybridflow):
    """config.toml has those of the newest start, which resumed with another learning rate and a shorter schedule."""
    schedule = ("actor.optimizer.schedule=linear", "trainer.save_every=2", "actor.mini_batch_size=4")
    directory = run(*schedule, "actor.optimizer.lr=1e-2", "trainer.total_steps=9", "--stop-after", 2)
    assert run(*schedule, "actor.optimizer.lr=1e-3", "trainer.total_steps=4") == directory
    for step, begin in ((2, "the begin of the run"), (3, "the checkpoint of step 2")):
        shown = hybridflow("replay", directory, "--step", step)
        assert f"step {step}, from {begin}\nall metrics are those of the run, bit for bit\n" in shown.out, shown.err
    shutil.rmtree(directory / "checkpoints")
    shown = hybridflow("replay", directory, "--step", 4, "actor.optimizer.lr=1e-4")
    assert "step 4, from the begin of the run\nall metrics are those of the run, bit for bit\n" in shown.out, shown.err
    learned, changed = map(float, re.findall(r"actor/lr +(\S+) +(\S+)", shown.out)[0])
    assert learned == pytest.approx(10 * changed)  # the schedule is that of this start too
    (directory / "run.json").unlink()
    shown = hybridflow("replay", directory, "--step", 4)
    assert (shown.status, "run.json" in shown.err) == (1, True)


@pytest.mark.ray
@pytest.mark.exhaustive
def test_steps_of_runs_on_ray_are_learned_again_with_the_same_bits(tiny, task, tmp_path, run_in_turn):
    commands = []
    for name, step in (("grpo", 2), ("ppo", 3)):
        commands.append([*tiny.commands(task)[name], *ON_RAY, f"trainer.run_dir={tmp_path}/{name}"])
        commands.append(["replay", tmp_path / name, "--step", step])
    run_in_turn(*commands, shares_cluster=True)


def test_a_changed_key_is_compared_on_the_same_samples(grpo_run, hybridflow):
    shown = hybridflow("replay", grpo_run, "--step", 6, "actor.optimizer.lr=1e-2", "--samples", 6)
    assert (shown.status, shown.err) == (0, "")
    metrics, _, samples = shown.out.partition("\n\nsamples that the change moved most")
    assert metrics.startswith("step 6, from the checkpoint of step 5\nall metrics are those of the run, bit for bit\n")
    rows = {line.split()[0]: line.split()[1:] for line in metrics.splitlines()[4:]}
    assert rows["metric"] == ["as", "in", "the", "run", "changed"]
    assert rows["actor/lr"] == ["0.001", "0.01"]
    assert not any(name.startswith("response_length") for name in rows)
    after, changed = zip(*(map(float, line.split()[5:7]) for line in samples.splitlines()[2:]), strict=True)
    differences = [abs(one - other) for one, other in zip(after, changed, strict=True)]
    assert len(differences) == 6
    assert differences == pytest.approx(sorted(differences, reverse=True), abs=2e-4)
    learned = read_jsonl(grpo_run / "metrics.jsonl")[6]
    assert rows["actor/loss"][0] == f"{learned['actor/loss']:.6g}"


def test_another_loss_learns_from_the_same_samples(grpo_run, hybridflow):
    changes = ["actor.policy_loss=gspo", "actor.loss_aggregation=seq-mean-token-mean"]
    shown = hybridflow("replay", grpo_run, "--step", 5, *changes)
    assert shown.status == 0, shown.err
    assert "all metrics are those of the run" in shown.out


KEY = "cannot be changed in a replay, which learns from the samples of the step"
CHANGES = ("data.train_batch_size=4", "trainer.seed=3", "rollout.temperature=0.5", "algorithm.filter_groups=true")
REFUSED = [
    *((["--step", "6", change], f"{change!r} {KEY}") for change in CHANGES),
    *(([f"--step={step}"], f"step {step} cannot be replayed") for step in (0, -1, 7, 8)),
]


@pytest.mark.parametrize(("arguments", "problem"), REFUSED)
def test_a_key_of_the_samples_and_an_absent_step_are_refused(grpo_run, hybridflow, arguments, problem):
    shown = hybridflow("replay", grpo_run, *arguments)
    assert shown.status == 2
    assert problem in shown.err
    assert ("; use 1 to 6" in shown.err or "use 1 to 7" in shown.err) == ("--step=" in arguments[0])


def test_a_directory_that_is_no_run_of_train_is_refused(sft_run, tmp_path, hybridflow):
    for directory, problem in ((sft_run, "is not a run of `hybridflow train`"), (tmp_path, "is not the directory of")):
        shown = hybridflow("replay", directory, "--step", 1)
        assert shown.status == 2
        assert problem in shown.err


def test_a_step_that_the_run_did_not_complete_is_not_called_equal(run, hybridflow):
    directory = run("trainer.total_steps=2", "--stop-after", 1)
    shown = hybridflow("replay", directory, "--step", 2)
    assert shown.status == 0
    assert "the run has no metrics of this step to compare with" in shown.out
    assert "bit for bit" not in shown.out


def test_a_replay_starts_before_a_damaged_checkpoint_and_names_other_steps(grpo_run, tmp_path, hybridflow):
    run = shutil.copytree(grpo_run, tmp_path / "run")
    for step in (1, 2):
        (run / "checkpoints" / f"step_{step:06d}" / "actor.safetensors").write_bytes(b"")
    shown = hybridflow("replay", run, "--step", 2)
    assert shown.status == 0
    assert "step 2, from the begin of the run\nall metrics are those of the run" in shown.out
    assert "the replay starts before step 1" in shown.log
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(r'"actor/loss": [^,]*', '"actor/loss": 0.5', text))
    shown = hybridflow("replay", run, "--step", 2)
    assert shown.status == 1
    assert "step 1 differs from the run in 1 metrics: actor/loss\nstep 2 differs" in shown.out
    assert [path.name for path in run.iterdir() if path.name.startswith("replay")] == []


def test_a_step_that_was_refused_names_its_sample(task, tmp_path, hybridflow):
    (tmp_path / "mine.py").write_text(NAN)
    run = tmp_path / "run"
    changes = [f"algorithm.advantage={tmp_path}/mine.py:advantage", "trainer.save_every=1", f"trainer.run_dir={run}"]
    failed = hybridflow("train", task / "rl.toml", *changes, "reward.processes=0")
    assert failed.status == 1
    (row,) = re.findall(r"row (\d+): loss nan", failed.err)
    step = max((row["step"] for row in read_jsonl(run / "metrics.jsonl")), default=0) + 1
    shown = hybridflow("replay", run, "--step", step)
    assert shown.status == 1
    assert re.search(rf"\nrow {row}: score 1, prompt '.+', response '.+'", shown.err)
