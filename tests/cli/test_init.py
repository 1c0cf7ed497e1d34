import pytest

from hybridflow.cli.main import main
from hybridflow.config import load_config
from hybridflow.runtime.observe import read_jsonl
from hybridflow.runtime.random_state import capture_random_state, restore_random_state
from hybridflow.runtime.user_import import load_user_function


@pytest.fixture
def in_task(tmp_path, monkeypatch, shown):
    """Make a task and enter it; return what the command printed."""
    state = capture_random_state()
    monkeypatch.chdir(tmp_path)
    out, _ = shown("init", "my task")
    monkeypatch.chdir(tmp_path / "my task")
    yield out
    restore_random_state(state)


@pytest.mark.runs
@pytest.mark.own_run("grpo: trains the task of `hybridflow init`")
def test_a_new_task_trains_evaluates_and_exports_as_it_is(in_task, tmp_path):
    assert "cd 'my task'\n  hybridflow train recipe.toml\n" in in_task
    assert main(["train", "recipe.toml", "trainer.total_steps=2", "trainer.val_every=1"]) == 0
    rows = read_jsonl(tmp_path / "my task/runs/first/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "reward/is_number/mean" in rows[1]
    assert "val/score/mean" in rows[2]
    assert main(["export", "runs/first", "trained"]) == 0


@pytest.mark.usefixtures("in_task")
def test_the_task_is_all_sums_of_two_digits_with_a_reward_for_the_sum():
    assert load_config("recipe.toml").trainer.total_steps == 60
    train, test = (read_jsonl(f"{name}.jsonl") for name in ("train", "test"))
    assert (len(train), len(test)) == (72, 9)
    assert len({row["prompt"] for row in (*train, *test)}) == 81
    assert all(eval(row["prompt"].rstrip("=")) == int(row["answer"]) for row in (*train, *test))
    reward = load_user_function("reward.py:reward", "reward function", ValueError)
    scores = [reward(completion=text, answer="12")["score"] for text in ("12", " 12 ", "10", "99", "1+", "")]
    assert scores == [1.0, 1.0, 0.4, 0.0, 0.0, 0.0]


def test_a_directory_with_files_is_refused(tmp_path, shown):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/recipe.toml").write_text("mine")
    (tmp_path / "file").touch()
    for name in ("full", "file"):
        error = shown("init", tmp_path / name, status=2)[1]
        assert "exists and is not an empty directory; name another one" in error
    assert (tmp_path / "full/recipe.toml").read_text() == "mine"
    shown("init", tmp_path / "file/task", status=2)
