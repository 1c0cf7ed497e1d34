"""The grammar of faults, the workers and phases of a configuration, and errors in a plan."""

from pathlib import Path

import pytest

from hybridflow.config import load_config
from hybridflow.config.faults import (
    Fault,
    kinds_at,
    kinds_markdown,
    phases_markdown,
    phases_of,
)
from hybridflow.errors import ConfigError

ON_RAY = ["controller.backend=ray", "controller.num_workers=2"]
POOLS = ["controller.backend=ray", "placement.pools={learn=[2],generate=[3]}", "placement.roles.rollout=generate"]
VALID = (
    "kinds: kill, stop, delay, memory, disk, corrupt, error; phases: start, generate, score, forward, backward, "
    "optimizer, sync_send, sync_receive, save, step, publish, log; workers: driver"
)


def plan(*entries):
    quoted = ", ".join(f'"{entry}"' for entry in entries)
    return f"faults.plan=[{quoted}]"


def test_an_entry_is_parsed_and_written_back():
    fault = Fault.of_text(" 12:kill   critic/3 in  backward ")
    assert fault == Fault(12, "kill", "critic/3", "backward")
    assert str(fault) == "12: kill critic/3 in backward"
    assert Fault.of_text(str(fault)) == fault
    empty, planned, drawn = (
        load_config(None, given).faults for given in ([], [plan("1: kill driver in step")], ["faults.random=1"])
    )
    assert [faults.is_empty for faults in (empty, planned, drawn)] == [True, False, False]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        *(
            (entry, "expected 'STEP: KIND WORKER in PHASE', as in '3: kill actor_rollout/0 in backward'")
            for entry in (
                "",
                "-3: kill actor_rollout/0 in backward",
                "3: kill actor_rollout/0 at backward",
                "3: kill actor_rollout/0 in backward now",
                "9999999999: kill driver in step",
            )
        ),
        ("0: kill driver in step", "expected a step from 1, got 0"),
        ("1: kil actor_rollout/0 in backward", "'kil' is not a kind"),
        ("1: kill actor_rollout/0 in backwards", "'backwards' is not a phase"),
        ("1: kill learner/0 in backward", "'learner/0' is not a worker of this run"),
        ("1: kill critic/0 in backward", "'critic/0' is not a worker of this run"),
        ("1: kill actor_rollout in backward", "'actor_rollout' is not a worker of this run"),
        ("1: kill driver/0 in step", "'driver/0' is not a worker of this run"),
        ("1: kill actor_rollout/2 in backward", "actor_rollout has no rank '2'"),
        ("1: kill actor_rollout/-1 in backward", "actor_rollout has no rank '-1'"),
        ("1: kill actor_rollout/ in backward", "actor_rollout has no rank ''"),
        ("1: kill reward/0 in backward", "reward/0 does not pass phase 'backward', only start, score, save"),
        ("1: kill driver in backward", "driver does not pass phase 'backward', only step, publish, log"),
        (
            "1: disk actor_rollout/0 in backward",
            "kind 'disk' does not apply to actor_rollout/0 in phase 'backward', only kill, stop, delay, memory, error",
        ),
        (
            "1: memory driver in publish",
            "kind 'memory' does not apply to driver in phase 'publish', only kill, stop, delay, error, disk",
        ),
    ],
)
def test_a_bad_entry_is_one_line_with_all_that_is_valid(entry, reason):
    with pytest.raises(ConfigError) as error:
        load_config(None, [*ON_RAY, plan("1: kill driver in step", entry)])
    first, line = str(error.value).splitlines()
    assert first == "1 problem(s) in overrides:"
    assert line.startswith(f"  faults.plan: {entry!r} is invalid: {reason}")
    assert line.endswith(f"; {VALID}, actor_rollout/0 to actor_rollout/1, reward/0 to reward/1, reference/0 to "
                         "reference/1, actor/0 to actor/1")  # fmt: skip


def test_on_the_local_backend_only_faults_of_the_driver_can_be_planned():
    with pytest.raises(ConfigError) as error:
        load_config(None, [plan("1: kill driver in publish", "2: delay actor_rollout/0 in backward")])
    assert (
        "'2: delay actor_rollout/0 in backward' is invalid: controller.backend='local' runs actor_rollout in the "
        "driver's process; use backend = 'ray'"
    ) in str(error.value)
    assert str(error.value).endswith(VALID)


@pytest.mark.parametrize(
    ("overrides", "role", "phases"),
    [
        (ON_RAY, "actor_rollout", "start generate forward backward optimizer sync_send sync_receive save"),
        (["controller.backend=ray"], "actor_rollout", "start generate backward optimizer save"),
        (POOLS, "actor_rollout", "start forward backward optimizer sync_send save"),
        (POOLS, "rollout", "start generate sync_receive"),
        (ON_RAY, "reward", "start score save"),
        ([*ON_RAY, "reward.model_path=m"], "reward", "start score forward"),
        ([*ON_RAY, "algorithm.advantage=gae"], "critic", "start forward backward optimizer save"),
        (ON_RAY, "reference", "start forward"),
        (ON_RAY, "driver", "step publish log"),
    ],
)
def test_phases_of_a_role_follow_the_configuration(overrides, role, phases):
    assert " ".join(phases_of(load_config(None, overrides), role)) == phases


def test_only_the_rank_that_sends_weights_to_another_pool_can_corrupt_them():
    config = load_config(None, POOLS)
    assert "corrupt" in kinds_at(config, "actor_rollout/0", "sync_send")
    assert "corrupt" not in kinds_at(config, "actor_rollout/1", "sync_send")
    assert "corrupt" in kinds_at(load_config(None, ON_RAY), "actor_rollout/1", "sync_send")


@pytest.mark.parametrize(("name", "table"), [("kinds", kinds_markdown()), ("phases", phases_markdown())])
def test_tables_of_the_documentation_equal_the_code(name, table):
    page = (Path(__file__).parents[2] / "docs" / "faults.md").read_text("utf-8")
    shown = page.partition(f"<!-- {name}: start -->\n")[2].partition(f"<!-- {name}: end -->")[0]
    assert shown == table, f"put this into docs/faults.md:\n{table}"
