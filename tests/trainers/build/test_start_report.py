import logging

import pytest

from fixtures.families import write_family, write_with_images
from hybridflow.config import load_config
from hybridflow.trainers.build.start_report import report_parts, report_start

POOLS = ("controller.backend=ray", "placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate")
OF_ROLLOUT = "actor.old_log_probs_from=rollout"
LAG = ("trainer.lag=1", "algorithm.rollout_weights=token")
DEPENDS, OLD = "which ones depends on timings, so that two runs differ", "at most 1 optimizer steps old"


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        ((*POOLS, *LAG), ["a batch is sampled with weights 1 optimizer steps old"], [DEPENDS]),
        ((*LAG, "rollout.on_new_weights=retract"), ["so they run in turn, and no weights come while seq"], [DEPENDS]),
        ((*LAG, OF_ROLLOUT), ["algorithm.rollout_weights='token' corrects nothing: actor.old_log"], ["reject", "ppo"]),
        (
            (OF_ROLLOUT, "actor.policy_loss=decoupled-ppo"),
            ["policy_loss='decoupled-ppo' corrects nothing"],
            ["weights"],
        ),
        (LAG, [], ["corrects nothing"]),
    ],
)
def test_a_start_says_on_what_the_run_depends(caplog, changes, said, unsaid):
    with caplog.at_level(logging.INFO):
        report_start(load_config(None, list(changes)), total_steps=4)
    assert [line for line in said if line not in caplog.text] == []
    assert [line for line in unsaid if line in caplog.text] == []


def test_a_replay_names_the_keys_that_differ_from_its_run(caplog, tmp_path):
    flight = (*POOLS, *LAG, "rollout.on_new_weights=retract")
    recipe = 'trainer.lag = 1\nalgorithm.rollout_weights = "token"\nrollout.on_new_weights = "wait"\n'
    (tmp_path / "config.toml").write_text(f"{recipe}actor.optimizer.lr = 0.5\n")
    config = load_config(None, [*flight, f"rollout.replay={tmp_path}", "actor.optimizer.lr=0.5"])
    with caplog.at_level(logging.WARNING):
        report_start(config, total_steps=4)
    (line,) = [record.getMessage() for record in caplog.records if "replay" in record.getMessage()]
    assert "rollout.on_new_weights was 'wait' and is 'retract'" in line
    assert "lr" not in line
    assert "placement" not in line


def test_a_model_with_images_is_said_to_train_as_a_language_model(caplog, tmp_path):
    with caplog.at_level(logging.INFO):
        report_parts(str(write_family(tmp_path / "text", "gemma3_text")))
        report_parts(str(write_with_images(tmp_path / "images", "gemma3", "gemma3_text")))
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("hybridflow")]
    assert "is a gemma3 model, of which only the language model trains; weights of vision_config do not change" in line
