import json

import numpy as np
import pytest

from hybridflow.environments.adapters import load, rows_of
from hybridflow.errors import EnvironmentConfigError

gymnasium = pytest.importorskip("gymnasium", reason="the environment of vLLM's tests does not have it")
spaces = gymnasium.spaces

LAKE = "gymnasium:FrozenLake-v1?is_slippery=False"
SPACES = {
    "number": spaces.Discrete(3, start=1),
    "text": spaces.Text(8, min_length=2, charset="abc "),
}


class Shown(gymnasium.Env):
    """Observes the last action, as it is and among others; three steps are all."""

    def __init__(self, actions, observed="all"):
        self.action_space, self.kind = SPACES[actions], actions
        parts = {"action": self.action_space, "all": spaces.Tuple([spaces.Text(8), spaces.Box(0, 1, (2,))])}
        self.observation_space = {
            "all": spaces.Dict(parts),
            "text": spaces.Text(9),
            "graph": spaces.Sequence(parts["all"]),
        }[observed]
        self.observed = observed

    def seen(self, action):
        text, some = "héllo", np.array([0.123456789, 1], np.float32)
        return text if self.observed == "text" else {"action": action, "all": (text, some)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.seen(self.action_space.sample()), {}

    def step(self, action):
        self.count += 1
        return self.seen(action), self.count / 2, False, self.count == 3, {}


@pytest.fixture
def custom():
    """Register an environment of the test; return its source."""
    gymnasium.register("Shown-v0", Shown, disable_env_checker=True)
    yield "gymnasium:Shown-v0"
    gymnasium.registry.pop("Shown-v0")


def shown(answers):
    return [answer.messages[0]["content"] if answer.messages else "" for answer in answers]


@pytest.mark.parametrize(
    "processes",
    [0, pytest.param(1, marks=[pytest.mark.runs, pytest.mark.own_run("episodes: environments of gymnasium")])],
)
def test_a_whole_episode_of_frozen_lake_gets_its_reward(play, processes):
    (row,) = rows_of(LAKE, "test", 1, 0)
    answers = play(LAKE, row, ["I go 2", "2.", "north", "7", "1", "1", "1", "**2**"], processes)
    assert shown(answers)[0].startswith("You act in the environment FrozenLake-v1. Answer each observation with")
    assert shown(answers)[0].endswith("- 2: Move right\n- 3: Move up\n\n0")
    wrong = "This is not an action. Answer with a number from 0 to 3."
    assert shown(answers)[1:-1] == ["1", "2", wrong, wrong, "6", "10", "14", ""]
    assert [answer.reward for answer in answers[1:-1]] == [0, 0, 0, 0, 0, 0, 0, 1]
    assert [answer.is_done for answer in answers] == [False] * 8 + [True, True]
    assert answers[-1].rewards == {"score": 0.0}


def test_the_seed_of_a_row_decides_what_happens(play):
    rows = rows_of("gymnasium:Blackjack-v1", "train", 20, 3)
    cards = [shown(play("gymnasium:Blackjack-v1", row, ["1", "0"])) for row in rows]
    assert cards == [shown(play("gymnasium:Blackjack-v1", row, ["1", "0"])) for row in rows]
    assert len({each[0] for each in cards}) > 10
    by_index = {"prompt": "Play.", "extra_info": {"index": rows[0]["extra_info"]["seed"]}}
    by_truth = {"prompt": "Play.", "reward_model": {"ground_truth": str(rows[0]["extra_info"]["seed"])}}
    for row in (by_index, by_truth):
        assert shown(play("gymnasium:Blackjack-v1", row, ["1", "0"]))[1:] == cards[0][1:]
    failed = play("gymnasium:Blackjack-v1", {"prompt": "Play."}, [])[0]
    assert failed.failure == "raised"
    assert "has no seed; add an integer `seed` to its extra_info" in failed.error


def test_a_picture_of_characters_follows_the_observation(play):
    (row,) = rows_of("gymnasium:Taxi-v4", "train", 1, 0)
    texts = shown(play("gymnasium:Taxi-v4?render_mode=ansi", row, ["0"]))
    assert texts[0].endswith(
        "\n\n314\n+---------+\n|R: | : :G|\n| : | : : |\n| : : : : |\n|[ ]| : | : |\n|[Y]| : |[B]: |\n+---------+"
    )
    assert texts[1].startswith("414\n+---------+")
    assert "\x1b" not in texts[1]


@pytest.mark.parametrize(
    ("actions", "turns", "valid"),
    [
        (
            "number",
            {"no 2: 1!": 1, "**3**": 3, "left": None, "0": None, "1.5": None, "9" * 5000: None},
            "a number from 1 to 3",
        ),
        ("text", {" ab c ": "ab c", "abd": None, "a": None}, "a text of 2 to 8 characters of ' abc'"),
    ],
)
def test_an_action_is_the_last_that_a_turn_names(play, custom, actions, turns, valid):
    source = f"{custom}?actions={actions}"
    (row,) = rows_of(source, "train", 1, 0)
    assert f"with an action: {valid}." in row["prompt"][0]["content"]
    for turn, action in turns.items():
        answer = play(source, row, [turn])[1]
        seen = f"This is not an action. Answer with {valid}."
        if action is not None:
            seen = json.dumps({"action": action, "all": ["héllo", [0.12346, 1.0]]}, ensure_ascii=False)
        assert shown([answer]) == [seen]
        assert answer.reward == (0.0 if action is None else 0.5)


def test_a_text_is_observed_as_it_is_and_a_limit_of_steps_ends_the_episode(play, custom):
    source = f"{custom}?actions=number&observed=text"
    answers = play(source, {"prompt": "Play.", "extra_info": {"seed": 1}}, ["1", "2", "3"])
    assert shown(answers) == ["Play.\n\nhéllo", "héllo", "héllo", "", ""]
    assert [answer.reward for answer in answers] == [0, 0.5, 1.0, 1.5, 0]
    assert answers[3].is_done


def test_observations_without_a_short_text_are_refused(custom):
    with pytest.raises(EnvironmentConfigError, match=r"the observations are Sequence.* expected Text, Discrete"):
        load(f"{custom}?actions=number&observed=graph", "environment.classes.a")
