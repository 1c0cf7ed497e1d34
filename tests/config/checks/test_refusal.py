"""Features that do not combine: how many there are, and the error of each."""

import pytest

from hybridflow.config import Config, LoRAConfig, refusals_markdown
from hybridflow.config.checks import REFUSALS
from hybridflow.config.checks.models import REWARD_MODEL_ADAPTERS
from hybridflow.config.checks.refusal import is_command
from hybridflow.errors import ConfigError

MOST_REFUSALS = 23
"""This may only fall: make features combine before a refusal is added."""

RAY = "controller.backend=ray"
APART = f"{RAY} placement.pools={{a=[2],b=[2]}} placement.roles.rollout=b"
IN_FLIGHT = f"{APART} rollout.on_new_weights=retract trainer.lag=1 algorithm.rollout_weights=token"
EPISODES = "environment.classes={a='a.py:A'}"
SHOWN = "environment.classes={'a': 'a.py:A'}"
OLD = "actor.old_log_probs_from=rollout"
REFUSED = [
    ("algorithm.kl_in_reward=true algorithm.advantage=pass@k", "algorithm.kl_in_reward=true", "='pass@k'"),
    (f"algorithm.advantage=optimal-token-baseline {OLD}", "='optimal-token-baseline'", "_from='rollout'"),
    (f"{OLD} rollout.top_k=9", "actor.old_log_probs_from='rollout'", "rollout.top_k=9"),
    (f"{OLD} rollout.top_p=0.9", "actor.old_log_probs_from='rollout'", "rollout.top_p=0.9"),
    (
        "actor.policy_loss=decoupled-ppo algorithm.rollout_weights=token",
        "actor.policy_loss='decoupled-ppo'",
        "algorithm.rollout_weights='token'",
    ),
    ("actor.policy_loss=gspo", "actor.policy_loss='gspo'", "actor.loss_aggregation='token-mean'"),
    ("rollout.tensor=2", "rollout.tensor=2", "rollout.backend='embedded'"),
    (f"{RAY} controller.num_workers=2 parallel.tensor=2", "parallel.tensor=2", "rollout.backend='embedded'"),
    ("rollout.backend=vllm model.dtype=float64", "model.dtype='float64'", "rollout.backend='vllm'"),
    (f"{IN_FLIGHT} rollout.backend=vllm rollout.tensor=2", "rollout.on_new_weights='retract'", "rollout.tensor=2"),
    (f"{IN_FLIGHT} algorithm.advantage=remax", "rollout.on_new_weights='retract'", "algorithm.advantage='remax'"),
    (f"{EPISODES} environment.weights={{a=1}} data.order=sequential", "weights={'a': 1.0}", "data.order='sequential'"),
    (f"{EPISODES} reward.model_path=x", SHOWN, "reward.model_path='x'"),
    (f"{IN_FLIGHT} {EPISODES} rollout.replay=x", SHOWN, "rollout.replay='x'"),
    (f"{RAY} {EPISODES} rollout.backend=vllm controller.num_workers=2 rollout.tensor=2", SHOWN, "rollout.tensor=2"),
    (
        f"{EPISODES} environment.max_rows=2 actor.loss_aggregation=seq-mean-token-sum",
        "environment.max_rows=2",
        "actor.loss_aggregation='seq-mean-token-sum'",
    ),
    ("reward.model_path=x reward.function=a.py:b", "reward.model_path='x'", "reward.function='a.py:b'"),
    (f"{APART} lora.rank=8 parallel.tensor=2", "lora.rank=8", "parallel.tensor=2"),
    (f"{RAY} placement.min_processes={{main=1}}", "min_processes={'main': 1}", "trainer.deterministic=true"),
    ("controller.parts=measured", "controller.parts='measured'", "trainer.deterministic=true"),
    (
        f"{RAY} placement.pools={{a=[1],b=[1,1]}} placement.roles.rollout=b rollout.weight_sync=ipc",
        "rollout.weight_sync='ipc'",
        "placement.pools={'a': [1], 'b': [1, 1]}",
    ),
]


def test_there_are_at_most_23_refusals_each_in_a_row_of_the_table():
    assert len(REFUSALS) <= MOST_REFUSALS
    rows = refusals_markdown().splitlines()[2:]
    assert len({(each.feature, each.other) for each in REFUSALS}) == len(REFUSALS) == len(rows)


@pytest.mark.parametrize(("overrides", "feature", "other"), REFUSED)
def test_a_refusal_shows_both_values_the_reason_and_the_fix(only_problem, overrides, feature, other):
    line = only_problem(overrides)
    (refusal,) = (each for each in REFUSALS if line.endswith(f": {each.why}; {each.fix}") and _names(each, line))
    shown, _, rest = line.partition(" is not supported with ")
    assert shown.endswith(feature)
    assert rest.startswith(f"{refusal.other.split()[0]}=")
    assert f"{other}: {refusal.why}; {refusal.fix}" in rest


def test_each_refusal_of_a_run_is_tested(only_problem):
    lines = [only_problem(overrides) for overrides, *_ in REFUSED]
    of_runs = [each for each in REFUSALS if not is_command(each.other)]
    assert [[each for each in of_runs if _names(each, line)] for line in lines] == [[each] for each in of_runs]


def test_a_command_refuses_its_own():
    REWARD_MODEL_ADAPTERS.require(Config())
    expected = "lora.rank=8 is not supported with `hybridflow reward-model`: it trains its new head without"
    with pytest.raises(ConfigError, match=expected):
        REWARD_MODEL_ADAPTERS.require(Config(lora=LoRAConfig(rank=8)))


def _names(refusal, line):
    """Return whether a line begins with both keys of a refusal."""
    keys = [part.split()[0] for part in (refusal.feature, refusal.other)]
    return line.startswith(f"{keys[0]}=") and f" is not supported with {keys[1]}=" in line
