"""The commands that show runs: report, watch, diagnose, timeline, report-performance, runs and compare."""

import json
import os
import re

import pytest

from fixtures.report_runs import write_run
from fixtures.trace_coverage import coverage
from hybridflow.cli.main import main
from hybridflow.errors import DataError
from hybridflow.runtime.observe import (
    JsonlWriter,
    TraceEvent,
    performance_report,
    read_jsonl,
    trace_row,
    transfer_report,
)
from hybridflow.runtime.observe.findings import FINDINGS
from hybridflow.runtime.observe.run_files import RunFiles

NOT_A_RUN = "is not the directory of a run: it has no run.json"
LOOKED = f"looked for {len(FINDINGS)}, in the metrics of steps"


def write_rows(run, *rows, file="metrics.jsonl"):
    (run / file).parent.mkdir(parents=True, exist_ok=True)
    (run / file).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_trace(run, events):
    trace = JsonlWriter(run / "trace" / "calls.jsonl")
    for step, of_step in events.items():
        trace.write_all({"step": step, **trace_row(event)} for event in of_step)


@pytest.fixture
def runs(tmp_path):
    """Return a directory with the runs `a`, of 3 steps, and `b`, of 8."""
    for name, steps, seed in (("a", 3, 0), ("b", 8, 1)):
        write_run(tmp_path / "runs" / name, steps=steps, seed=seed)
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param("grpo", 6, marks=pytest.mark.runs),
        pytest.param("episodes", 3, marks=pytest.mark.runs),
        pytest.param("ray_two", 6, marks=[pytest.mark.runs, pytest.mark.ray]),
    ],
)
def test_the_timeline_of_a_trained_run_has_its_steps(name, steps, request, shown, tmp_path):
    run = request.getfixturevalue(f"{name}_run")
    assert f"in the metrics of steps 1 to {steps}" in shown("diagnose", run)[0]
    assert "configuration: the same" in shown("compare", run, run)[0]
    lines = shown("timeline", run)[0].splitlines()
    of_steps = {line.partition(",")[0]: line for line in lines if line.startswith("step ")}
    assert {f"step {step}" for step in range(1, steps + 1)} <= of_steps.keys()
    for step in range(1, steps + 1):
        assert re.fullmatch(r"step \d, \S+ s: (\d+% \w+[^;]*; )+\d+% \w+[^;]*", of_steps[f"step {step}"])
        assert "update_actor" in of_steps[f"step {step}"]
    report = json.loads(shown("timeline", run, "--steps", "2-9", "--json")[0])
    assert [step["step"] for step in report["steps"]] == list(range(2, steps + 1))
    for step in report["steps"]:
        assert sum(segment["seconds"] for segment in step["path"]) == pytest.approx(step["seconds"], abs=1e-6)
        assert {segment["kind"] for segment in step["path"]} == {"computing", "transfer", "waiting"}
    out, _ = shown("timeline", run, "--steps", "3", "--output", tmp_path / "trace.json")
    assert f"trace: {tmp_path}/trace.json; open it at https://ui.perfetto.dev" in out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"update_actor", "generate_sequences", "idle", "step 3"} <= {event["name"] for event in events}
    assert "has no event of these steps" in shown("timeline", run, "--steps", "77", status=2)[1]

    spans = [row for row in read_jsonl(run / "trace" / "calls.jsonl") if row["kind"] == "step"]
    assert [row["start"] for row in spans[1:]] == [row["end"] for row in spans[:-1]]
    if name == "grpo":  # calls and gaps of the only process cover a step
        shares = [of_step["driver"] for of_step in coverage(RunFiles(run).events).values()]
        assert shares == pytest.approx([1.0] * len(shares), abs=0.02)


@pytest.mark.parametrize("command", ["report", "watch", "diagnose", "compare"])
def test_what_is_not_a_run_is_an_error(command, shown, tmp_path, runs):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file", tmp_path / "missing"):
        arguments = [runs / "a", path] if command == "compare" else [path]
        assert NOT_A_RUN.partition(":")[0] in shown(command, *arguments, status=2)[1]


