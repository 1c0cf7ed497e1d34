import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.errors import WorkerError
from hybridflow.runtime import pulse as pulse_module
from hybridflow.runtime.pulse import Pulse, PulseRecord, decode_record


@pytest.fixture(autouse=True)
def _restored_signal() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    pulse = Pulse(interval_s=0.05)
    pulse.start()
    yield pulse
    pulse.stop()


def read(pulse: Pulse) -> PulseRecord:
    fd = pulse.address.record_fd
    assert fd is not None
    record = decode_record(os.pread(fd, 4096, 0))
    assert record is not None
    return record


def test_the_address_survives_pickling_and_names_this_process(pulse):
    address = pickle.loads(pickle.dumps(pulse.address))
    assert address == pulse.address
    assert address.pid == os.getpid()
    assert str(address.start_ticks) == Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    assert os.readlink(f"/proc/self/fd/{address.stack_fd}") == "/memfd:hybridflow-stacks (deleted)"


def test_the_heartbeat_goes_on(pulse):
    first, deadline = read(pulse), time.monotonic() + 10
    while read(pulse).heartbeat_at == first.heartbeat_at:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert read(pulse).interval_s == 0.05


def test_calls_nest_and_the_last_one_is_remembered(pulse):
    assert read(pulse).what == ""
    pulse.begin("update_actor")
    assert (read(pulse).what, read(pulse).is_present) == ("update_actor", True)
    with pytest.raises(ValueError, match="all_reduce"), pulse.during("all_reduce"):
        raise ValueError(read(pulse).what)
    assert (read(pulse).what, read(pulse).is_present) == ("update_actor", True)
    pulse.end()
    assert (read(pulse).what, read(pulse).is_present) == ("update_actor", False)
    assert 0 <= time.monotonic() - read(pulse).since < 10


def test_an_end_without_a_begin_does_nothing(pulse):
    pulse.end()
    assert (read(pulse).what, read(pulse).is_present) == ("", False)


def test_of_a_long_name_the_first_400_bytes_are_kept_and_no_character_is_split(pulse):
    pulse.begin("x" + "é" * 300)
    assert read(pulse).what == "x" + "é" * 199


def test_calls_before_the_start_are_seen_after_it():
    pulse = Pulse()
    pulse.begin("early")
    pulse.start()
    assert read(pulse).what == "early"
    pulse.stop()


def test_a_half_written_slot_leaves_the_one_before_it(pulse):
    pulse.begin("first")
    pulse.begin("second")
    data = bytearray(os.pread(pulse.address.record_fd, 4096, 0))
    at = data.index(b"second")
    data[at : at + 3] = b"sec"[::-1]
    torn = decode_record(bytes(data))
    assert torn is not None
    assert torn.what == "first"
    assert decode_record(bytes(4096)) is None
    assert decode_record(b"") is None


WRITER = """
import itertools, pickle
from hybridflow.runtime.pulse import Pulse
pulse = Pulse(interval_s=0.001)
pulse.start()
print(pickle.dumps(pulse.address).hex(), flush=True)
for number in itertools.count():
    pulse.begin(f"{number} " * 40)
    pulse.end()
"""


def test_a_reader_never_sees_a_torn_record_of_a_busy_writer():
    with subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            address = pickle.loads(bytes.fromhex(writer.stdout.readline()))
            with open(f"/proc/{writer.pid}/fd/{address.record_fd}", "rb", buffering=0) as file:
                records, end = [], time.monotonic() + 0.4
                while time.monotonic() < end:
                    records += [decode_record(os.pread(file.fileno(), 4096, 0)) for _ in range(100)]
        finally:
            writer.kill()
    whole = [record for record in records if record is not None]
    assert len(whole) > len(records) / 2
    assert len({record.what for record in whole}) > 10
    assert all(len(set(record.what.split()[:-1])) <= 1 for record in whole)  # the 400 bytes may cut the last number


def test_after_the_stop_nothing_is_left_and_the_signal_is_ignored():
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    pulse = Pulse()
    pulse.start()
    pulse.stop()
    pulse.stop()
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == threads
    assert not faulthandler.unregister(signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(WorkerError, match=r"call start\(\) first"):
        _ = pulse.address
    pulse.start()
    pulse.stop()


def test_a_process_has_one_pulse(pulse):
    with pytest.raises(WorkerError, match=r"already has a Pulse; call its stop\(\)"):
        Pulse().start()
    assert read(pulse).is_present is False


def test_log_files_are_the_given_one_and_stdout_and_stderr_where_they_are_files(tmp_path):
    program = """if True:
        from hybridflow.runtime.pulse import Pulse
        pulse = Pulse()
        pulse.start("more.log")
        print(pulse.address.log_paths, flush=True)
        """
    log = tmp_path / "out.log"
    with open(log, "w") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, stderr=out, cwd=tmp_path, check=True)
    assert log.read_text() == f"{(str(tmp_path / 'more.log'), str(log))}\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == f"{(str(tmp_path / 'more.log'),)}\n"


def test_a_handler_that_was_there_first_keeps_the_signal():
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    pulse = Pulse()
    pulse.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [1]
    assert not read(pulse).owns_signal
    pulse.stop()


def test_a_handler_that_comes_later_is_noted(pulse):
    assert read(pulse).owns_signal
    signal.signal(signal.SIGUSR1, lambda *_: None)
    deadline = time.monotonic() + 10
    while read(pulse).owns_signal:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_off_the_main_thread_it_starts_too():
    pulse = Pulse()
    thread = threading.Thread(target=pulse.start)
    thread.start()
    thread.join()
    assert read(pulse).owns_signal
    pulse.stop()


def test_stacks_of_strangers_signals_stay_bounded(pulse, monkeypatch):
    monkeypatch.setattr(pulse_module, "_MAX_STACK_BYTES", 10)
    os.kill(os.getpid(), signal.SIGUSR1)
    deadline = time.monotonic() + 10
    while os.fstat(pulse.address.stack_fd).st_size:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_memory_files_everything_goes_on_and_the_address_says_so(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    pulse, threads = Pulse(), threading.active_count()
    pulse.start()
    with pulse.during("update_actor"):
        address = pulse.address
    assert (address.stack_fd, address.record_fd, address.request_fd) == (None, None, None)
    assert "no /proc or no memory files" in address.nothing_because
    assert threading.active_count() == threads
    pulse.stop()
