"""`hybridflow evaluate` and `hybridflow generate` on a model directory, a checkpoint and a run."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hybridflow.runtime.observe import read_jsonl

SAMPLED = ("validation.group_size=2", "validation.temperature=1", "reward.processes=0")
FEW = ("data.max_response_length=4", "controller.threads=1", "validation.group_size=8", "validation.temperature=1")
PROMPT = ("--prompt", "3 17 5 => 9 :")


def table(out):
    return {name: float(value) for name, value in (line.split() for line in out.splitlines())}


def validated(run, step):
    """Return the validation metrics of a step, rounded as in the printed table."""
    row = next(row for row in read_jsonl(run / "metrics.jsonl") if row["step"] == step)
    return {name: round(value, 4) for name, value in row.items() if name.startswith("val/")}


@pytest.mark.runs
@pytest.mark.own_run("grpo: it is evaluated, with processes for rewards")
def test_evaluate_equals_validation_during_training(grpo_run, hybridflow):
    newest = hybridflow("evaluate", "--run", grpo_run)
    assert newest.status == 0
    assert table(newest.out) == validated(grpo_run, 6)
    # an untrained model has the scores of validation before the first step; step 1 is another model
    assert table(hybridflow("evaluate", grpo_run / "config.toml").out) == validated(grpo_run, 0)
    earlier = hybridflow("evaluate", "--run", grpo_run, "--step", "1")
    by_directory = hybridflow(
        "evaluate", grpo_run / "config.toml", "--checkpoint", grpo_run / "checkpoints" / "step_000001"
    )
    assert by_directory.out == earlier.out != newest.out


@pytest.mark.runs
def test_evaluation_on_three_ranks_equals_one_rank(task, hybridflow):
    one, three = (
        hybridflow("evaluate", task / "rl.toml", f"controller.num_workers={n}", "reward.processes=0") for n in (1, 3)
    )
    assert one.status == 0
    assert one.out == three.out


def test_evaluation_metrics_are_means_over_the_written_samples(task, tmp_path, hybridflow):
    changes = [*SAMPLED, "validation.batch_size=4", "--output", tmp_path / "samples.jsonl"]
    out = hybridflow("evaluate", task / "rl.toml", *changes).out
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert [sample["index"] for sample in samples] == [index for index in range(10) for _ in range(2)]
    assert set(samples[0]) == {
        *("index", "data_source", "prompt", "rendered_prompt", "ground_truth", "response", "score", "answer")
    }
    mean = sum(sample["score"] for sample in samples) / 20
    assert table(out)["val/score/mean"] == pytest.approx(mean, abs=1e-4)
    assert "val/countdown/pass@2" in table(out)


def test_generate_gives_the_responses_of_evaluation(task, tmp_path, hybridflow):
    files = ["--prompts-file", tmp_path / "prompts.parquet", "--output", tmp_path / "rows.jsonl"]
    pq.write_table(pq.read_table(task / "test.parquet", columns=["prompt"]), tmp_path / "prompts.parquet")
    outcome = hybridflow("generate", task / "rl.toml", *SAMPLED, "validation.batch_size=3", *files)
    assert outcome.status == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [len(row["responses"]) for row in rows] == [2] * 10
    assert outcome.out.count("\nresponse") == 20
    hybridflow("evaluate", task / "rl.toml", *SAMPLED, "--output", tmp_path / "sampled.jsonl")
    sampled = [sample["response"] for sample in read_jsonl(tmp_path / "sampled.jsonl")]
    assert [response for row in rows for response in row["responses"]] == sampled

    hybridflow("evaluate", task / "rl.toml", "reward.processes=0", "--output", tmp_path / "greedy.jsonl")
    first, second = read_jsonl(tmp_path / "greedy.jsonl")[:2]
    typed = hybridflow("generate", task / "rl.toml", "--prompt", first["prompt"], "--prompt", second["prompt"])
    shown = [line for line in typed.out.splitlines() if line]
    assert shown[:3] == [
        f"prompt: {first['prompt']}",
        f"response (cut): {first['response']}",  # no EOS within 12 tokens
        f"prompt: {second['prompt']}",
    ]


def test_generate_caps_the_default_response_length_at_the_positions(task, hybridflow):
    arguments = ["generate", "--model", task / "model", *PROMPT, "controller.threads=1"]
    capped = hybridflow(*arguments)
    assert capped.status == 0
    assert "exceeds the 250 of 256 positions of the model that a prompt of 6 tokens leaves" in capped.log
    assert "responses are capped at 250 tokens" in capped.log
    explicit = hybridflow(*arguments, "data.max_response_length=251")
    assert explicit.status == 2
    assert "data.max_response_length=251 exceeds the 250 of 256 positions" in explicit.err
    assert "use at most 250." in explicit.err
    full = hybridflow("generate", "--model", task / "model", "--prompt", "1 " * 256)
    assert full.status == 2
    assert "the longest prompt has 256 tokens, which leaves no room for a response: the model has 256" in full.err


def test_generate_puts_a_system_message_before_the_prompt(task, tmp_path, hybridflow):
    def answer(*arguments):
        return hybridflow("generate", "--model", tmp_path / "model", "--prompt", "3 17 5", *FEW, *arguments)

    model = shutil.copytree(task / "model", tmp_path / "model")
    assert "--system needs a chat template, but the tokenizer has none" in answer("--system", "9 4").err
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}=>{% endif %}"
    (model / "chat_template.jinja").write_text(template)
    plain, with_system = answer(), answer("--system", "9 4")
    assert with_system.status == 0
    assert with_system.out.startswith("prompt: 9 4\n3 17 5\n")
    assert with_system.out.split("response")[1:] != plain.out.split("response")[1:]
    off = answer("--system", "9 4", "data.chat_template=false")
    assert (off.status, "but data.chat_template=false" in off.err) == (2, True)
    (model / "chat_template.jinja").write_text(template.replace("messages", "messages if m['role'] == 'user'"))
    assert "message 0 has the role 'system', which the chat template does not write" in answer("--system", "9 4").err


@pytest.mark.runs
@pytest.mark.own_run("grpo: its recipe has relative paths")
def test_run_with_relative_paths_is_evaluated_from_another_directory(task, tmp_path, monkeypatch, hybridflow):
    monkeypatch.chdir(shutil.copytree(task, tmp_path / "project"))
    Path("relative.toml").write_text((task / "rl.toml").read_text().replace(f"{task}/", ""))
    assert hybridflow("train", "relative.toml", "trainer.run_dir=run", "trainer.total_steps=1").status == 0
    here = hybridflow("evaluate", "--run", "run")
    monkeypatch.chdir(tmp_path)
    there = hybridflow("evaluate", "--run", "project/run")
    assert (there.status, there.out) == (0, here.out)
    assert not (tmp_path / "run").exists()
    assert hybridflow("generate", "--run", "project/run", *PROMPT, "data.max_response_length=4").status == 0
    assert hybridflow("export", "project/run", "exported").status == 0
    typed = hybridflow("evaluate", "--run", "project/run", 'data.val_files=["test.parquet"]')
    assert (typed.status, "test.parquet: no such file." in typed.err) == (2, True)


ERRORS = [
    ("generate", ["--prompt", "1 " * 20], 1, "prompt 0 has 20 tokens; it must have 1 to data.max_prompt_length=16."),
    ("generate", ["--prompt", "1 2", "--prompt", ""], 1, "prompt 1 has 0 tokens; it must have 1 to data.max_prompt_"),
    ("generate", ["--prompts-file", "missing.parquet"], 2, "missing.parquet: no such file."),
    ("generate", ["--prompt", "1", "--model", "absent"], 2, "model.path='absent' is not a model directory"),
    ("evaluate", ["data.val_files=[]"], 2, "data.val_files must be set"),
    ("evaluate", ["model.path="], 2, "no model is named; give --run DIR, a RECIPE or model.path=DIR."),
]


@pytest.mark.parametrize(("command", "arguments", "status", "problem"), ERRORS)
def test_evaluate_and_generate_reject_invalid_inputs(command, arguments, status, problem, task, hybridflow):
    outcome = hybridflow(command, task / "rl.toml", *arguments)
    assert outcome.status == status
    assert outcome.err.startswith("error: ")
    assert problem in outcome.err