def test_a_page_is_written_into_the_first_run_or_the_named_file(shown, runs):
    assert f"report: {runs}/a/report.html (" in shown("report", runs / "a", runs / "b")[0]
    assert "<title>a · b · hybridflow</title>" in (runs / "a" / "report.html").read_text()
    (runs / "other").write_text("precious")
    (runs / "b" / "report.html").symlink_to(runs / "other")
    assert "report.html' is a symbolic link" in shown("report", runs / "b", status=2)[1]
    assert (runs / "other").read_text() == "precious"
    assert "expected a port from 0 to 65535" in shown("watch", runs / "a", "--port", "70000", status=2)[1]


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


def test_performance_is_a_table_of_workers_and_nodes(shown, runs):
    run = runs / "a"
    write_trace(run, EVENTS)
    assert shown("report-performance", run)[0] == (
        "steps 0 to 2: 3.00 MB in 0.75 s, 4.0 MB/s\n"
        "\n"
        "worker   time (s)  memory (MiB)  data (MB)  throughput (MB/s)\n"
        "actor/0      0.25             1       1.00                4.0\n"
        "actor/1      0.50             2       2.00                4.0\n"
        "\n"
        "node  latency (ms)  bandwidth (MB/s)\n"
        "vm            1.00              1000\n"
    )
    report = json.loads(shown("report-performance", run, "--json", "--steps", "2")[0])
    assert report == {"steps": [2, 2], **transfer_report(EVENTS[2])} == performance_report(run, [2])
    assert list(report["workers"]) == ["actor/1"]  # a recovery is not a transfer
    for steps in ("x", "3-1", "-2", "1-2-3", "2-"):
        problem = f"'{steps}' is invalid: expected a step or FIRST-LAST"
        assert problem in shown("report-performance", run, f"--steps={steps}", status=2)[1]
    assert "has no event of these steps" in shown("report-performance", run, "--steps", "7-9", status=2)[1]
    assert "has no event of these steps" in shown("report-performance", runs / "b", status=2)[1]
    JsonlWriter(run / "trace" / "calls.jsonl").write({"step": 1.5})
    assert "the row has no integer step; remove the line or" in shown("report-performance", run, status=1)[1]
    whole = {"step": 1, **trace_row(EVENTS[1][0])}
    for row in ({"step": 1}, whole | {"sources": [3]}):
        write_rows(run, row, file="trace/calls.jsonl")
        with pytest.raises(DataError, match="is not an event of a trace"):
            performance_report(run)


@pytest.fixture
def cut(tmp_path):
    """Return `cut(steps, last_cut)`, which writes a run whose responses are cut until a step."""

    def write(steps=35, last_cut=35):
        config = {"data.max_response_length": 100, "advice.window": 10}  # a run of an older version lacks keys
        (tmp_path / "run.json").write_text(json.dumps({"starts": [{"config": config}]}))
        ratios = [0.75 if step <= last_cut else 0.1 for step in range(1, steps + 1)]
        rows = [{"step": i, "actor/lr": 1e-6, "response_length/clip_ratio": ratio} for i, ratio in enumerate(ratios, 1)]
        write_rows(tmp_path, *rows)
        return tmp_path

    return write


def test_a_finding_is_printed_with_what_to_do(cut, shown):
    assert shown("diagnose", cut(30))[0] == (
        "truncation (steps 21 to 30)\n"
        "  seen  75% of the responses are cut at data.max_response_length\n"
        "  why   A response that is cut has no answer yet, so its reward is that of an unfinished response.\n"
        "  do    try data.max_response_length = 200 or 400 (now 100)\n"
        "        check rollout.stop_strings (now [])\n"
        "        check reward.overlong_buffer (now 0)\n"
        "\n"
        f"1 finding; {LOOKED} 21 to 30 and 0 samples\n"
    )
    report = json.loads(shown("diagnose", "--json", cut(30))[0])
    del report["looked_at"]["findings"]
    assert report["looked_at"] == {"steps": [21, 30], "metrics": 10, "samples": 0}
    (found,) = report["found"]
    assert (found["name"], found["keys"][0]) == ("truncation", ["data.max_response_length", 100, [200, 400]])
    assert "in the metrics of no step yet" in shown("diagnose", cut(0))[0]


