"""`hybridflow timeline` and `trainer.profile_steps`, on a run of three steps."""

import gzip
import json
import re

import pytest

from fixtures import tiny_run
from hybridflow.cli.main import main
from hybridflow.observability import read_jsonl
from hybridflow.observability.run_files import RunFiles
from hybridflow.observability.timeline import coverage
from hybridflow.runtime import capture_random_state, restore_random_state

STEPS = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the directory of a run `plain` and a run `profiled`, in which step 2 is profiled."""
    directory = tmp_path_factory.mktemp("timeline")
    task = tiny_run.write_task(directory / "task")
    common = ["train", f"{task}/rl.toml", *tiny_run.GRPO, f"trainer.total_steps={STEPS}"]
    random_state = capture_random_state()
    for name, changes in {"plain": [], "profiled": ["trainer.profile_steps=[2]", "trainer.profile_ranks=[0]"]}.items():
        assert main([*common, f"trainer.run_dir={directory}/{name}", *changes]) == 0
    restore_random_state(random_state)
    return directory


def test_each_step_has_a_line_and_the_process_a_row(runs, capsys):
    assert main(["timeline", str(runs / "plain")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines[: STEPS + 1]] == ["step 0", "step 1", "step 2", "step 3"]
    for line in lines[1 : STEPS + 1]:
        assert re.fullmatch(r"step \d, \S+ s: (\d+% \w+[^;]*; )+\d+% \w+[^;]*", line)
        assert "update_actor" in line
    assert lines[STEPS + 2].split()[:2] == ["process", "computing"]
    assert re.fullmatch(r"driver +[\d.]+ +[\d.]+ +[\d.]+ s controller", lines[STEPS + 3])


def test_steps_and_json_show_the_path_of_these_steps(runs, capsys):
    assert main(["timeline", str(runs / "plain"), "--steps", "2-9", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in report["steps"]] == [2, 3]
    for step in report["steps"]:
        assert sum(segment["seconds"] for segment in step["path"]) == pytest.approx(step["seconds"], abs=1e-6)
        assert {segment["kind"] for segment in step["path"]} == {"computing", "transfer", "waiting"}
    assert report["processes"][0]["process"] == "driver"


def test_the_output_is_a_chrome_trace_of_the_steps(runs, tmp_path, capsys):
    file = tmp_path / "trace.json"
    assert main(["timeline", str(runs / "plain"), "--steps", "3", "--output", str(file)]) == 0
    assert f"trace: {file}; open it at https://ui.perfetto.dev" in capsys.readouterr().out
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} >= {3}
    assert {"update_actor", "generate_sequences", "idle", "step 3"} <= {event["name"] for event in events}


def test_a_run_without_these_steps_is_an_error(runs, capsys):
    assert main(["timeline", str(runs / "plain"), "--steps", "7"]) == 2
    assert "has no event of these steps" in capsys.readouterr().err


def test_calls_and_gaps_of_one_process_cover_the_steps(runs):
    shares = coverage(RunFiles(runs / "plain").events)
    assert list(shares) == [0, 1, 2, 3]
    assert all(of_step["driver"] == pytest.approx(1.0, abs=0.02) for of_step in shares.values())


def test_steps_follow_each_other_in_the_trace_of_a_run(runs):
    rows = [row for row in read_jsonl(runs / "plain" / "trace" / "calls.jsonl") if row["kind"] == "step"]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["start"] for row in rows[1:]] == [row["end"] for row in rows[:-1]]


def test_a_profiled_step_is_written_and_results_are_the_same(runs):
    files = [file for file in (runs / "profiled" / "profile").rglob("*") if file.is_file()]
    assert [str(file.relative_to(runs / "profiled")) for file in files] == [
        "profile/step_000002/actor_rollout_0.json.gz"
    ]
    with gzip.open(files[0]) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names
    plain, profiled = (tiny_run.results_of(runs / name, STEPS) for name in ("plain", "profiled"))
    assert plain.keys() == profiled.keys()
    assert [name for name in plain if plain[name] != profiled[name]] == []
    assert not (runs / "plain" / "profile").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["trainer.profile_steps=[4]", "trainer.total_steps=3"], "has step 4, but trainer.total_steps=3"),
        (["trainer.profile_steps=[2,9]"], "has step 9, but the run ends with step 6"),
        (
            ["trainer.profile_steps=[1]", "trainer.profile_ranks=[0,1]"],
            "has rank 1, but the ranks of this run are 0 to 0",
        ),
        (["trainer.profile_steps=[0]"], "trainer.profile_steps"),
    ],
)
def test_a_step_or_a_rank_that_the_run_lacks_is_an_error(runs, tmp_path, capsys, changes, problem):
    command = ["train", f"{runs}/task/rl.toml", f"trainer.run_dir={tmp_path}/run", *changes]
    assert main(command) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
