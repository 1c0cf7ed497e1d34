"""Errors in the words of a call: its arguments, in place of the keys that they set."""

import pytest

from hybridflow.cli.api.words import Words
from hybridflow.errors import ConfigError, WorkerError


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (
            "train",
            "model.path='a' differs; choose another trainer.run_dir.",
            "model='a' differs; choose another run_dir.",
        ),
        (
            "train",
            "critic.model_path and reward.function_x are others",
            "critic.model_path and reward.function_x are others",
        ),
        ("sft", "data.val_files and data.train_files", "val_examples and examples"),
        ("dpo", "runs/a b/data/val-0123456789ab.parquet: row 3: empty", "val_pairs: row 3: empty"),
        (
            "train",
            "add reward.function=path.py:function to the command",
            "add reward.function=path.py:function to the command",
        ),
        (
            "train",
            "x: row 0: 'answer' is missing; the row has prompt.",
            "x: row 0: 'answer' is missing; the row has prompt.",
        ),
        (
            "sft",
            "x: row 0: 'response' is missing; the row has prompt, gold.",
            "x: row 0: 'response' is missing; the row has prompt, gold. Rename the column that has it.",
        ),
        (
            "train",
            "x: row 0: 'answer' is missing; the row has prompt, solution, answers.",
            "x: row 0: 'answer' is missing; the row has prompt, solution, answers. Name its column with "
            'an argument, as in answer="answers".',
        ),
    ],
)
def test_an_error_names_arguments_once_however_often_it_is_said(kind, text, said):
    words = Words(kind, directory="runs/a b/data")
    assert words.of(text) == said
    with pytest.raises(WorkerError) as caught, words, words:
        raise WorkerError(text, role="actor", rank=1)
    assert (str(caught.value), caught.value.rank) == (said, 1)


def test_an_argument_that_is_misspelt_or_given_twice_is_named():
    for settings, problem in (
        ({"trainer": {"run_dir": "x"}}, r"trainer\.run_dir is given twice"),
        ({"promts": []}, "promts= is not an argument; did you mean prompts="),
        ({"trainer": 3}, r"trainer= is a section of keys; give a dict"),
    ):
        with pytest.raises(ConfigError, match=problem):
            Words("train").require_arguments(settings, ["trainer.run_dir"])
    with pytest.raises(ConfigError, match=r"reward= is an argument of train\(\) only"):
        Words("sft").require_arguments({"reward": len}, [])
    Words("train").require_arguments({"trainer.total_steps": 3, "lora": {"rank": 1}, "n": 2}, ["trainer.run_dir"])
