"""The timeline of two ranks on Ray, of which one pauses: each moment is known, and the wait is at the other rank."""

import pytest

from hybridflow.observability.run_files import RunFiles
from hybridflow.observability.timeline import coverage, events_until, step_span, who_waited

STEPS, SLOW_STEP, PAUSE_S = 4, 3, 3.0

ON_RAY = (
    *("controller.backend=ray", "controller.num_workers=2", "controller.cpus_per_worker=0.5"),
    *("data.val_files=[]", "reward.processes=0", "controller.balance=none"),
)

REWARD = f"""
import os, time

ROWS_OF_A_STEP = 8 * 3 // 2
num_rows = 0

def score(solution_str, **sample):
    global num_rows
    num_rows += 1
    if os.environ["RANK"] == "1" and num_rows == ROWS_OF_A_STEP * {SLOW_STEP - 1} + 1:
        time.sleep({PAUSE_S})
    return len(solution_str) % 11 / 10
"""


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("ray_two: a rank pauses")
def test_a_planted_pause_is_found_at_the_rank_that_waits_for_it(task, tmp_path, run_in_turn):
    (tmp_path / "reward.py").write_text(REWARD)
    # on-policy, without a KL term: after its rewards a rank waits for those of the other, with no collective in between
    command = ["train", f"{task}/rl.toml", *ON_RAY, f"trainer.total_steps={STEPS}", f"trainer.run_dir={tmp_path}/run"]
    command += [f"reward.function={tmp_path}/reward.py:score", "trainer.profile_steps=[2]", "trainer.profile_ranks=[1]"]
    run_in_turn(command, shares_cluster=True)
    run = RunFiles(tmp_path / "run")
    waits = who_waited(events_until(run.events, SLOW_STEP), *step_span(run.events[SLOW_STEP]))
    processes = {times.process.rpartition("/")[2]: times for times in waits}
    assert set(processes) == {"0", "1"}
    assert PAUSE_S - 0.5 < processes["0"].waited_for["score on reward/1"] < PAUSE_S + 2  # ranks also differ by load
    assert processes["1"].waited_for.get("score on reward/0", 0.0) < PAUSE_S / 2
    assert processes["0"].waiting_s > PAUSE_S - 0.5
    shares = coverage(run.events)
    assert {step: len(of_step) for step, of_step in shares.items() if step} == dict.fromkeys(range(1, STEPS + 1), 2)
    assert all(share == pytest.approx(1.0, abs=0.02) for of_step in shares.values() for share in of_step.values())
    files = [str(file.relative_to(run.path)) for file in (run.path / "profile").rglob("*") if file.is_file()]
    assert files == ["profile/step_000002/actor_rollout_1.json.gz"]
