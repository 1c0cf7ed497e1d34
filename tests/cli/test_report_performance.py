"""`hybridflow report-performance`: the transfers of a run, from its trace."""

import json

import pytest

from hybridflow.cli.main import main
from hybridflow.errors import DataError
from hybridflow.observability import JsonlWriter, TraceEvent, performance_report, trace_row, transfer_report

EVENTS = {
    0: [
        TraceEvent("probe", "take", "actor/0", "vm", 0.0, 0.001),
        TraceEvent("probe", "take", "actor/0", "vm", 0.0, 0.01, bytes_in=10_000_000),
    ],
    1: [
        TraceEvent("call", "Actor.update", "actor/0", "vm", 1.0, 3.0, 10**6, 0, 0.25, 2**20, (("controller", ("x",)),))
    ],
    2: [
        TraceEvent("call", "Actor.update", "actor/1", "vm", 4.0, 5.0, 2 * 10**6, 0, 0.5, 2**21),
        TraceEvent("recovery", "restart", "actor", "", 5.0, 9.0),
    ],
}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "trace").mkdir()
    writer = JsonlWriter(tmp_path / "trace" / "calls.jsonl")
    for step, events in EVENTS.items():
        writer.write_all({"step": step, **trace_row(event)} for event in events)
    return tmp_path


def test_the_table_has_the_workers_and_the_nodes(run, capsys):
    assert main(["report-performance", str(run)]) == 0
    assert capsys.readouterr().out == (
        "steps 0 to 2: 3.00 MB in 0.75 s, 4.0 MB/s\n"
        "\n"
        "worker   time (s)  memory (MiB)  data (MB)  throughput (MB/s)\n"
        "actor/0      0.25             1       1.00                4.0\n"
        "actor/1      0.50             2       2.00                4.0\n"
        "\n"
        "node  latency (ms)  bandwidth (MB/s)\n"
        "vm            1.00              1000\n"
    )


def test_a_step_that_is_not_an_integer_is_an_error(run, capsys):
    trace = run / "trace" / "calls.jsonl"
    trace.write_text(trace.read_text() + '{"step": 1.5}\n')
    assert main(["report-performance", str(run)]) == 1
    assert "the row has no integer step; remove the line or the file" in capsys.readouterr().err


def test_the_report_of_some_steps_is_that_of_their_events(run, capsys):
    assert main(["report-performance", str(run), "--json", "--steps", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {"steps": [2, 2], **transfer_report(EVENTS[2])} == performance_report(run, [2])
    assert list(report["workers"]) == ["actor/1"]  # a recovery is not a transfer


@pytest.mark.parametrize("steps", ["x", "3-1", "-2", "1-2-3", "2-"])
def test_wrong_steps_are_an_error(run, steps, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["report-performance", str(run), f"--steps={steps}"])
    assert f"'{steps}' is invalid: expected a step or FIRST-LAST" in capsys.readouterr().err


def test_a_run_without_these_steps_or_without_a_trace_is_an_error(run, tmp_path, capsys):
    assert main(["report-performance", str(run), "--steps", "7-9"]) == 2
    assert "has no event of these steps" in capsys.readouterr().err
    assert main(["report-performance", str(tmp_path / "none")]) == 2
    assert "calls.jsonl not found" in capsys.readouterr().err


@pytest.mark.parametrize("row", [{"step": 1}, {"step": 1, **trace_row(EVENTS[1][0]), "sources": [3]}])
def test_a_row_that_is_no_event_is_an_error(run, row):
    JsonlWriter(run / "trace" / "calls.jsonl").write_all([row])
    with pytest.raises(DataError, match="is not an event of a trace"):
        performance_report(run)