def test_what_only_earlier_steps_show_is_named(cut, shown):
    run = cut(35, last_cut=15)
    out, _ = shown("diagnose", run)
    assert out.startswith(f"no findings; {LOOKED} 26 to 35")
    assert out.endswith("only in earlier steps: truncation (1-5, 6-15); look at them with --steps FIRST-LAST\n")
    assert json.loads(shown("diagnose", "--json", run)[0])["found_earlier"] == {"truncation": [[1, 5], [6, 15]]}
    out, _ = shown("diagnose", run, "--steps", "3-6")
    assert out.startswith("truncation (steps 3 to 6)\n  seen  75% of the responses are cut")
    assert "earlier" not in out
    assert shown("diagnose", run, "--steps", "20")[0].startswith(f"no findings; {LOOKED} 20 to 20")
    for steps in ("36-50", "0"):
        error = shown("diagnose", run, "--steps", steps, status=2)[1]
        assert "has no metrics of these steps; metrics.jsonl shows its steps" in error


def test_runs_are_a_table(shown, runs, monkeypatch):
    checkpoint = runs / "a" / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "actor.safetensors").write_bytes(bytes(2_500_000))
    table, _ = shown("runs", runs)
    head, first, second = table.splitlines()
    names = ("run", "kind", "recipe", "step", "figure", "value", "validation", "state", "started", "written", "size")
    assert tuple(head.split()) == names
    assert first.split()[:5] == ["a", "train", "recipe.toml", "3/3", "critic/score/mean"]
    assert second.split()[:5] == ["b", "train", "recipe.toml", "8/8", "critic/score/mean"]
    assert [line.split("  ")[-1].strip() for line in (first, second)] == ["2.5 MB", "-"]
    monkeypatch.chdir(runs.parent)
    assert shown("runs")[0] == shown("runs", "runs")[0]  # the default directory
    assert shown("runs", runs / "b")[0].splitlines()[1].startswith(f"{runs / 'b'}  train")
    (runs / "b" / "run.json").write_text("{")
    _, _, row, _, problem = shown("runs", runs)[0].splitlines()
    assert row.split()[7] == "unreadable"
    assert problem.startswith(f"{runs / 'b'}: '{runs / 'b' / 'run.json'}' is damaged")


def test_a_directory_without_runs_says_so(shown, tmp_path, monkeypatch):
    assert shown("runs", tmp_path)[0] == f"no run in '{tmp_path}': a run is a directory with run.json\n"
    assert shown("runs", tmp_path, "--json")[0] == "[]\n"
    monkeypatch.chdir(tmp_path)
    assert "error: 'runs' is not a directory; name one that has runs: hybridflow" in shown("runs", status=2)[1]
    (tmp_path / "file").write_text("")
    for name in ("file", "missing"):
        assert f"'{tmp_path / name}' is not a directory" in shown("runs", tmp_path / name, status=2)[1]


@pytest.mark.parametrize(
    ("sort", "names"), [("name", "abcd"), ("value", "bacd"), ("validation", "abcd"), ("written", "dcba")]
)
def test_the_best_or_newest_run_is_first_and_nan_last(shown, tmp_path, sort, names):
    rows = {
        "a": {"critic/score/mean": 0.25, "val/score/mean": 0.5},
        "b": {"critic/score/mean": 0.75, "val/score/mean": 0.25},
        "c": {"critic/score/mean": None, "non_finite": {"critic/score/mean": "nan"}},
        "d": {},
    }
    for i, (name, row) in enumerate(rows.items()):
        write_rows(write_run(tmp_path / name), {"step": 1, **row})
        os.utime(tmp_path / name / "metrics.jsonl", (i, i))
    found = json.loads(shown("runs", tmp_path, "--json", "--sort", sort)[0])
    assert "".join(row["path"][-1] for row in found) == names
    values = {"a": 0.25, "b": 0.75, "c": "nan", "d": None}
    assert {row["path"][-1]: row["value"] for row in found} == values


def test_a_smaller_loss_is_better(shown, runs):
    for name, loss in (("a", 2.0), ("b", 1.0)):
        write_rows(runs / name, {"step": 1, "sft/loss": loss})
    assert [line[0] for line in shown("runs", runs, "--sort", "value")[0].splitlines()[1:]] == ["b", "a"]


