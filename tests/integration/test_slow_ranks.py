"""A rank that really becomes slow is named, and the results of its run are those of an undisturbed one, bit for bit."""

import pytest

from fixtures.tiny_run import differing
from hybridflow.runtime.observe import read_jsonl

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
    "On a core with a busy program of a higher priority, which leaves the rank about 10% of it."
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


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("ray_two: a rank is slow")
def test_a_rank_that_becomes_slow_is_named_and_changes_no_bit(tiny, task, tmp_path, run_in_turn):
    (tmp_path / "reward.py").write_text(REWARD)
    common = [*tiny.commands(task)["grpo"], *ON_RAY, FACTOR, "reward.processes=0", f"trainer.total_steps={STEPS}"]
    run_in_turn(
        *(
            [*common, f"reward.function={tmp_path}/reward.py:{function}", f"trainer.run_dir={tmp_path}/{function}"]
            for function in ("score", "slow_down")
        ),
        shares_cluster=True,
    )
    slowed = tmp_path / "slow_down"
    measured = {row["step"]: row.get("recovery/slow_ranks") for row in read_jsonl(slowed / "metrics.jsonl")}
    (named,) = [step for step, count in measured.items() if count is not None]
    assert named in (SLOW_STEP, SLOW_STEP + 1)
    assert measured[named] == 1
    (event,) = (row for row in read_jsonl(slowed / "trace" / "calls.jsonl") if row["kind"] == "recovery")
    assert (event["where"], event["worker"], event["step"]) == ("slow", "actor_rollout/1", named)
    assert differing(slowed, tmp_path / "score", STEPS) == set()
