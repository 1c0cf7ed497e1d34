"""The lines at the start of a run."""

import logging

import pytest

from hybridflow.config import load_config
from hybridflow.trainers.start_report import report_start

POOLS = ("controller.backend=ray", "placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate")
LAG = ("trainer.lag=1", "algorithm.rollout_weights=token")


@pytest.mark.parametrize(("more", "differs"), [((), False), (LAG, True), (("rollout.backend=vllm",), True)])
def test_a_run_that_lends_says_whether_it_depends_on_timings(caplog, more, differs):
    with caplog.at_level(logging.INFO):
        report_start(load_config(None, [*POOLS, "placement.lend=true", *more]), total_steps=4)
    assert "placement.lend: training ranks that wait for a batch generate prompts of it" in caplog.text
    assert ("which ones depends on timings, so that two runs differ" in caplog.text) is differs
    assert ("at most 1 optimizer steps old" in caplog.text) is (more == LAG)


def test_a_replay_names_the_keys_that_differ_from_its_run(caplog, tmp_path):
    flight = (*POOLS, *LAG, "rollout.on_new_weights=retract")
    recipe = 'trainer.lag = 1\nalgorithm.rollout_weights = "token"\nrollout.on_new_weights = "keep-kv"\n'
    recipe += "actor.optimizer.lr = 0.5\n"
    (tmp_path / "config.toml").write_text(recipe)
    config = load_config(None, [*flight, f"rollout.replay={tmp_path}", "actor.optimizer.lr=0.5"])
    with caplog.at_level(logging.WARNING):
        report_start(config, total_steps=4)
    (line,) = [record.getMessage() for record in caplog.records if "replay" in record.getMessage()]
    assert "rollout.on_new_weights was 'keep-kv' and is 'retract'" in line
    assert "lr" not in line
    assert "placement" not in line


def test_a_lag_in_one_process_says_that_no_weights_come_while_sequences_run(caplog):
    with caplog.at_level(logging.INFO):
        report_start(load_config(None, [*LAG, "rollout.on_new_weights=retract"]), total_steps=4)
    assert "so they run in turn, and no weights come while sequences run" in caplog.text