def test_names_cannot_control_the_terminal_or_break_the_table(shown, tmp_path):
    directory = os.fsencode(tmp_path) + b"/escape\x1b[2J\nline\xff\xe2\x80\xae"
    os.rename(write_run(tmp_path / "run"), directory)
    assert shown("runs", tmp_path)[0].splitlines()[1].startswith("escape\\x1b[2J\\nline\\udcff\\u202e  train")
    assert json.loads(shown("runs", tmp_path, "--json")[0])[0]["path"] == os.fsdecode(directory)


def test_two_runs_are_compared(shown, runs):
    both = {"step": 1, "actor/loss": 0.5, "actor/lr": 1, "timing_s/step": 2}
    write_rows(runs / "a", both, {**both, "step": 2, "actor/loss": 0.25})
    write_rows(runs / "b", both, {**both, "step": 2, "timing_s/step": 3, "val/x": 2}, {"step": 3})
    compare = ["compare", runs / "a", runs / "b"]
    assert shown(*compare, "--times")[0] == (
        f"A: {runs}/a, to step 2\n"
        f"B: {runs}/b, to step 3\n"
        "\n"
        "configuration: 2 differ\n"
        "                     A  B\n"
        "trainer.seed         0  1\n"
        "trainer.total_steps  3  8\n"
        "\n"
        "environment: the same\n"
        "\n"
        "prompts: the same in all common steps\n"
        "\n"
        "curves, all 2 common steps, 1 to 2: 1 differ, 1 the same\n"
        "            from step  largest difference  last A  last B  mean A  mean B\n"
        "actor/loss          2                0.25    0.25     0.5   0.375     0.5\n"
        "only in B: val/x\n"
        "\n"
        "times, memory and transfers:\n"
        "               from step  largest difference  last A  last B  mean A  mean B\n"
        "timing_s/step          2                   1       2       3       2     2.5\n"
    )
    for pattern, names in {"loss": ["actor/loss"], "a*r/l*s": ["actor/loss"], "lr": []}.items():
        found = json.loads(shown(*compare, "--json", "--metric", pattern)[0])
        assert [curve["name"] for curve in found["curves"]] == names
    assert "\ncurves: 1 the same in all 2 common steps, 1 to 2\n" in shown(*compare, "--metric=lr")[0]
    assert "no common metric whose name contains 'kl'" in shown(*compare, "--metric", "kl")[0]
    write_rows(runs / "b", {"step": 77, "actor/loss": 1.0})
    assert "the runs have no common step" in shown(*compare)[0]
    (runs / "b" / "metrics.jsonl").unlink()
    assert f"B: {runs}/b, to step 0" in shown(*compare)[0]


def test_data_and_models_are_compared_where_they_are_recorded(shown, runs):
    for name, digest in (("a", "12"), ("b", "34")):
        data = {"data": {"train_rows": 9, "train_fingerprint": digest}, "models": {"model.path": "a"}}
        set_start(**data)(runs / name)
    text, _ = shown("compare", runs / "a", runs / "b")
    assert "data and initial models: 1 differ\n" in text
    assert 'data.train_fingerprint  "12"  "34"\n' in text
    assert "data and initial models: the same\n" in shown("compare", runs / "b", runs / "b")[0]


def test_values_that_a_terminal_or_a_float_cannot_hold_are_shown_as_text(shown, runs):
    set_start({"trainer.run_dir": "\x1b[2J\x9b\u202e\ud800", "long": "x" * 99})(runs / "b")
    for run, values in (("a", '1, "y": 1, "z": null'), ("b", '1e999, "y": 1e999, "z": 1')):
        (runs / run / "metrics.jsonl").write_text(f'{{"step": 1, "x\\u001b": {values}}}\n')
    text, _ = shown("compare", runs / "a", runs / "b")
    assert r'"\u001b[2J\x9b\u202e\ud800"' in text
    assert f'"{"x" * 56}...' in text
    assert [line.split() for line in text.splitlines()[-3:]] == [
        ["x\\x1b", "1", "inf", "1", "inf", "1", "nan"],
        ["y", "1", "inf", "1", "inf", "1", "nan"],
        ["z", "1", "inf", "-", "1", "nan", "1"],
    ]
    assert json.loads(shown("compare", runs / "a", runs / "b", "--json")[0])["num_equal"] == 0


