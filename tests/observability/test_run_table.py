import fcntl
import json
import os

import pytest

from fixtures.report_runs import write_run
from hybridflow.observability.jsonl import read_last_rows
from hybridflow.observability.run_table import age, list_runs, run_row


def set_start(run, **values):
    document = json.loads((run / "run.json").read_text())
    document["starts"][-1] |= values
    (run / "run.json").write_text(json.dumps(document))


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=5)


def test_a_row_has_the_last_step_and_the_last_values(run):
    set_start(run, kind="train", total_steps=9)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(
            '{"step": 6, "critic/score/mean": 0.5, "val/score/mean": 0.25}\n{"step": 7, "critic/score/mean": 0.75}\n'
        )
    row = run_row(run)
    assert (row.kind, row.recipe, row.step, row.total_steps) == ("train", "recipe.toml", 7, 9)
    assert (row.figure, row.value, row.val_score) == ("critic/score/mean", 0.75, 0.25)
    assert row.started == 1767323045.0


def test_a_run_is_stopped_until_its_last_step_and_running_while_locked(run):
    set_start(run, total_steps=6)
    assert run_row(run).state == "stopped"
    set_start(run, total_steps=5)
    assert run_row(run).state == "finished"
    lock = os.open(run / ".lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert run_row(run).state == "running"
    os.close(lock)
    assert run_row(run).state == "finished"


def test_other_kinds_show_their_own_figure(run):
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "sft/loss": 2.5}\n{"step": 2, "sft/loss": 1.5, "sft/val_loss": 1.75}\n'
    )
    row = run_row(run)
    assert (row.figure, row.value, row.val_score) == ("sft/val_loss", 1.75, None)


def test_an_unreadable_run_is_a_row_that_says_why(tmp_path):
    for name, damage in {"no_json": "{", "not_a_list": '{"starts": 5}', "row": None}.items():
        run = write_run(tmp_path / name)
        (run / ("metrics.jsonl" if damage is None else "run.json")).write_text(damage or "[1]\n")
    rows = {row.path.name: row for row in list_runs(tmp_path)}
    assert {row.state for row in rows.values()} == {"unreadable"}
    assert "run.json' is damaged" in rows["no_json"].problem
    assert "starts is a int, not a list" in rows["not_a_list"].problem
    assert "is not a JSON object" in rows["row"].problem


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    for name in ("run.json", "metrics.jsonl", ".lock"):
        run = write_run(tmp_path / name.strip("."))
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert [row.state for row in list_runs(tmp_path)] == ["stopped", "stopped", "unreadable"]


def test_runs_are_found_below_the_directory_but_not_inside_runs_or_links(tmp_path):
    outside = write_run(tmp_path / "outside")
    top = tmp_path / "runs"
    write_run(top / "b" / "c")
    write_run(top / "a")
    write_run(top / "a" / "inside")
    write_run(top / "1" / "2" / "3" / "4")
    write_run(top / "1" / "2" / "3" / "deep" / "deeper")
    (top / "link").symlink_to(outside)
    assert [str(row.path.relative_to(top)) for row in list_runs(top)] == ["1/2/3/4", "a", "b/c"]


def test_last_rows_are_read_from_the_end(tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text("".join(f'{{"step": {step}, "text": "{"x" * 100}"}}\n' for step in range(3000)) + '{"step": 3000')
    assert [row["step"] for row in read_last_rows(file, 3)] == [2997, 2998, 2999]
    assert len(read_last_rows(file, 2500)) == 2500
    assert len(read_last_rows(file, 9999)) == 3000
    file.write_text("")
    assert read_last_rows(file, 3) == []


def test_an_age_has_one_unit():
    assert [age(1000, 1000 + seconds) for seconds in (5, 65, 7300, 200_000)] == ["5 s", "1 min", "2 h", "2 d"]
    assert (age(0), age(1000, 900)) == ("-", "0 s")
