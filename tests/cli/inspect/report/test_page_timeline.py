"""The timeline that the page draws, from a trace of two steps."""

import pytest

from hybridflow.cli.inspect.report.page_data import page_timeline
from hybridflow.runtime.observe import JsonlWriter, TraceEvent, trace_row
from hybridflow.runtime.observe.run_files import RunFiles

EVENTS = {
    1: [
        TraceEvent("call", "Actor.generate_sequences", "actor/0", "vm", 100.0, 103.0, process="actor/0"),
        TraceEvent("call", "Actor.generate_sequences", "actor/1", "vm", 100.0, 104.0, process="actor/1"),
        TraceEvent("step", "", "controller", "", 100.0, 105.0),
    ],
    2: [
        TraceEvent("call", "Actor.update_actor", "actor/0", "vm", 104.5, 109.0, process="actor/0", waited_s=1.5),
        TraceEvent("step", "", "controller", "", 105.0, 110.0),
    ],
}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    trace = JsonlWriter(tmp_path / "trace" / "calls.jsonl")
    for step, events in EVENTS.items():
        trace.write_all({"step": step, **trace_row(event)} for event in events)
    JsonlWriter(tmp_path / "rollouts.jsonl").write({"step": 1, "score": [0.0] * 4, "length": [1, 1, 1, 100]})
    return RunFiles(tmp_path)


def test_each_step_has_its_line_waits_and_lanes(run):
    first, second = page_timeline(run)
    assert (first["step"], first["seconds"]) == (1, 5.0)
    assert first["line"] == ("step 1, 5 s: 80% gen, of it 3% waiting for the longest 1% of responses; 20% controller")
    assert first["shares"] == {"gen": 0.8, "controller": 0.2}
    assert first["waited"] == [
        ["actor/0", 3.5, 1.5, "1.00 s gen on actor/1; 0.50 s controller"],
        ["actor/1", 4.0, 0.0, ""],
    ]
    generate, update = [0.0, 3.0, "gen", "call"], [4.5, 5.0, "update_actor", "call"]
    assert first["lanes"] == [
        {"name": "actor/0", "spans": [generate, update]},
        {"name": "actor/1", "spans": [[0.0, 4.0, "gen", "call"]]},
    ]
    assert second["lanes"] == [{"name": "actor/0", "spans": [[0.0, 4.0, "update_actor", "call"]]}]
