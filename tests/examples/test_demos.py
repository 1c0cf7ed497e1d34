"""The demos with fewer steps: one of each kind in `make test-runs`, enough to learn in `make test-all`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import small_model

from hybridflow.models.tiny_model import write_model
from hybridflow.runtime.observe import read_jsonl

ROOT = Path(__file__).parents[2]
ALL = pytest.mark.exhaustive
FEW = ("trainer.val_every=0", "controller.threads=1")

pytestmark = [pytest.mark.runs, pytest.mark.own_run("grpo: a demo")]


def run_demo(directory, name, *arguments, **changes):
    """Run a demo with arguments and, for each option of `changes`, its settings; return what it prints."""
    given = [part for option, settings in changes.items() for each in settings for part in (f"--{option}", each)]
    program = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *map(str, arguments), *given]
    done = subprocess.run(program, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_image(file):
    return file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("steps", [1, pytest.param(30, marks=ALL)])
def test_the_demo_and_its_control_run_from_the_same_warm_start(tmp_path, steps):
    settings = {
        "sft": [f"trainer.total_steps={steps}", "offline.batch_size=32", "controller.threads=1"],
        "grpo": ["trainer.total_steps=2", "data.train_batch_size=8", "validation.max_samples=40", *FEW],
    }
    output = run_demo(tmp_path, "countdown_demo", **settings)
    runs = tmp_path / "runs" / "countdown"
    summary = json.loads((runs / "summary.json").read_text())
    result = f"demo: accuracy {summary['before']:.3f} -> {summary['after']:.3f} on 40 held-out problems in "
    assert result in output
    assert is_image(runs / "reward_curve.png")
    assert [row["step"] for row in read_jsonl(runs / "grpo" / "metrics.jsonl")] == [1, 2]
    if steps > 1:
        losses = [row["sft/loss"] for row in read_jsonl(runs / "sft" / "metrics.jsonl")]
        assert losses[-1] < 0.5 * losses[0]
        output = run_demo(tmp_path, "countdown_demo", "--control", **settings)
        more = int(re.search(r"control: (\d+) more supervised steps", output)[1])
        assert more > 0
        assert len(read_jsonl(runs / "control" / "metrics.jsonl")) == steps + more
        assert f"control: accuracy {summary['before']:.3f} -> " in output


def test_the_example_of_a_small_model_measures_trains_and_measures_again(tmp_path, capsys):
    write_model(tmp_path / "model", tuple("0123456789+= \n"), by_characters=True)
    small_model.main([str(tmp_path / "model"), "--steps", "1", "--run-dir", str(tmp_path / "run")])
    output = capsys.readouterr().out
    assert "of 208 held-out sums are right" in output
    assert re.fullmatch(r"after: \d\.\d{3}, before: \d\.\d{3}", output.splitlines()[-1])


def test_the_small_model_gets_questions_and_scores_of_reasoning_gym(tmp_path, capsys, monkeypatch):
    task = "needle_haystack"
    monkeypatch.setitem(small_model.TASKS[task], "data.max_prompt_length", 500)  # this model's tokens are characters
    write_model(tmp_path / "model", tuple("0123456789+= \n"), by_characters=True)
    small_model.main([str(tmp_path / "model"), "--task", task, "--before-only", "--run-dir", str(tmp_path / "run")])
    assert "before: 0.000 of 208 held-out questions are right" in capsys.readouterr().out
    first, second = small_model.questions(task, 0, 2, "examples")
    assert first["prompt"].count("Answer:") == 2
    assert first["prompt"].endswith("Reply only with a name.\nAnswer:")
    answers = (f" {first['answer']}", second["answer"], f"{first['answer']}.")
    assert [small_model.score(answer, first["entry"]) for answer in answers] == [1.0, 0.0, 0.0]
    assert small_model.questions(task, 0, 1, "chat")[0]["prompt"] in first["prompt"]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("steps", [(1, 1, 3, 1), pytest.param((40, 80, 12, 60), marks=ALL)], ids=sum)
def test_a_reward_model_is_learned_from_pairs_and_policies_improve(tmp_path, steps):
    stages = dict(zip(("sft", "reward_model", "ppo", "dpo"), steps, strict=True))
    changes = [f"{stage}.trainer.total_steps={count}" for stage, count in stages.items()]
    changes += ["ppo.trainer.val_every=0", "ppo.trainer.val_before_train=false"]
    run_demo(tmp_path, "rlhf", *(f"--set={change}" for change in changes))
    accuracies = json.loads((tmp_path / "runs" / "rlhf" / "summary.json").read_text())
    rewards = [row["critic/score/mean"] for row in read_jsonl(tmp_path / "runs" / "rlhf" / "ppo" / "metrics.jsonl")]
    assert {"sft", "dpo", "reward_model"} <= accuracies.keys()
    if stages["ppo"] > 3:
        assert accuracies["reward_model"] > 0.9
        assert rewards[-1] > rewards[0] + 2
        assert accuracies["dpo"] > 2 * accuracies["sft"]


@pytest.mark.parametrize("steps", [1, pytest.param(4, marks=ALL)])
def test_the_demo_of_tools_runs_to_its_last_line(tmp_path, steps):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    grpo = [f"trainer.total_steps={min(steps, 2)}", "data.train_batch_size=2", "validation.max_samples=8", *FEW]
    sft = ["controller.threads=1", f"trainer.total_steps={steps}", "offline.batch_size=8"]
    output = run_demo(tmp_path, "tools_demo", "--full", "--conversations", 64, sft=sft, grpo=grpo)
    last = output.strip().splitlines()[-1]
    assert re.fullmatch(r"demo-tools: accuracy \d\.\d{3} -> \d\.\d{3} on 8 held-out problems in \d+ s", last)
    runs = tmp_path / "runs" / "tools"
    assert all(is_image(runs / f"{name}.png") for name in ("calculator", "single", "maze"))
    if steps > 1:
        turns = [each for row in read_jsonl(runs / "maze" / "rollouts.jsonl") for each in row["turns"]]
        assert max(turns) > 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps", [pytest.param(2, marks=ALL)])
def test_an_agent_of_a_library_is_trained_on_ray_by_its_demo(tmp_path, steps):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    sft = ["controller.threads=1", "trainer.total_steps=4", "offline.batch_size=8"]
    grpo = [f"trainer.total_steps={steps}", "data.train_batch_size=2", "validation.max_samples=8", *FEW]
    output = run_demo(tmp_path, "agent_demo", "--conversations", 64, sft=sft, grpo=grpo)
    *_, reward, last = output.strip().splitlines()
    assert re.fullmatch(rf"reward of the agent: \d\.\d{{3}} -> \d\.\d{{3}} in {steps} steps, \d+ s", reward)
    assert re.fullmatch(r"demo-agent: accuracy \d\.\d{3} -> \d\.\d{3} on 8 held-out problems in \d+ s", last)
    rows = read_jsonl(tmp_path / "runs" / "tools" / "agent" / "samples.jsonl")
    assert rows[0]["rendered_prompt"].startswith("<|im_start|>system\ntools: multiply<|im_end|><|im_start|>user\n")
