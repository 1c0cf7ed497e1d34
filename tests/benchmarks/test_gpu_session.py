"""The session on one GPU: its processes cannot take each other down, and what it keeps and says."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from gpu_session import training
from gpu_session.models import MODELS
from gpu_session.plan import OF_7B, PARTS, SIZES, cases
from gpu_session.record import Figure, Record, Teller, done_cases, figures_of, read_lines
from gpu_session.runner import Case, run_cases
from gpu_session.suites import OUTCOME, TWO_RANKS, changed_test_files, gpu_test_files
from gpu_session.summary import rows_of, tables_of
from support.errors import BenchmarkError

from hybridflow.models.paged_kv_cache import pages_of
from hybridflow.models.varlen import KERNEL_VARIABLE
from hybridflow.rollout.decoding_state import table_width
from hybridflow.rollout.paged_decoding import READ_EVERY

HOUR_S = 3600


def measures(teller):
    teller.figure("step", 2.0, "ms", model="7B", limit=1.0, against="bound")


def runs_out_of_memory(teller):
    measures(teller)
    raise torch.OutOfMemoryError("CUDA out of memory")


def dies(teller):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(teller, found):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True) as child:
        found.write_text(str(child.pid))
        time.sleep(HOUR_S)


@pytest.mark.runs
@pytest.mark.own_run("grpo: its processes measure, hang and die")
def test_a_process_that_hangs_dies_or_fails_is_named_and_the_next_runs(tmp_path):
    record = Record(tmp_path / "figures.jsonl")
    found = tmp_path / "pid"
    run_cases(
        [
            Case("memory", "a", HOUR_S, runs_out_of_memory),
            Case("killed", "b", HOUR_S, dies),
            Case("endless", "c", 3, hangs, {"found": found}),
            Case("decode", "7B", HOUR_S, measures),
        ],
        record,
    )
    states = {line["part"]: line["state"] for line in read_lines(record.path) if "state" in line}
    assert states == {
        "memory": "failed: its error is in the line before",
        "killed": "ended by SIGKILL",
        "endless": "stopped after 3 s",
        "decode": "done",
    }
    assert [line["error"] for line in read_lines(record.path) if "error" in line] == [
        "OutOfMemoryError: CUDA out of memory"
    ]
    assert [line["part"] for line in read_lines(record.path) if "what" in line] == ["memory", "decode"]
    if found.exists():  # it was started within the three seconds
        pid = int(found.read_text())
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_without_its_time_a_process_is_named_as_not_run(tmp_path):
    record = Record(tmp_path / "figures.jsonl")
    short, long = Case("decode", "7B", 40, measures), Case("ranks", "pytest", 260, measures, least_s=100)
    run_cases([short], record, budget_s=0)
    run_cases([long], record, budget_s=99)
    assert [line["state"] for line in read_lines(record.path)] == ["not run: too little time is left"] * 2


def test_a_later_call_runs_what_did_not_end_well(tmp_path):
    path = tmp_path / "figures.jsonl"
    record = Record(path)
    record.write("decode", "7B", state="stopped after 40 s", seconds=40)
    record.write("probe", "machine", state="done", seconds=4)
    path.write_bytes(path.read_bytes() + b'[1]\n{"a": 1}\n\xff\n{"part": "mfu", "case"')  # killed while it was writing
    assert done_cases(read_lines(path)) == {("probe", "machine")}


def test_tables_have_figures_by_model_and_say_what_was_not_run():
    figures = [
        Figure("step", 2.0, "ms", model="0.5B", limit=0.5, against="bound"),
        Figure("step", 4.0, "ms", model="7B", limit=3.0, against="bound"),
        Figure("update", 100.0, "tokens/s", model="7B"),
        Figure("generation", 30.0, "tokens/s", model="7B", limit=60.0, peer=10.0, against="bound; peer"),
        Figure("copy", 2.9, "TB/s"),
    ]
    lines = [{"part": "decode", "case": "7B", **vars(figure)} for figure in figures]
    lines.append({"part": "decode", "case": "7B", "state": "done", "seconds": 12.5})
    assert figures_of(json.loads(json.dumps(lines))) == figures
    assert tables_of(lines, [("decode", "7B"), ("mfu", "7B")]).splitlines() == [
        "| what | compared with | 0.5B | 7B | the machine |",
        "|---|---|---|---|---|",
        "| step | bound | 2 ms; 0.5, 25% | 4 ms; 3, 75% |  |",
        "| update |  | not run | 100 tokens/s |  |",
        "| generation | bound; peer | not run | 30 tokens/s; 60; 10, 300% |  |",
        "| copy |  |  |  | 2.9 TB/s |",
        "",
        "| process | how it ended | seconds |",
        "|---|---|---|",
        "| decode of 7B | done | 12.5 |",
        "| mfu of 7B | not run | - |",
    ]
    assert [(row.name, row.ratio) for row in rows_of(lines)][:2] == [("step_0.5B", 0.25), ("step_7B", 0.75)]


def test_every_part_has_processes_in_order_and_planning_touches_no_gpu(monkeypatch, tmp_path):
    for name in ("is_available", "device_count", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda: pytest.fail("a process that is forked later could not use it"))
    planned = cases(PARTS, tuple(MODELS), tiny=False, root="", out=tmp_path, since="")
    keys = [case.key for case in planned]
    assert list(dict.fromkeys(part for part, _ in keys)) == list(PARTS)
    assert len(set(keys)) == len(keys)
    ranks, tests = ({*case.options["files"]} for case in planned if case.name == "pytest")
    assert ranks
    assert not ranks & tests


def test_rows_of_the_steady_step_keep_the_shape_of_their_step():
    for sizes in (SIZES["decode"], OF_7B):
        few, many = sizes["steps"]
        for _, context in sizes["rows_and_contexts"]:
            tables = {table_width(pages_of(context + steps + READ_EVERY)) for steps in range(few, many)}
            assert len(tables) == 1, context


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        (
            "tests/a/test_b_gpu.py::test_c[1-x y] PASSED              [ 10%]",
            ("tests/a/test_b_gpu.py::test_c[1-x y]", "PASSED"),
        ),
        ("[gw3] [  7%] FAILED tests/a/test_b_gpu.py::test_c[1] ", ("tests/a/test_b_gpu.py::test_c[1]", "FAILED")),
        ("FAILED tests/a/test_b_gpu.py::test_c - AssertionError", None),
        ("tests/a/test_b_gpu.py::test_c ", None),
    ],
)
def test_outcomes_are_read_from_lines_of_pytest(line, outcome):
    found = OUTCOME.match(line)
    assert (found and ((found[1] or found[3]).strip(), found[2])) == outcome


def test_backends_of_training_attention_are_compared_and_absent_ones_named(monkeypatch, tmp_path):
    monkeypatch.setenv(KERNEL_VARIABLE, "")  # which the measurement sets
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)  # in a process of its own
    monkeypatch.setattr(training, "product_flops", lambda: 1e12)
    record = Record(tmp_path / "figures.jsonl")
    lengths = {"equal": [32, 32], "ragged": [5, 30]}
    training.attention(Teller(record, "attention", "training"), ["0.5B"], lengths, calls=1)
    notes = {line["note"]: line for line in read_lines(record.path) if "note" in line}
    found = {note: line["is_right"] for note, line in notes.items() if "is_right" in line}
    names = [(name, case) for case in ("equal", "ragged") for name in ("flash", "cudnn", "flex", "sdpa")][:-1]
    assert found == {f"{name} on {case} of 0.5B": True for name, case in names}
    assert "install flash_attn_interface" in notes["FA3 on ragged of 0.5B"]["error"]
    assert len(figures_of(read_lines(record.path))) == 2 * len(found)


def test_tests_with_two_ranks_are_found_by_their_fixture():
    assert "tests/engines/test_layouts_gpu.py" in gpu_test_files(TWO_RANKS)
    assert len(gpu_test_files(TWO_RANKS)) < len(gpu_test_files())


def test_tests_of_changed_packages_are_chosen_and_all_without_a_commit():
    assert changed_test_files("") == gpu_test_files()
    assert set(changed_test_files("HEAD")) <= set(gpu_test_files())
    with pytest.raises(BenchmarkError, match="--since no-commit: fatal: bad revision"):
        changed_test_files("no-commit")
