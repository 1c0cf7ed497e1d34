"""Runs from Python: their files and bits are those of the commands."""

import shutil
from pathlib import Path

import pytest
from pyarrow.parquet import read_table
from safetensors.torch import load_file

import hybridflow
from fixtures import tiny_run
from hybridflow.cli.api import Table
from hybridflow.cli.api.run import _prompts
from hybridflow.cli.inspect.run_table import run_row
from hybridflow.cli.main import main
from hybridflow.errors import (
    CheckpointConfigError,
    ConfigError,
    DataConfigError,
    DataError,
    ModelConfigError,
    RewardConfigError,
)

pytestmark = pytest.mark.usefixtures("restores_the_process")
SETTINGS = {
    "data": {"train_batch_size": 8, "max_prompt_length": 16, "max_response_length": 12},
    "rollout.group_size": 3,
    "trainer.total_steps": 3,
    "memory.max_tokens_per_micro_batch": 100,
    "controller.threads": 1,
}


def score(completion: str, answer, index: int, **_) -> float:
    words = completion.split()
    return (7 * len(words) + len(completion) + len(str(answer)) + index) % 11 / 10


OWN = pytest.mark.own_run("python: its function is given again")


@pytest.fixture(scope="module")
def rows(task):
    """Return the prompts of the task with another name for the prompt."""
    return [
        {"question": row["prompt"][0]["content"], "answer": str(row["reward_model"]["ground_truth"])}
        for row in read_table(task / "train.parquet").to_pylist()
    ]


def start(task, rows, run_dir, **changes):
    given = {"reward": score, "prompt": "question", **SETTINGS, **changes}
    return hybridflow.train(task / "model", rows, run_dir=run_dir, **given)


@pytest.fixture(scope="module")
def finished(task, rows, tmp_path_factory):
    return start(task, rows, tmp_path_factory.mktemp("finished") / "run", val_prompts=rows[:6]).fit()


@pytest.mark.runs
def test_a_run_shows_its_state_metrics_and_samples(python_run, tmp_path):
    finished = hybridflow.open_run(shutil.copytree(python_run, tmp_path / "run"))
    assert repr(finished) == f"<hybridflow train in '{finished.path}': step 3 of 3, finished>"
    assert [row["step"] for row in finished.metrics] == [0, 1, 2, 3]
    assert list(finished.metrics.to_pandas()["step"]) == [0, 1, 2, 3]
    assert isinstance(finished.samples(), Table)
    assert {sample["step"] for sample in finished.samples(step=2)} == {2}
    assert finished.report().read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.runs
@OWN
def test_a_run_equals_that_of_another_process_and_is_replayed(finished, python_run):
    assert tiny_run.differing(finished.path, python_run, 3, names=tiny_run.WEIGHTS) == set()
    replayed = hybridflow.open_run(finished.path, reward=score).replay(2, **{"actor.optimizer.lr": 1e-2})
    assert replayed.differs == {}
    assert replayed.is_recorded
    assert [sample.score for sample in replayed.learned.samples] == [
        sample.score for sample in replayed.changed.samples
    ]
    assert replayed.learned.metrics["actor/lr"] != replayed.changed.metrics["actor/lr"]
    assert not list(finished.path.glob("replay-*"))


@pytest.mark.runs
@OWN
def test_a_run_generates_evaluates_and_exports(finished, rows, tmp_path):
    text = finished.generate("1 2 3")
    assert isinstance(text, str)
    assert finished.generate(["1 2 3", [{"role": "user", "content": "1 2 3"}]]) == [text, text]
    assert len(finished.generate("1 2", n=3, temperature=1.0)) == 3
    metrics = finished.evaluate()
    assert metrics == finished.evaluate(rows[:6], prompt="question")
    assert metrics["val/score/mean"] == pytest.approx(finished.metrics[-1]["val/score/mean"])
    assert finished.export(tmp_path / "out") == tmp_path / "out"
    assert load_file(tmp_path / "out/model.safetensors")


