"""Each check on this machine, and on one that has its fault."""

import resource
import time
from importlib.metadata import requires

import psutil
import pytest
from packaging.requirements import Requirement

from hybridflow.cli import doctor
from hybridflow.cli.compatibility import TESTED
from hybridflow.cli.doctor import (
    INTERFACE,
    CheckProgram,
    CheckResult,
    all_reduce_program,
    check_cores,
    check_devices,
    check_host_name,
    check_open_files,
    check_run_directory,
    check_shared_memory,
    check_temporary_files,
    check_versions,
    devices_program,
    run_checks,
)
from hybridflow.cli.main import main

OWN_RUN = pytest.mark.own_run("grpo: starts the programs of checks")


def test_this_machine_has_no_error():
    for look in (check_cores, check_versions, check_devices, check_shared_memory, check_open_files):
        finding = look()
        assert finding.state == "ok" or finding.fix
        assert finding.state != "error", finding


def test_an_error_sets_the_exit_status(monkeypatch, capsys, tmp_path):
    fine, slow = (
        CheckResult("devices", "ok", "no GPU"),
        CheckResult("open files", "warning", "5 files", "raise the limit"),
    )
    wrong = CheckResult("versions", "error", "torch is missing", "install it")
    for findings, status in (([fine], 0), ([fine, slow], 0), ([fine, wrong, slow], 1)):
        monkeypatch.setattr(doctor, "run_checks", lambda _, found=findings: iter(found))
        assert main(["doctor", "--dir", str(tmp_path)]) == status
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "ok       devices         no GPU"
    assert lines[1:3] == ["error    versions        torch is missing", "         fix: install it"]


def test_versions_that_are_missing_or_wrong_are_named(monkeypatch):
    needs = ["torch>=99", "absent>1", "numpy", 'vllm==0.1; extra == "vllm"']
    monkeypatch.setattr(doctor, "requires", lambda name: needs)
    finding = check_versions()
    assert finding.state == "error"
    assert "is not >=99; absent is missing" in finding.text
    assert "vllm" not in finding.text
    assert finding.fix == "install them again: pip install 'torch>=99' 'absent>1'"
    monkeypatch.setattr(doctor, "metadata", lambda _: {"Requires-Python": ">=4"})
    assert "hybridflow needs Python >=4" in check_versions().text


def test_versions_that_are_not_tested_are_a_warning(monkeypatch):
    assert check_versions().state == "ok"
    others = {"transformers": "5.25.1", "vllm": "0.31.0", "torch": "2.13.0+cpu", "ray": "2.60.4"}
    monkeypatch.setattr(doctor, "installed", lambda name: others.get(name, "3.14.0"))
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch"])
    finding = check_versions()
    assert finding.state == "warning"
    assert finding.text.partition("; ")[2] == (
        "Python 3.14.0 is not tested, 3.11 to 3.13 is; transformers 5.25.1 is not tested, 5.19 to 5.24 is; "
        "vllm 0.31.0 is not tested, 0.32 is"
    )
    assert finding.fix == "if a run fails, use Python>=3.11,<3.14, transformers>=5.19,<5.25, vllm>=0.32,<0.33"


def test_tested_versions_are_allowed_by_the_package():
    bounds = {need.name: need.specifier for need in map(Requirement, requires("hybridflow"))}
    for entry in TESTED[1:]:
        assert bounds[entry.name].contains(f"{entry.lowest}.0")
        assert bounds[entry.name].contains(f"{entry.highest}.0")


def test_gpus_that_torch_does_not_find_are_a_warning(tmp_path, monkeypatch):
    (tmp_path / "driver").touch()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert check_devices(tmp_path / "none").state == "ok"
    assert "install a CUDA build of torch" in check_devices(tmp_path / "driver").fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert check_devices(tmp_path / "none").state == "error"


def test_memory_files_and_temporary_directories_are_measured(tmp_path, monkeypatch):
    assert check_shared_memory(tmp_path, least=1).state == "ok"
    assert check_shared_memory(tmp_path, least=2**60).state == "warning"
    assert "mount a tmpfs" in check_shared_memory(tmp_path / "none").fix
    assert check_temporary_files(least=2**60).state == "warning"
    for hard, state in ((4096, "ok"), (1_048_576, "ok"), (2048, "warning")):  # Ray raises the soft limit
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (1024, hard))
        assert check_open_files().state == state
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    finding = check_temporary_files(least=1)
    assert (finding.state, f"TMPDIR={tmp_path}/none does not exist" in finding.text) == ("warning", True)
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: "/dev/full")
    assert check_temporary_files().state == "error"
    assert [finding.name for finding in run_checks(tmp_path)] == ["temporary files"]


