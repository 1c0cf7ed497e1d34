"""Token budgets that change after too little memory: halved, kept by the run, and tried doubled again later."""

import json
from types import SimpleNamespace

import pytest

from hybridflow.config import load_config
from hybridflow.controller import Role
from hybridflow.errors import CheckpointError
from hybridflow.trainers.token_budgets import FIRST_PAUSE, TokenBudgets

KEYS = ("model.path=", "data.max_prompt_length=10", "data.max_response_length=20")
LONGEST = 30


class Group:
    """A group that notes the budgets which it is given."""

    def __init__(self):
        self.budgets = []

    def set_token_budget(self, budget):
        self.budgets.append(budget)


@pytest.fixture
def run(tmp_path):
    return SimpleNamespace(path=tmp_path, documents={})


def budgets_of(run, *changes, tokens=200, group=None):
    config = load_config(None, [*KEYS, f"memory.max_tokens_per_micro_batch={tokens}", *changes])
    groups = {Role.ActorRollout: group or Group()}
    return TokenBudgets(config, groups, run)  # pyright: ignore[reportArgumentType]


def kept(run):
    return json.loads((run.path / "token_budgets.json").read_text())["budgets"]["actor_rollout"]


def test_budgets_are_halved_down_to_the_longest_sequence(run):
    budgets = budgets_of(run)
    found = []
    while budgets.can_halve():
        assert budgets.halve()
        found.append(kept(run))
    assert found == [100, 50, LONGEST]


def test_a_resumed_run_keeps_a_halved_budget(run):
    budgets_of(run).halve()
    group = Group()
    budgets_of(run, group=group).settle()
    assert group.budgets == [100]
    other = Group()
    budgets_of(run, tokens=300, group=other).settle()  # another configuration
    assert other.budgets == []


def test_a_halved_budget_is_doubled_after_many_steps_with_enough_memory(run):
    group = Group()
    budgets = budgets_of(run, "trainer.deterministic=false", group=group)
    budgets.halve()
    budgets.halve()
    for _ in range(FIRST_PAUSE - 1):
        budgets.note_step()
    assert group.budgets == []
    for _ in range(5 * FIRST_PAUSE):
        budgets.note_step()
    assert group.budgets == [100, 200]  # never more than at first
    assert kept(run) == 200


def test_the_pause_doubles_if_memory_runs_out_again(run):
    group = Group()
    budgets = budgets_of(run, "trainer.deterministic=false", group=group)
    budgets.halve()
    steps = []
    for step in range(1, 8 * FIRST_PAUSE):
        budgets.note_step()
        if group.budgets:
            steps.append(step)
            group.budgets.clear()
            budgets.halve()
    assert steps == [FIRST_PAUSE, 3 * FIRST_PAUSE, 7 * FIRST_PAUSE]


def test_a_resumed_run_doubles_up_to_the_first_budget(run):
    budgets_of(run).halve()
    group = Group()
    resumed = budgets_of(run, "trainer.deterministic=false", group=group)
    for _ in range(3 * FIRST_PAUSE):
        resumed.note_step()
    assert group.budgets == [200]


def test_a_deterministic_run_keeps_a_halved_budget(run):
    group = Group()
    budgets = budgets_of(run, group=group)
    budgets.halve()
    for _ in range(3 * FIRST_PAUSE):
        budgets.note_step()
    assert group.budgets == []


def test_a_run_that_had_enough_memory_writes_no_budgets(run):
    budgets = budgets_of(run, "trainer.deterministic=false")
    for _ in range(3 * FIRST_PAUSE):
        budgets.note_step()
    assert list(run.path.iterdir()) == []


@pytest.mark.parametrize("largest", ["x", {"actor_rollout": 3}, {"actor_rollout": True}])
def test_a_damaged_file_is_an_error_with_the_fix(run, largest):
    budgets_of(run).halve()
    file = run.path / "token_budgets.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"largest": largest}))
    with pytest.raises(CheckpointError, match="remove it to measure the budgets again"):
        budgets_of(run)
