import pytest

from hybridflow.cli.main import main
from hybridflow.config import load_config
from hybridflow.observability import read_jsonl
from hybridflow.runtime import capture_random_state, restore_random_state


@pytest.fixture
def in_task(tmp_path, monkeypatch, capsys):
    """Make a task and enter it; return what the command printed."""
    state = capture_random_state()
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my task"]) == 0
    monkeypatch.chdir(tmp_path / "my task")
    yield capsys.readouterr().out
    restore_random_state(state)


def test_a_new_task_trains_evaluates_and_exports_as_it_is(in_task, tmp_path):
    assert "cd 'my task'\n  hybridflow train recipe.toml\n" in in_task
    assert main(["train", "recipe.toml", "trainer.total_steps=2", "trainer.val_every=1"]) == 0
    rows = read_jsonl(tmp_path / "my task/runs/first/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "reward/is_number/mean" in rows[1]
    assert "val/score/mean" in rows[2]
    assert main(["export", "runs/first", "trained"]) == 0


def test_train_and_test_rows_are_all_sums_of_two_digits(in_task, tmp_path):
    train, test = (read_jsonl(tmp_path / f"my task/{name}.jsonl") for name in ("train", "test"))
    assert (len(train), len(test)) == (72, 9)
    assert len({row["prompt"] for row in (*train, *test)}) == 81
    assert all(eval(row["prompt"].rstrip("=")) == int(row["answer"]) for row in (*train, *test))


def test_the_reward_is_1_for_the_sum_and_less_for_others(in_task, tmp_path):
    from hybridflow.runtime import load_user_function

    reward = load_user_function(f"{tmp_path}/my task/reward.py:reward", "reward function", ValueError)
    scores = [reward(completion=text, answer="12")["score"] for text in ("12", " 12 ", "10", "99", "1+", "")]
    assert scores == [1.0, 1.0, 0.4, 0.0, 0.0, 0.0]


def test_the_recipe_sets_only_keys_that_exist(in_task):
    assert load_config("recipe.toml").trainer.total_steps == 60


def test_a_directory_with_files_is_refused(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/recipe.toml").write_text("mine")
    (tmp_path / "file").touch()
    for name in ("full", "file"):
        assert main(["init", str(tmp_path / name)]) == 2
        assert "exists and is not an empty directory; name another one" in capsys.readouterr().err
    assert (tmp_path / "full/recipe.toml").read_text() == "mine"
    assert main(["init", str(tmp_path / "file/task")]) == 2