def set_start(config=None, **values):
    """Return a function that changes values of a run's start, and keys of its configuration."""

    def change(run):
        content = json.loads((run / "run.json").read_text())
        content["starts"][-1] |= values
        content["starts"][-1]["config"] |= config or {}
        (run / "run.json").write_text(json.dumps(content))

    return change


def set_rows(file, **values):
    return lambda run: write_rows(run, *(row | values for row in read_jsonl(run / file)), file=file)


def set_text(file, text):
    return lambda run: (run / file).write_text(text)


def replace_by_link(run):
    (run / "run.json").rename(run / "other.json")
    (run / "run.json").symlink_to(run / "other.json")


METRICS = ("critic/score/min", "critic/score/max", "critic/score/mean", "actor/entropy", "actor/lr", "training/epoch")
VALUES = {"None": None, "1e308": 1e308}

SHOWN = {  # the rest is shown
    **{f"metrics are {name}": set_rows("metrics.jsonl", **dict.fromkeys(METRICS, VALUES[name])) for name in VALUES},
    "lengths are missing": set_rows("rollouts.jsonl", length=[None] * 8),
    "groups are NaN": set_rows("rollouts.jsonl", group=[float("nan")] * 8),
    "names of workers have escapes": set_rows("trace/calls.jsonl", process="\ud800\x1b[31m", where="a.b\ud800\x1b[31m"),
    "a value of the configuration has escapes": set_start({"data.train_files": ["\x1b[31m"]}),
}
REFUSED = {  # by diagnose and compare, with the name of the file, and of the key or line
    "run.json': advice.kl='x' is invalid": set_start({"advice.kl": "x"}),
    "run.json': advice.window=None is invalid": set_start({"advice.window": None}),
    "run.json': data.train_batch_size=0 is invalid": set_start({"data.train_batch_size": 0}),
    "run.json': algorithm.advantage": set_start({"algorithm.advantage": []}),
    "run.json' cannot be read: ": replace_by_link,
    "has no configuration": set_text("run.json", '{"starts": [{}]}'),
    "metrics.jsonl, line 1: 'non_finite' is damaged": set_rows("metrics.jsonl", non_finite=3),
    "line 1: 'non_finite' is damaged": set_rows("metrics.jsonl", non_finite={"x": "y"}),
}


@pytest.fixture
def statuses(runs, capsys):
    """Return a function that calls all commands on the run `a` and returns (status, output) of each."""
    run = runs / "a"
    write_trace(
        run,
        {
            step: [TraceEvent("call", "actor.update", "actor/0", "node", 1.0, 2.0, process="actor/0")]
            for step in (1, 2, 3)
        },
    )
    commands = {
        "report": ["report", run, "--output", runs / "page.html"],
        "diagnose": ["diagnose", run],
        "diagnose as JSON": ["diagnose", "--json", run],
        "timeline": ["timeline", run],
        "runs": ["runs", runs],
        "compare": ["compare", run, runs / "b"],
    }

    def call_all():
        found = {}
        for name, command in commands.items():
            status = main([*map(str, command)])
            captured = capsys.readouterr()
            found[name] = (status, captured.out + captured.err)
            assert "\x1b" not in found[name][1]
            assert name != "diagnose as JSON" or status or json.loads(captured.out, parse_constant=pytest.fail)
        return found

    return call_all


@pytest.mark.parametrize("damage", SHOWN)
def test_a_damaged_value_does_not_hide_the_rest(runs, statuses, damage):
    SHOWN[damage](runs / "a")
    assert {name: output for name, (status, output) in statuses().items() if status} == {}


@pytest.mark.parametrize("message", REFUSED)
def test_an_error_names_what_is_damaged(runs, statuses, message):
    REFUSED[message](runs / "a")
    found = statuses()
    assert found["diagnose"][0] == 1
    assert message in found["diagnose"][1]
    assert str(runs / "a") in found["diagnose"][1]
    assert {status for status, _ in found.values()} <= {0, 1}
