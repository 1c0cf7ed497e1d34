import pytest

from hybridflow.config import AlgorithmConfig, Config, load_config
from hybridflow.config.roles import ROLES
from hybridflow.controller import Role
from hybridflow.errors import ConfigError
from hybridflow.trainers import run_on_placeholders
from hybridflow.trainers.build.role_classes import role_classes

POOL = ("controller.backend=ray", "placement.pools={learn=[1],gen=[1]}", "placement.roles.rollout=gen")
USER = "def mine(*, scores, baseline_scores):\n    return ((scores - baseline_scores)[:, None],) * 2\n"


@pytest.mark.parametrize(("advantage", "is_greedy"), [("{file}:mine", True), ("remax", True), ("grpo", False)])
def test_greedy_responses_are_sampled_if_a_function_reads_them(tmp_path, advantage, is_greedy):
    (tmp_path / "mine.py").write_text(USER)
    algorithm = AlgorithmConfig(advantage=advantage.format(file=tmp_path / "mine.py"))
    methods = {event.where for event in run_on_placeholders(Config(algorithm=algorithm)) if event.kind == "call"}
    assert ("ActorRolloutWorker.generate_greedy_sequences" in methods) is is_greedy


def test_every_online_role_has_a_worker_class():
    models = ["algorithm.advantage=gae", "algorithm.kl_in_loss=true", "teacher.model_path=m", "teacher.loss=reverse_kl"]
    classes = role_classes(load_config(None, [*POOL, *models]))
    assert set(classes) == {Role(name) for name, traits in ROLES.items() if not traits.offline}


def test_updates_in_flight_that_cannot_serve_the_algorithm_are_an_error():
    flight = ["trainer.lag=1", "algorithm.rollout_weights=token", "rollout.on_new_weights=retract"]
    with pytest.raises(ConfigError, match=r"is not supported with algorithm\.advantage='remax'"):
        run_on_placeholders(load_config(None, [*flight, *POOL, "algorithm.advantage=remax"]))
