"""The schedule of an engine: its events, and their replay at the same steps."""

import json

import pytest

from hybridflow.errors import DataConfigError, RolloutConfigError
from hybridflow.workers.engine_schedule import EngineSchedule, read_schedule


class Engine:
    """An engine whose sequences have finished after `num_steps` steps in all."""

    def __init__(self, num_steps, replay=None):
        self.num_steps = num_steps
        self.schedule = EngineSchedule(1, self.step, lambda: self.schedule.num_steps < self.num_steps, replay)

    def step(self):
        self.schedule.note_step()


def recorded():
    engine = Engine(9)
    engine.schedule.event("load", 0)
    engine.step()
    engine.step()
    engine.schedule.event("begin", 4)
    engine.schedule.event("load", 1)
    for _ in range(7):
        engine.step()
    engine.schedule.event("load", 2)
    return engine.schedule.take()


def test_events_are_recorded_in_steps_since_the_event_before():
    rows = recorded()
    assert [row["engine_steps"] for row in rows] == [0, 2, 0, None]
    assert rows[1] == {"rank": 1, "event": "begin", "number": 4, "engine_steps": 2}


def test_a_replay_steps_the_engine_to_each_event():
    other_rank = {"rank": 0, "event": "load", "number": 7, "engine_steps": 3}
    first, *rest = recorded()
    again = {**first, "number": 1, "engine_steps": None}  # weights that a resumed run loaded again are loaded once
    engine, steps = Engine(9, [other_rank, first, *rest[:2], again, *rest[2:]]), []
    for kind, number in (("load", 0), ("begin", 4), ("load", 1), ("load", 2)):
        engine.schedule.event(kind, number)
        steps.append(engine.schedule.num_steps)
    assert steps == [0, 2, 2, 9]
    assert engine.schedule.take() == recorded()


@pytest.mark.parametrize("first", [0, 1])  # again weights that were loaded before the checkpoint, or the next ones
def test_a_resumed_replay_goes_on_after_the_step_of_its_checkpoint(first):
    events = [(1, "load", 0), (1, "begin", 4), (2, "load", 1), (2, "begin", 5), (3, "load", 2)]
    rows = [{"step": s, "rank": 1, "event": e, "number": n, "engine_steps": None} for s, e, n in events]
    engine, again = Engine(0, rows), [("load", 0)] * (first == 0)
    engine.schedule.resume(1)
    for kind, number in (*again, ("load", 1), ("begin", 5), ("load", 2)):
        engine.schedule.event(kind, number)
    assert [row["number"] for row in engine.schedule.take()] == [0] * len(again) + [1, 5, 2]
    with pytest.raises(RolloutConfigError, match="has no event in place of load 3"):
        engine.schedule.event("load", 3)


@pytest.mark.parametrize(
    ("num_steps", "events", "message"),
    [
        (9, [("begin", 0)], "rank 1 has load 0 in place of begin 0; use the recipe of that run"),
        (1, [("load", 0), ("begin", 4)], "rank 1 has begin 4 after 2 steps, but here all ended after 1"),
        (9, [("load", 0), ("begin", 4), ("load", 1), ("load", 2), ("load", 3)], "has no event in place of load 3"),
    ],
)
def test_a_schedule_that_does_not_fit_is_an_error(num_steps, events, message):
    engine = Engine(num_steps, recorded())
    *before, last = events
    for event in before:
        engine.schedule.event(*event)
    with pytest.raises(RolloutConfigError, match=message):
        engine.schedule.event(*last)


def test_a_file_that_is_no_schedule_is_an_error(tmp_path):
    with pytest.raises(DataConfigError, match=r"schedule\.jsonl not found"):
        read_schedule(str(tmp_path))
    row = {"step": 1, "rank": 0, "event": "load", "number": 7}
    (tmp_path / "schedule.jsonl").write_text(json.dumps(row | {"engine_steps": 3}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(RolloutConfigError, match="line 2: expected step, rank, event, number and engine_steps"):
        read_schedule(str(tmp_path))