@pytest.mark.runs
@OWN
def test_the_same_run_by_command_has_the_same_bits(task, rows, tmp_path, finished):
    (tmp_path / "reward.py").write_text(
        "def score(completion, answer, index, **_):\n"
        "    words = completion.split()\n"
        "    return (7 * len(words) + len(completion) + len(str(answer)) + index) % 11 / 10\n"
    )
    changes = [f"reward.function={tmp_path}/reward.py:score", f"trainer.run_dir={tmp_path}/command"]
    assert main(["train", str(finished.path / "config.toml"), *changes]) == 0
    assert tiny_run.differing(finished.path, tmp_path / "command", 3) == set()


@pytest.mark.runs
@OWN
def test_a_run_is_resumed_with_its_function_and_with_no_other(task, rows, tmp_path, caplog):
    def score(completion: str, answer, index: int, mark="a mark of this function", **_) -> float:
        return len(completion + mark) % 7 / 10

    run = start(task, rows, tmp_path / "run", reward=score, **{"trainer.save_every": 1})
    with pytest.raises(CheckpointConfigError, match="has no checkpoint to resume from"):
        run.resume()
    run.fit(stop_after=1)
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(b"closure:score-" in contents for contents in files)
    assert not any(b"a mark of this function" in contents for contents in files)
    opened = hybridflow.open_run(tmp_path / "run", reward=score)
    assert opened.resume(stop_after=2).metrics[-1]["step"] == 2
    with pytest.raises(RewardConfigError, match="its name or its source"):
        hybridflow.open_run(tmp_path / "run", reward=lambda completion, **_: 1.0)
    with pytest.raises(RewardConfigError, match="its name or its source"):
        start(task, rows, tmp_path / "run", reward=lambda completion, **_: 1.0).fit()
    from hybridflow.environments.processes import closure

    closure._offered.clear()
    assert main(["train", str(tmp_path / "run/config.toml")]) == 2
    with pytest.raises(RewardConfigError, match=r"is never stored\. For a command, write it to"):
        hybridflow.open_run(tmp_path / "run").resume()
    assert run.fit(**{"trainer.total_steps": 4}).metrics[-1]["step"] == 4
    assert f"'{run.path}' is at step 4 of 4, finished; look at it with run.metrics" in caplog.text
    assert run_row(run.path).recipe == "defaults"


@pytest.mark.runs
@OWN
def test_supervised_training_preferences_and_reward_models_run(task, tmp_path):
    few = {"trainer.total_steps": 1, "controller.threads": 1, "offline.batch_size": 4}
    lengths = {"data.max_prompt_length": 16, "data.max_response_length": 12}
    examples = [{"prompt": f"{i} 2", "response": "1 + 2"} for i in range(4)]
    pairs = [{"prompt": f"{i} 2", "chosen": "1 + 2", "rejected": "1"} for i in range(4)]
    given = {**few, **lengths}
    assert hybridflow.sft(task / "model", examples, run_dir=tmp_path / "sft", **given).fit().metrics
    assert hybridflow.dpo(task / "model", pairs, val_pairs=pairs, run_dir=tmp_path / "dpo", **given).fit().metrics
    judge = hybridflow.reward_model(task / "model", pairs, run_dir=tmp_path / "judge", **given).fit()
    assert hybridflow.open_run(judge.path).kind == "reward-model"


