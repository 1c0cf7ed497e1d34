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
