"""The critical path of steps with known calls, in whole seconds."""

from itertools import pairwise

import pytest

from hybridflow.cli.inspect.critical_path import (
    CriticalPath,
    Segment,
    critical_path,
    longest_share,
    path_line,
    step_span,
)
from hybridflow.runtime.observe.trace import TraceEvent


def call(method, worker, start, end, transfer_s=0.0):
    return TraceEvent("call", f"Worker.{method}", worker, "a", float(start), float(end), transfer_s=transfer_s)


STEP = [
    call("generate_sequences", "rollout/0", 1, 5),
    call("generate_sequences", "rollout/1", 1, 8, transfer_s=1.0),  # the longer one
    TraceEvent("read", "Worker.generate_sequences", "rollout/1", "a", 8.0, 8.5),
    TraceEvent("send", "Worker.update_actor", "actor/0", "a", 9.0, 9.25),
    call("update_actor", "actor/0", 9, 19),
    call("update_actor", "actor/1", 9, 18),
    TraceEvent("step", "", "controller", "", 0.0, 20.0),
]


def names(path):
    return [(segment.stage, segment.worker, segment.kind, segment.seconds) for segment in path.segments]


def test_the_call_that_ended_last_is_on_the_path():
    assert names(critical_path(STEP, *step_span(STEP))) == [
        ("controller", "controller", "waiting", 1.0),
        ("gen", "rollout/1", "transfer", 1.0),
        ("gen", "rollout/1", "computing", 6.0),
        ("gen", "controller", "transfer", 0.5),
        ("controller", "controller", "waiting", 0.5),
        ("update_actor", "actor/0", "computing", 10.0),
        ("controller", "controller", "waiting", 1.0),
    ]


@pytest.mark.parametrize("span", [(0.0, 20.0), (2.5, 17.0), (8.25, 8.75), (30.0, 31.0)])
def test_segments_partition_the_step(span):
    path = critical_path(STEP, *span)
    assert (path.segments[0].start, path.segments[-1].end) == span
    assert all(first.end == second.start for first, second in pairwise(path.segments))
    assert sum(path.shares().values()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("events", "start", "path"),
    [
        (  # a call that began in the step before counts from the start of this one
            [call("generate_sequences", "rollout/0", -5, 3), call("update_actor", "actor/0", 4, 6)],
            0.0,
            [
                ("gen", "rollout/0", "computing", 3.0),
                ("controller", "controller", "waiting", 1.0),
                ("update_actor", "actor/0", "computing", 2.0),
            ],
        ),
        (  # a call that runs on after the step is not on its path
            [call("update_actor", "actor/0", 0, 6), call("generate_sequences", "rollout/0", 1, 9)],
            0.0,
            [("update_actor", "actor/0", "computing", 6.0)],
        ),
        (  # a send that overlaps with its call takes the time before it
            [
                TraceEvent("send", "Worker.update_actor", "actor/0", "a", 1.0, 3.0),
                call("update_actor", "actor/0", 2, 6),
            ],
            1.0,
            [("update_actor", "controller", "transfer", 1.0), ("update_actor", "actor/0", "computing", 4.0)],
        ),
        (
            [TraceEvent("recovery", "restart", "actor", "", 1.0, 4.0), call("update_actor", "actor/0", 4, 6)],
            1.0,
            [("recovery", "actor", "waiting", 3.0), ("update_actor", "actor/0", "computing", 2.0)],
        ),
    ],
)
def test_the_path_of_overlapping_events(events, start, path):
    assert names(critical_path(events, start, 6.0)) == path


def test_a_trace_without_steps_has_the_span_of_its_events():
    assert step_span(STEP) == (0.0, 20.0)
    assert step_span(STEP[:-1]) == (1.0, 19.0)
    assert step_span([]) == (0.0, 0.0)


def test_the_line_names_the_largest_shares_first_and_adds_up_small_ones():
    path = critical_path(STEP, 0.0, 20.0)
    lengths = [*range(1, 100), 125]  # the 99th percentile is 99.26
    assert path_line(12, path, lengths) == (
        "step 12, 20 s: 50% update_actor; 30% gen, of it 21% waiting for the longest 1% of responses; "
        "12% controller; 8% transfer"
    )
    assert "longest" not in path_line(12, path, [7, 7, 7])
    assert longest_share([]) is longest_share([5]) is longest_share([0, 0]) is None
    assert longest_share([8, 8, 8]) == 0.0
    assert longest_share([10] * 999 + [40]) == pytest.approx(0.75)
    segments = [Segment(f"stage_{i}", "a/0", "computing", 0.0, 0.008) for i in range(5)]
    path = CriticalPath(0.0, 1.0, (*segments, Segment("update_actor", "a/0", "computing", 0.0, 0.96)))
    assert path_line(1, path) == "step 1, 1 s: 96% update_actor; 4% other"
    assert path_line(0, critical_path([], 0.0, 0.0)) == "step 0, 0 s: no time"
