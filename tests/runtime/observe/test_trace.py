from hybridflow.runtime.observe import Trace, TraceEvent, stage_seconds, trace_row, transfer_metrics, transfer_report

EVENTS = [
    TraceEvent("send", "Actor.update", "actor/0", "here", 0.0, 0.5, bytes_out=100),
    TraceEvent("call", "Actor.update", "actor/0", "a", 1.0, 3.0, 100, 20, transfer_s=0.25, memory_bytes=7),
    TraceEvent("call", "Actor.update", "actor/1", "b", 2.0, 5.0, 100, 20, transfer_s=0.5, memory_bytes=9),
    TraceEvent("call", "Actor.update", "actor/0", "a", 6.0, 7.0, 0, 0, transfer_s=0.0, memory_bytes=5),
    TraceEvent("read", "Actor.update", "actor/0", "here", 7.0, 7.25, bytes_in=40),
    *(TraceEvent("probe", "take", "actor/0", "a", 0.0, seconds) for seconds in (0.001, 0.5, 0.002)),
    TraceEvent("probe", "take", "actor/0", "a", 0.0, 0.01, bytes_in=10_000),
]


def test_report_sums_bytes_and_seconds_and_has_the_peak_memory():
    report = transfer_report(EVENTS)
    assert report["total_transfer_time"] == 0.5 + 0.25 + 0.5 + 0.0 + 0.25
    assert report["total_data_transferred"] == 100 + 120 + 120 + 40
    assert report["average_throughput"] == 380 / 1.5
    assert report["workers"] == {
        "actor/0": {"time": 1.0, "memory": 7, "data_size": 260, "throughput": 260.0},
        "actor/1": {"time": 0.5, "memory": 9, "data_size": 120, "throughput": 240.0},
    }
    assert report["nodes"] == {"a": {"latency": 0.002, "bandwidth": 1e6}}  # medians of its probes
    nothing = {"total_transfer_time": 0, "total_data_transferred": 0, "average_throughput": 0.0}
    assert transfer_report([]) == {**nothing, "workers": {}, "nodes": {}}


def test_transfer_metrics_exclude_probes():
    moved = {"transfer/bytes_flowed": 240, "transfer/bytes_sent": 100, "transfer/bytes_read": 40}
    assert transfer_metrics(iter(EVENTS)) == {**moved, "transfer/seconds": 1.5}


def test_stage_seconds_is_the_union_of_its_calls():
    assert stage_seconds(EVENTS, {}) == {"timing_s/update": 4.0 + 1.0}  # 1 to 5, and 6 to 7
    assert stage_seconds(EVENTS, {"update": "update_actor"}) == {"timing_s/update_actor": 5.0}


def test_take_drops_events_and_paused_records_none():
    trace = Trace()
    with trace.paused():
        trace.record(EVENTS[0])
    trace.record(EVENTS[1])
    assert trace.take() == [EVENTS[1]]
    assert trace.take() == []


def test_trace_row_has_every_field():
    row = trace_row(EVENTS[1])
    assert (row["kind"], row["where"], row["bytes_out"], row["memory_bytes"]) == ("call", "Actor.update", 20, 7)
    assert TraceEvent(**row) == EVENTS[1]
    assert (EVENTS[1].group, EVENTS[1].method, EVENTS[1].bytes_moved) == ("actor", "update", 120)
