"""The commands that show runs, given files that were damaged: they show the rest, or one line names the file."""

import json

import pytest

from fixtures.report_runs import write_run
from hybridflow.cli.main import main
from hybridflow.observability.trace import TraceEvent, trace_row

HUGE = 10**400
NESTED = []
for _ in range(400):
    NESTED = [NESTED]


def set_config(key, value):
    def change(run):
        content = json.loads((run / "run.json").read_text())
        content["starts"][-1]["config"][key] = value
        (run / "run.json").write_text(json.dumps(content))

    return change


def set_start(key, value):
    def change(run):
        content = json.loads((run / "run.json").read_text())
        content["starts"][-1][key] = value
        (run / "run.json").write_text(json.dumps(content))

    return change


def set_rows(file, **values):
    def change(run):
        rows = [json.loads(line) | values for line in (run / file).read_text().splitlines()]
        (run / file).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    return change


def replace_by_link(run):
    (run / "run.json").rename(run / "other.json")
    (run / "run.json").symlink_to(run / "other.json")


METRICS = ("critic/score/min", "critic/score/max", "critic/score/mean", "actor/entropy", "actor/lr", "training/epoch")

SHOWN = {  # the rest is shown
    **{f"{name} is {value}": set_rows("metrics.jsonl", **{name: value}) for name in METRICS for value in (None, 1e308)},
    **{f"{name} is huge": set_rows("metrics.jsonl", **{name: HUGE}) for name in METRICS},
    "lengths are missing": set_rows("rollouts.jsonl", length=[None] * 8),
    "lengths are huge": set_rows("rollouts.jsonl", length=[HUGE] * 8),
    "groups are NaN": set_rows("rollouts.jsonl", group=[float("nan")] * 8),
    "a ground truth is nested": set_rows("samples.jsonl", ground_truth=NESTED),
    "names of workers have escapes": set_rows("trace/calls.jsonl", process="\ud800\x1b[31m", where="a.b\ud800\x1b[31m"),
    "a value of the configuration has escapes": set_config("data.train_files", ["\x1b[31m"]),
    "a mini-batch is larger than a batch": set_config("actor.mini_batch_size", 10**9),
    "a pool is empty": set_config("placement.pools", {"a": []}),
}
REFUSED = {  # with the name of the file, and of the key or line
    "a threshold is a text": (set_config("advice.kl", "x"), "run.json': advice.kl='x' is invalid"),
    "a window is missing": (set_config("advice.window", None), "run.json': advice.window=None is invalid"),
    "a batch has no rows": (set_config("data.train_batch_size", 0), "run.json': data.train_batch_size=0 is invalid"),
    "an advantage is a list": (set_config("algorithm.advantage", []), "run.json': algorithm.advantage"),
    "all steps are a text": (set_start("total_steps", "x"), "run.json': total_steps='x' is invalid"),
    "all steps are huge": (set_start("total_steps", HUGE), "run.json': total_steps=1000"),
    "versions are nested": (
        set_start("versions", NESTED),
        "run.json' is damaged (values are nested more than 100 times)",
    ),
    "run.json is a link": (replace_by_link, "run.json' cannot be read: "),
    "a step is huge": (set_rows("metrics.jsonl", step=HUGE), "metrics.jsonl, line 1: the row has no integer step"),
}


@pytest.fixture
def run(tmp_path):
    run = write_run(tmp_path / "runs" / "run", steps=3)
    events = [TraceEvent("call", "actor.update", "actor/0", "node", 1.0, 2.0, 0, 0)]
    (run / "trace").mkdir()
    lines = [json.dumps({"step": step, **trace_row(event)}) for step in (1, 2, 3) for event in events]
    (run / "trace" / "calls.jsonl").write_text("\n".join(lines) + "\n")
    return run


@pytest.fixture
def statuses(run, tmp_path, capsys):
    """Return a function that calls all commands on the run and returns (status, output) of each."""
    healthy = write_run(tmp_path / "healthy", steps=3)
    commands = {
        "report": ["report", run, "--output", tmp_path / "page.html"],
        "diagnose": ["diagnose", run],
        "diagnose as JSON": ["diagnose", "--json", run],
        "timeline": ["timeline", run],
        "runs": ["runs", run.parent],
        "compare": ["compare", run, healthy],
    }

    def call_all():
        found = {}
        for name, command in commands.items():
            capsys.readouterr()
            status = main([*map(str, command)])
            captured = capsys.readouterr()
            found[name] = (status, captured.out + captured.err)
            assert "\x1b" not in found[name][1]
            assert name != "diagnose as JSON" or status or json.loads(captured.out, parse_constant=pytest.fail)
        return found

    return call_all


@pytest.mark.parametrize("damage", SHOWN)
def test_a_damaged_value_does_not_hide_the_rest(run, statuses, damage):
    SHOWN[damage](run)
    assert {name: status for name, (status, _) in statuses().items() if status} == {}


@pytest.mark.parametrize("damage", REFUSED)
def test_an_error_names_what_is_damaged(run, statuses, damage):
    change, message = REFUSED[damage]
    change(run)
    found = statuses()
    assert found["diagnose"][0] == 1
    assert message in found["diagnose"][1]
    assert {status for status, _ in found.values()} <= {0, 1}
