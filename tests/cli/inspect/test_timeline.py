"""The timeline of hand-made events: waits where they were planted, and the members of the Chrome trace-event format."""

import json
from itertools import pairwise

import pytest

from fixtures.trace_coverage import coverage
from hybridflow.cli.inspect.critical_path import step_span
from hybridflow.cli.inspect.timeline import chrome_trace, events_until, lanes, total_times, who_waited
from hybridflow.runtime.observe.trace import TraceEvent


def call(method, process, start, end, waited_s=0.0, **fields):
    where, worker = f"Worker.{method}", f"actor/{process[-1]}"
    times = float(start), float(end)
    return TraceEvent("call", where, worker, "node-a", *times, process=process, waited_s=waited_s, **fields)


PAUSE = 0.75
EVENTS = {
    1: [
        call("generate_sequences", "a/0", 1, 2, waited_s=1.0),
        call("generate_sequences", "a/1", 1, 2 + PAUSE, waited_s=1.0),  # the planted one
        call("update_actor", "a/0", 3, 5, waited_s=1.0, transfer_s=0.5),
        call("update_actor", "a/1", 3, 5, waited_s=0.25),
        TraceEvent("send", "Worker.update_actor", "actor/0", "node-a", 2.75, 3.0, bytes_out=10),
        TraceEvent("read", "Worker.update_actor", "actor/0", "node-a", 5.0, 5.0, sources=(("update_actor", ("x",)),)),
        TraceEvent("step", "", "controller", "", 0.0, 6.0),
    ],
    2: [
        call("send_bucket", "a/0", 7, 8, waited_s=2.0),
        call("send_bucket", "a/1", 7, 8, waited_s=2.0),
        TraceEvent("probe", "take", "actor/0", "node-a", 8.0, 8.5),
        TraceEvent("parts", "update_actor", "actor/0", "", 8.5, 8.5, note="60% of the rows"),
        TraceEvent("recovery", "restart", "actor", "", 8.5, 9.0),
        TraceEvent("step", "", "controller", "", 6.0, 9.0),
    ],
}


def test_a_planted_wait_is_found_at_the_process_that_waited():
    first, second = who_waited(events_until(EVENTS, 1), 0.0, 6.0)
    assert (first.process, first.computing_s, first.waiting_s) == ("a/0", 3.0, 3.0)
    # 1 s before the first call, 0.25 s between calls, 1 s after the last
    assert first.waited_for == {"controller": 2.25, "gen on actor/1": PAUSE}
    assert (second.process, second.computing_s, second.waiting_s) == ("a/1", 3.75, 2.25)
    assert second.waited_for == {"controller": 2.25}


def test_a_wait_for_a_recovery_is_named():
    events = [
        TraceEvent("recovery", "restart", "critic", "", 1.0, 4.0),
        call("update_actor", "a/0", 4, 5, waited_s=4.0),
    ]
    assert who_waited(events, 0.0, 5.0)[0].waited_for == {"recovery": 3.0, "controller": 1.0}


def test_times_of_steps_add_up_without_the_time_between_them():
    steps = [who_waited(events_until(EVENTS, step), *step_span(EVENTS[step])) for step in sorted(EVENTS)]
    totals = total_times(steps)
    assert [each.process for each in totals] == sorted({each.process for step in steps for each in step})
    for total in totals:
        own = [each for step in steps for each in step if each.process == total.process]
        assert total.computing_s == pytest.approx(sum(each.computing_s for each in own))
        assert total.waiting_s == pytest.approx(sum(each.waiting_s for each in own))
        assert sum(total.waited_for.values()) == pytest.approx(total.waiting_s)
        assert list(total.waited_for.values()) == sorted(total.waited_for.values(), reverse=True)
    assert sum(each.computing_s + each.waiting_s for each in totals[:1]) > 0


