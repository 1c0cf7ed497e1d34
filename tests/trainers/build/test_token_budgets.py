"""Token budgets that change after too little memory: halved, kept by the run, and tried doubled again later."""

import json
from types import SimpleNamespace

import pytest

from hybridflow.config import load_config
from hybridflow.controller import Role
from hybridflow.errors import CheckpointError
from hybridflow.trainers.build.token_budgets import FIRST_PAUSE, TokenBudgets

KEYS = ("model.path=", "data.max_prompt_length=10", "data.max_response_length=20")
LONGEST = 30
CHANGING = "trainer.deterministic=false"


class Run:
    """The budgets of a run: `start` returns them and the list of budgets that its workers are given."""

    def __init__(self, path):
        self.path, self.documents = path, {}

    def start(self, *changes, tokens=200):
        given = []
        group = SimpleNamespace(set_token_budget=given.append)
        config = load_config(None, [*KEYS, f"memory.max_tokens_per_micro_batch={tokens}", *changes])
        return TokenBudgets(config, {Role.ActorRollout: group}, self), given  # pyright: ignore[reportArgumentType]

    def kept(self):
        return json.loads((self.path / "token_budgets.json").read_text())["budgets"]["actor_rollout"]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def note_steps(budgets, count):
    for _ in range(count):
        budgets.note_step()


def test_budgets_are_halved_down_to_the_longest_sequence(run):
    budgets, _ = run.start()
    found = []
    while budgets.can_halve():
        assert budgets.halve()
        found.append(run.kept())
    assert found == [100, 50, LONGEST]


def test_a_resumed_run_keeps_a_halved_budget_and_doubles_up_to_the_first(run):
    run.start()[0].halve()
    for changes, tokens, expected in (((), 200, [100]), ((), 300, []), ((CHANGING,), 200, [100, 200])):
        resumed, given = run.start(*changes, tokens=tokens)  # 300: another configuration
        resumed.settle()
        note_steps(resumed, 3 * FIRST_PAUSE)
        assert given == expected


def test_a_halved_budget_is_doubled_after_many_steps_with_enough_memory(run):
    budgets, given = run.start(CHANGING)
    budgets.halve()
    budgets.halve()
    note_steps(budgets, FIRST_PAUSE - 1)
    assert given == []
    note_steps(budgets, 5 * FIRST_PAUSE)
    assert given == [100, 200]  # never more than at first
    assert run.kept() == 200


def test_the_pause_doubles_if_memory_runs_out_again(run):
    budgets, given = run.start(CHANGING)
    budgets.halve()
    steps = []
    for step in range(1, 8 * FIRST_PAUSE):
        budgets.note_step()
        if given:
            steps.append(step)
            given.clear()
            budgets.halve()
    assert steps == [FIRST_PAUSE, 3 * FIRST_PAUSE, 7 * FIRST_PAUSE]


def test_a_run_that_had_enough_memory_writes_no_budgets(run):
    note_steps(run.start(CHANGING)[0], 3 * FIRST_PAUSE)
    assert list(run.path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [{"largest": each} for each in ("x", {"actor_rollout": 3}, {"actor_rollout": True})]
    + [{"budgets": {"actor_rollout": -5}}],
)
def test_a_damaged_file_is_an_error_with_the_fix(run, changes):
    run.start()[0].halve()
    file = run.path / "token_budgets.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match="remove it to measure the budgets again"):
        run.start()
