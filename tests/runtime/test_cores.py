"""The use of cores, by this process and by others, from numbers of the kernel."""

import importlib
import os
from types import SimpleNamespace

import pytest

import hybridflow
from hybridflow.runtime import cores
from hybridflow.runtime.cores import CoreUse


@pytest.fixture
def use_after(tmp_path, monkeypatch):
    """Return `use_after(ticks, own)`, the use of two cores after 10 s of 100 ticks of work each second."""

    def after(ticks, own):
        seconds = iter((0.0, 10.0))
        own_seconds = iter((5.0, 5.0 + own))
        monkeypatch.setattr(cores, "STAT", tmp_path / "stat")
        monkeypatch.setattr(cores, "_own_seconds", lambda: next(own_seconds))
        monkeypatch.setattr(cores, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
        monkeypatch.setattr(cores, "os", SimpleNamespace(sched_getaffinity=lambda _: {0, 2}, sysconf=lambda _: 100))
        # user nice system idle iowait irq softirq steal: idle and stolen time is not work
        begin = "cpu 9 9\ncpu0 7 1 1 50 5 1 0 9\ncpu1 9 9 9 9 9 9 9 9\ncpu2 0 0 0 0 0 0 0 0\nintr 5\n"
        (tmp_path / "stat").write_text(begin)
        use = CoreUse()
        more = f"cpu0 {7 + ticks} 1 1 90 9 1 0 99\ncpu1 99 99 99 9 9 9 9 9\ncpu2 0 0 0 0 0 0 0 0\n"
        (tmp_path / "stat").write_text(more)
        return use.read()

    return after


@pytest.mark.parametrize(
    ("ticks", "own", "is_full", "text"),
    [
        (2000, 11.0, True, "other programs use 0.9 of 2 cores"),
        (2000, 20.0, True, ""),
        (1000, 2.0, False, "other programs use 0.8 of 2 cores"),
        (100, 2.0, False, ""),  # clocks are read one after another
    ],
)
def test_other_programs_use_what_this_one_does_not(use_after, ticks, own, is_full, text):
    use = use_after(ticks, own)
    assert (use.is_full, use.text) == (is_full, text)


def test_without_numbers_of_the_kernel_no_other_program_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "STAT", tmp_path / "none")
    assert CoreUse().read().text == ""


def test_own_work_counts_also_of_processes_that_have_ended():
    before = cores._own_seconds()
    sum(range(3_000_000))
    assert cores._own_seconds() > before


def test_threads_wait_without_a_core_unless_the_user_says_otherwise(monkeypatch):
    for value, kept in ((None, "passive"), ("active", "active")):
        monkeypatch.delenv("OMP_WAIT_POLICY") if value is None else monkeypatch.setenv("OMP_WAIT_POLICY", value)
        importlib.reload(hybridflow)
        assert os.environ["OMP_WAIT_POLICY"] == kept