def test_what_is_wrong_is_an_error_before_a_file_is_written(task, rows, tmp_path):
    for changes, kind, problem in (
        ({"prompt": "prompt"}, DataError, "prompts: row 0: 'prompt' is missing; .* as in prompt=\"question\""),
        ({"trainer.total_step": 3}, ConfigError, "trainer.total_step"),
        ({"model.path": "x"}, ConfigError, "model is given twice"),
        ({"data.train_files": ["x"]}, ConfigError, "prompts is given twice"),
        ({"reward_fn": score}, ConfigError, "reward_fn= is not an argument; did you mean reward="),
        ({"eval_dataset": "x"}, ConfigError, "eval_dataset: no such key; the key here is val_prompts"),
        ({"reward": None}, RewardConfigError, "serves data_source 'rows' in prompts; .* Set reward=FUNCTION or"),
        ({"reward": lambda completion, anwser: 0.0}, RewardConfigError, "'anwser' names .*did you mean 'answer'"),
        ({"reward": 5}, RewardConfigError, "reward=5 is a int; expected a function, or its name"),
        ({"recipe": "dapoo"}, ConfigError, "recipe='dapoo' is unknown"),
        ({"recipe": 3}, ConfigError, "recipe=3 is invalid"),
        ({"val_prompts": ["What is 1 + 1?"]}, ConfigError, r"val_prompts: 'What is 1 \+ 1\?' does not name a file"),
        ({"val_prompts": iter(rows)}, ConfigError, r"set validation\.max_samples"),
    ):
        with pytest.raises(kind, match=problem):
            start(task, rows, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="got no prompt"):
        start(task, rows, tmp_path / "run").generate([])
    with pytest.raises(ConfigError, match=r"give rows: evaluate\(rows\)"):
        start(task, rows, tmp_path / "run", val_prompts=None).evaluate()
    with pytest.raises(DataConfigError, match=r"has no run yet; fit\(\) starts it"):
        start(task, rows, tmp_path / "run").samples()


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [
        (None, "got None; give a text, or a list"),
        ({"role": "user"}, "got {'role': 'user'}; give a text"),
        (["a", 3], "got prompt 1, 3; expected a text"),
        ([["a"]], r"got prompt 0, \['a'\]; expected a text"),
        ([{"role": "user", "content": "a"}], r"got prompt 0, {'role'.*; put one conversation into a list"),
    ],
)
def test_a_prompt_that_is_neither_text_nor_chat_is_an_error(prompts, problem):
    with pytest.raises(ConfigError, match=problem):
        _prompts(prompts)


@pytest.mark.exhaustive
@OWN
def test_resume_never_takes_a_directory_with_data_only(task, rows, tmp_path):
    changes = {"trainer.resume": "never", "trainer.total_steps": 1}
    start(task, rows, tmp_path / "run", **changes).fit()
    with pytest.raises(CheckpointConfigError, match="is not empty"):
        start(task, rows, tmp_path / "run", **changes).fit()


@pytest.mark.ray
@pytest.mark.exhaustive
@OWN
def test_a_closure_reaches_the_workers_of_a_cluster(task, rows, tmp_path, finished):
    run = start(task, rows, tmp_path / "run", val_prompts=rows[:6], **{"controller.backend": "ray"}).fit()
    for name in ("critic/score/mean", "actor/grad_norm", "val/score/mean"):
        assert [row.get(name) for row in run.metrics] == [row.get(name) for row in finished.metrics]


def test_validation_rows_may_come_with_a_period_of_validation(task, rows, tmp_path):
    run = start(task, rows, tmp_path / "run", val_prompts=rows[:6], **{"trainer.val_every": 1})
    assert run.config.trainer.val_every == 1
    assert [Path(file).name.partition("-")[0].partition(".")[0] for file in run.config.data.val_files] == ["val"]


def test_a_model_object_is_an_error_that_says_what_to_give(rows):
    with pytest.raises(ModelConfigError, match=r"model is a object; expected a directory .* save_pretrained"):
        hybridflow.train(object(), rows, reward=score)


def test_answers_of_preferences_may_be_messages_and_responses_completions(task, tmp_path):
    question, answers = [{"role": "user", "content": "1 2"}], ("3", "4")
    messages = [{"role": "assistant", "content": answer} for answer in answers]
    rows = [
        {"prompt": question, "chosen": [messages[0]], "rejected": [messages[1]]},
        {"prompt": question, "chosen": [*question, messages[0]], "rejected": [*question, messages[1]]},
        {"prompt": "1 2", "chosen": answers[0], "rejected": answers[1]},
    ]
    run = hybridflow.dpo(task / "model", rows, run_dir=tmp_path / "dpo")
    written = read_table(run.config.data.train_files[0]).to_pylist()
    assert [(row["chosen"], row["rejected"]) for row in written] == [answers] * 3
    run = hybridflow.sft(task / "model", [{"prompt": "1 2", "completion": "3"}], run_dir=tmp_path / "sft")
    assert read_table(run.config.data.train_files[0]).to_pylist()[0]["response"] == "3"