def test_a_directory_of_runs_is_written_renamed_and_locked(tmp_path, monkeypatch):
    finding = check_run_directory(tmp_path / "not" / "yet", least_free=1)
    assert finding.state == "ok"
    assert f"free in '{tmp_path}', with renames and locks" in finding.text
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "none")
    assert check_run_directory(tmp_path / "file" / "runs").text == f"'{tmp_path}/file' is not a directory"
    assert check_run_directory(tmp_path / "link").text == f"'{tmp_path}/link' is not a directory"
    assert check_run_directory(tmp_path, least_free=2**60).state == "warning"
    monkeypatch.setattr(doctor, "_can_lock", lambda _: False)
    assert "has no locks" in check_run_directory(tmp_path).text
    assert "cannot be written" in check_run_directory("/proc" / tmp_path.relative_to("/")).text


def test_host_name_and_interface_must_be_of_this_machine(monkeypatch):
    assert check_host_name("localhost").state == "ok"
    unknown = check_host_name("no-such-host.invalid")
    assert (unknown.state, "/etc/hosts" in unknown.fix) == ("warning", True)
    assert check_host_name("192.0.2.1").text == "'192.0.2.1' is 192.0.2.1, not this machine"
    monkeypatch.setenv(INTERFACE, "lo")
    assert check_host_name().state == "ok"
    monkeypatch.setenv(INTERFACE, "nope0")
    assert check_host_name().text == "GLOO_SOCKET_IFNAME='nope0' names no interface of this machine"


@pytest.mark.runs
@OWN_RUN
@pytest.mark.parametrize(
    ("program", "text", "limit_s"),
    [
        ("raise ImportError('broken')", "it ended with status 1: ImportError: broken", 60.0),
        pytest.param(
            "import time; print('hangs', flush=True); time.sleep(600)",
            "it had not ended after 5 s",
            5.0,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_library_that_fails_or_hangs_is_an_error_of_its_check(tmp_path, monkeypatch, program, text, limit_s):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "torch.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"), prepend=":")
    finding = devices_program(tmp_path, limit_s).finding()
    assert (finding.name, finding.state) == ("devices", "error")
    assert finding.text.startswith(text)  # what a process that hangs has printed depends on its speed


def program(tmp_path, name, text, limit_s=60.0):
    return CheckProgram(name, ["-c", text], tmp_path, "mend it", "done", limit_s)


@pytest.mark.runs
@OWN_RUN
def test_a_program_that_fails_hangs_or_is_stopped_leaves_no_process(tmp_path):
    assert program(tmp_path, "ends", "pass").finding().state == "ok"
    failed = program(tmp_path, "fails", "raise SystemExit('no network')").finding()
    assert (failed.state, failed.text, failed.fix) == ("error", "it ended with status 1: no network", "mend it")
    hangs = program(tmp_path, "hangs", "import time; time.sleep(600)", limit_s=1.0)
    assert hangs.finding().text.startswith("it had not ended after 1 s")
    child = "import subprocess, time; child = subprocess.Popen(['sleep', '613'])"
    started = program(tmp_path, "starts one", f"{child}; print(child.pid, flush=True); time.sleep(600)")
    deadline = time.monotonic() + 60
    output = tmp_path / "starts_one" / "output.txt"
    while not output.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process = psutil.Process(int(output.read_text()))
    started.stop()
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.exhaustive
@OWN_RUN
def test_two_processes_add_a_tensor(tmp_path):
    assert all_reduce_program(tmp_path).finding().state == "ok"


@pytest.mark.ray
@pytest.mark.exhaustive
@OWN_RUN
def test_all_checks_end_and_leave_nothing(tmp_path):
    findings = {finding.name: finding for finding in run_checks(tmp_path)}
    assert [finding for finding in findings.values() if finding.state == "error"] == []
    assert {"all-reduce", "a step", "a step on Ray"} <= findings.keys()
    assert list(tmp_path.iterdir()) == []
