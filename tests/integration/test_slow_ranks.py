"""A rank that really becomes slow is named, and the results of its run are those of an undisturbed one, bit for bit."""

from types import SimpleNamespace

import pytest

from hybridflow.observability import read_jsonl

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS, SLOW_STEP = 7, 6
"""Five steps are needed to judge one, so that a busy machine cannot lead to an earlier measurement."""

ON_RAY = ("controller.backend=ray", "controller.num_workers=2", "controller.cpus_per_worker=0.5", "data.val_files=[]")
FACTOR = "recovery.slow_factor=2"  # on a busy machine the other rank has a part of a core only

REWARD = f"""
import os, subprocess, sys

BUSY = '''
import os, sys, time
end = time.monotonic() + 300
while os.getppid() == int(sys.argv[1]) and time.monotonic() < end:
    pass
'''
ROWS_OF_A_STEP = 8 * 3 // 2
num_rows = 0

def score(solution_str, **sample):
    return len(solution_str) % 11 / 10

def slow_down(**sample):
    global num_rows
    num_rows += 1
    if os.environ["RANK"] == "1" and num_rows == ROWS_OF_A_STEP * {SLOW_STEP - 1} + 1:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
        for thread in threads:
            os.sched_setaffinity(thread, [min(os.sched_getaffinity(0))])
        subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())])
        for thread in threads:
            os.setpriority(os.PRIO_PROCESS, thread, 10)
    return score(**sample)
"""
"""`slow_down` starts a busy program on the core of rank 1, which calls it, and leaves the rank about 10% of the core.

On a busy machine the rank has less of it, and the other rank still has many times more.
"""


@pytest.fixture(scope="module")
def runs(tiny, task, tmp_path_factory, run_in_turn):
    directory = tmp_path_factory.mktemp("slow_ranks")
    (directory / "reward.py").write_text(REWARD)
    common = [*tiny.commands(task)["grpo"], *ON_RAY, FACTOR, "reward.processes=0", f"trainer.total_steps={STEPS}"]
    run_in_turn(
        *(
            [*common, f"reward.function={directory}/reward.py:{function}", f"trainer.run_dir={directory}/{function}"]
            for function in ("score", "slow_down")
        ),
        shares_cluster=True,
    )
    return SimpleNamespace(undisturbed=directory / "score", slowed=directory / "slow_down")


def test_a_rank_that_becomes_slow_is_named(runs):
    measured = {row["step"]: row.get("recovery/slow_ranks") for row in read_jsonl(runs.slowed / "metrics.jsonl")}
    named = [step for step, count in measured.items() if count is not None]
    assert len(named) == 1
    assert named[0] in (SLOW_STEP, SLOW_STEP + 1)
    assert measured[named[0]] == 1
    (event,) = (row for row in read_jsonl(runs.slowed / "trace" / "calls.jsonl") if row["kind"] == "recovery")
    assert (event["where"], event["worker"], event["step"]) == ("slow", "actor_rollout/1", named[0])


def test_the_results_of_a_run_with_a_slow_rank_are_those_of_an_undisturbed_one(tiny, runs):
    slowed, undisturbed = (tiny.results_of(path, STEPS) for path in (runs.slowed, runs.undisturbed))
    assert slowed.keys() == undisturbed.keys()
    assert [name for name in slowed if slowed[name] != undisturbed[name]] == []
