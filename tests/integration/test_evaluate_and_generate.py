"""`hybridflow evaluate` and `hybridflow generate` on a model directory, a checkpoint and a run."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hybridflow.observability import read_jsonl


@pytest.fixture(scope="module")
def trained(task, tmp_path_factory):
    """A GRPO run of four steps that kept the checkpoints of steps 2 and 4, validated at both."""
    from hybridflow.config import load_config
    from hybridflow.trainers import build_trainer

    run = tmp_path_factory.mktemp("trained") / "run"
    changes = ["trainer.total_steps=4", "trainer.save_every=2", "trainer.val_every=2", "actor.optimizer.lr=1e-2"]
    build_trainer(load_config(task / "rl.toml", [f"trainer.run_dir={run}", *changes])).fit()
    return run


def table(out):
    """A printed table of metrics."""
    return {name: float(value) for name, value in (line.split() for line in out.splitlines())}


def validated(run, step):
    """The same figures as the run has them."""
    row = next(row for row in read_jsonl(run / "metrics.jsonl") if row["step"] == step)
    return {name: round(value, 4) for name, value in row.items() if name.startswith("val/")}


def test_a_run_is_evaluated_as_it_validated_itself(trained, hybridflow):
    newest = hybridflow("evaluate", "--run", trained)
    assert newest.status == 0
    assert table(newest.out) == validated(trained, 4)
    earlier = hybridflow("evaluate", "--run", trained, "--step", "2")
    assert table(earlier.out) == validated(trained, 2)
    by_directory = hybridflow(
        "evaluate", trained / "config.toml", "--checkpoint", trained / "checkpoints" / "step_000002"
    )
    assert by_directory.out == earlier.out
    assert newest.out != earlier.out


def test_a_model_is_evaluated_as_it_is_before_training(task, trained, hybridflow):
    assert table(hybridflow("evaluate", task / "rl.toml").out) == validated(trained, 0)


def test_evaluation_on_three_ranks_gives_the_same_figures(task, hybridflow):
    one, three = (hybridflow("evaluate", task / "rl.toml", f"controller.num_workers={n}") for n in (1, 3))
    assert one.out == three.out


def test_samples_of_an_evaluation_are_written_and_make_its_figures(task, tmp_path, hybridflow):
    changes = ["validation.group_size=2", "validation.temperature=1", "validation.batch_size=4"]
    out = hybridflow("evaluate", task / "rl.toml", *changes, "--output", tmp_path / "samples.jsonl").out
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert [sample["index"] for sample in samples] == [index for index in range(10) for _ in range(2)]
    assert set(samples[0]) == {
        *("index", "data_source", "prompt", "rendered_prompt", "ground_truth", "response", "score", "answer")
    }
    mean = sum(sample["score"] for sample in samples) / 20
    assert table(out)["val/score/mean"] == pytest.approx(mean, abs=1e-4)
    assert "val/countdown/pass@2" in table(out)


def test_generate_answers_typed_prompts_as_validation_does(task, tmp_path, hybridflow):
    hybridflow("evaluate", task / "rl.toml", "--output", tmp_path / "samples.jsonl")
    first, second = read_jsonl(tmp_path / "samples.jsonl")[:2]
    outcome = hybridflow("generate", task / "rl.toml", "--prompt", first["prompt"], "--prompt", second["prompt"])
    assert outcome.status == 0
    shown = [line for line in outcome.out.splitlines() if line]
    assert shown[0] == f"prompt: {first['prompt']}"
    assert shown[1] == f"response (cut): {first['response']}"  # it never ends: 12 tokens
    assert shown[2] == f"prompt: {second['prompt']}"


def test_generate_answers_the_prompts_of_a_file(task, tmp_path, hybridflow):
    file = tmp_path / "prompts.parquet"
    pq.write_table(pq.read_table(task / "test.parquet", columns=["prompt"]), file)
    changes = ["validation.group_size=2", "validation.temperature=1", "validation.batch_size=3"]
    outcome = hybridflow(
        *("generate", task / "rl.toml", *changes, "--prompts-file", file, "--output", tmp_path / "rows.jsonl")
    )
    assert outcome.status == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 10
    assert {len(row["responses"]) for row in rows} == {2}
    assert outcome.out.count("\nresponse") == 20
    hybridflow("evaluate", task / "rl.toml", *changes, "--output", tmp_path / "samples.jsonl")
    scored = [sample["response"] for sample in read_jsonl(tmp_path / "samples.jsonl")]
    assert [response for row in rows for response in row["responses"]] == scored


def test_generate_needs_no_recipe(task, trained, hybridflow):
    changes = ["--prompt", "3 17 5 => 9 :", "data.max_response_length=4", "controller.threads=1"]
    changes += ["validation.group_size=8", "validation.temperature=1"]
    plain = hybridflow("generate", "--model", task / "model", *changes)
    assert plain.status == 0
    assert [line.partition(":")[0].split()[0] for line in plain.out.splitlines() if line] == [
        "prompt",
        *["response"] * 8,
    ]
    of_run = hybridflow("generate", "--run", trained, *changes)
    assert of_run.status == 0
    assert of_run.out != plain.out


def test_generate_caps_the_default_response_length_at_the_positions(task, hybridflow):
    arguments = ["generate", "--model", task / "model", "--prompt", "3 17 5 => 9 :", "controller.threads=1"]
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
        changes = ["--prompt", "3 17 5", "data.max_response_length=4", "controller.threads=1"]
        changes += ["validation.group_size=8", "validation.temperature=1"]
        return hybridflow("generate", "--model", tmp_path / "model", *changes, *arguments)

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
    assert "omits system messages" in answer("--system", "9 4").err


def test_run_with_relative_paths_is_evaluated_from_another_directory(task, tmp_path, monkeypatch, hybridflow):
    monkeypatch.chdir(shutil.copytree(task, tmp_path / "project"))
    relative = (task / "rl.toml").read_text().replace(f"{task}/", "")
    Path("relative.toml").write_text(relative)
    assert hybridflow("train", "relative.toml", "trainer.run_dir=run", "trainer.total_steps=1").status == 0
    here = hybridflow("evaluate", "--run", "run")
    monkeypatch.chdir(tmp_path)
    there = hybridflow("evaluate", "--run", "project/run")
    assert (there.status, there.out) == (0, here.out)
    assert not (tmp_path / "run").exists()
    generate = ["generate", "--run", "project/run", "--prompt", "3 17 5 => 9 :", "data.max_response_length=4"]
    assert hybridflow(*generate).status == 0
    exported = hybridflow("export", "project/run", "exported")
    assert exported.status == 0
    typed = hybridflow("evaluate", "--run", "project/run", 'data.val_files=["test.parquet"]')
    assert (typed.status, "test.parquet: no such file." in typed.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        (["--prompt", "1 " * 20], 1, "prompt 0 has 20 tokens; it must have 1 to data.max_prompt_length=16."),
        (["--prompt", "1 2", "--prompt", ""], 1, "prompt 1 has 0 tokens; it must have 1 to data.max_prompt_length=16."),
        (["--prompts-file", "missing.parquet"], 2, "missing.parquet: no such file."),
        (["--prompt", "1", "--model", "absent"], 2, "model.path='absent' is not a model directory"),
        (["--prompt", "1", "--output", "absent/rows.jsonl"], 2, "--output absent/rows.jsonl cannot be written"),
    ],
)
def test_prompts_that_cannot_be_answered(arguments, status, problem, task, hybridflow):
    outcome = hybridflow("generate", task / "rl.toml", *arguments)
    assert outcome.status == status
    assert outcome.err.startswith("error: ")
    assert problem in outcome.err