def test_calls_and_gaps_cover_the_time_that_the_trace_knows():
    assert coverage(EVENTS) == {1: {"a/0": 1.0, "a/1": 1.0}, 2: {"a/0": 1.0, "a/1": 1.0}}
    events = {1: [call("x", "a/0", 1, 2), call("x", "a/0", 3, 5, waited_s=0.5)]}
    assert coverage(events) == {1: {"a/0": pytest.approx(3.5 / 4)}}


def test_calls_side_by_side_count_once_and_get_rows_of_their_own():
    events = {1: [call("x", "a/0", 0, 3), call("y", "a/0", 1, 4)]}
    assert coverage(events) == {1: {"a/0": 1.0}}
    assert {lane.name: [span.name for span in lane.spans] for lane in lanes(events)} == {"a/0": ["x"], "a/0 (2)": ["y"]}


def test_the_rows_have_every_event_and_gap():
    shown = {lane.name: [(span.category, span.name) for span in lane.spans] for lane in lanes(EVENTS)}
    assert list(shown) == ["parts", "recovery", "steps", "transfers", "a/0", "a/1"]
    assert shown["a/0"] == [
        *[("idle", "idle"), ("call", "generate_sequences")],
        *[("idle", "idle"), ("call", "update_actor")],
        *[("idle", "idle"), ("weight_sync", "send_bucket")],
    ]
    assert shown["transfers"] == [("send", "send update_actor"), ("read", "read update_actor"), ("probe", "take")]
    assert shown["steps"] == [("step", "step 1"), ("step", "step 2")]


def test_spans_of_a_row_do_not_overlap():
    events = {1: [call("x", "a/0", 0, 2), call("y", "a/0", 3, 4, waited_s=1.00001)]}
    (lane,) = lanes(events)
    assert [(span.start, span.end) for span in lane.spans] == [(0.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
    for lane in lanes(EVENTS):
        assert all(first.end <= second.start for first, second in pairwise(lane.spans))


MEMBERS = {
    "X": {"name": str, "cat": str, "ph": str, "ts": int, "dur": int, "pid": int, "tid": int, "args": dict},
    "i": {"name": str, "cat": str, "ph": str, "ts": int, "s": str, "pid": int, "tid": int, "args": dict},
    "M": {"name": str, "ph": str, "pid": int, "tid": int, "args": dict},
}
"""The members of complete, instant and metadata events in the document "Trace Event Format"."""


def require_chrome_trace(trace):
    assert (set(trace), trace["displayTimeUnit"]) == ({"traceEvents", "displayTimeUnit", "otherData"}, "ms")
    for event in trace["traceEvents"]:
        assert {name: type(value) for name, value in event.items()} == MEMBERS[event["ph"]]
        assert event["ph"] != "M" or (event["name"], *event["args"]) in (
            ("process_name", "name"),
            ("thread_name", "name"),
        )
        assert min(event.get("ts", 0), event.get("dur", 0)) >= 0
        assert event.get("s", "t") in ("g", "p", "t")
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] != "M"} == named


def test_the_trace_has_the_members_of_the_chrome_format():
    trace = json.loads(json.dumps(chrome_trace(EVENTS), allow_nan=False))
    require_chrome_trace(trace)
    require_chrome_trace(chrome_trace({}))
    spans = {(event["name"], event["tid"]): event for event in trace["traceEvents"]}
    pids = {event["args"]["name"]: event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert pids == {"controller": 1, "node-a": 2}
    update = spans["update_actor", 5]
    assert (update["pid"], update["ts"], update["dur"]) == (2, 3_000_000, 2_000_000)
    of_call = {"worker": "actor/0", "where": "Worker.update_actor", "waited_s": 1.0, "transfer_s": 0.5}
    assert update["args"] == {"step": 1, **of_call}
    assert spans["update_actor", 1]["args"]["note"] == "60% of the rows"
    assert spans["read update_actor", 4]["args"]["sources"] == {"update_actor": ["x"]}
