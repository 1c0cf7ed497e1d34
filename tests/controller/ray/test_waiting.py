"""Decisions of a wait, on made-up calls: who waits for whom, what is overdue or silent, and what is reported."""

import errno
import logging
import re
import socket
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import ObjectLostError, OutOfDiskError, OutOfMemoryError, RpcError

from hybridflow.controller.class_with_init_args import ProcessThreads
from hybridflow.controller.ray.liveness import cluster_watch, heartbeat, silence
from hybridflow.controller.ray.liveness.cluster_watch import ClusterWatch
from hybridflow.controller.ray.liveness.hang_report import HangReports, chain_of, describe_chain, running_call
from hybridflow.controller.ray.liveness.heartbeat import Heartbeats
from hybridflow.controller.ray.liveness.silence import Silence
from hybridflow.controller.ray.processes import RayCall, RayProcess, RayWorker
from hybridflow.controller.ray.waiting import Waiting
from hybridflow.errors import LostClusterError, LostWorkerError, WorkerError, WorkerMemoryError, WorkerTimeoutError
from hybridflow.runtime.observe import Trace


def a_process(label="actor/0", **attributes):
    role, _, rank = label.rpartition("/")
    actor = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: label))
    process = RayProcess(actor, label, int(rank), {role}, launch=None)  # pyright: ignore[reportArgumentType]
    vars(process).update(attributes)
    return process


def a_call(process, name, timeout_s=None, seconds=0.0, **options):
    role, _, rank = process.label.rpartition("/")
    call = RayCall(
        name, RayWorker(process.label, role, int(rank), "Model", process), f"Model.{name}", timeout_s, **options
    )
    call.running_since = time.monotonic() - seconds if seconds else None
    process.unfinished.append(call)
    return call


# Chains


def test_a_chain_leads_from_the_awaited_call_to_the_running_one():
    actor, critic = a_process("actor/0"), a_process("critic/1")
    load, generate = a_call(actor, "load"), a_call(actor, "generate")
    score = a_call(critic, "score", after=[generate])
    assert [(why, call.where) for why, call in chain_of(score)] == [
        ("waits for", "Model.score"),
        ("which reads the result of", "Model.generate"),
        ("which runs after", "Model.load"),
    ]
    assert describe_chain(score) == (
        "The controller waits for Model.score on critic/1, which reads the result of Model.generate on actor/0, which "
        "runs after Model.load on actor/0, which runs."
    )
    load.is_finished = True
    load.forget_unfinished()
    assert running_call(score) is generate
    generate.is_finished = True
    assert running_call(score) is score


def test_calls_run_beside_each_other_as_their_process_allows():
    judge = a_process("judge/0", threads=ProcessThreads(concurrent_calls=2))
    first, second, third = (a_call(judge, name) for name in "abc")
    beside, later = (a_call(judge, name, in_second_thread=True) for name in "de")
    assert [call.predecessor() for call in (first, second, third, beside, later)] == [None, None, first, None, beside]


# Heartbeats


@pytest.fixture
def storage(monkeypatch):
    """Stand for the key-value storage and the clock: `records` by label, `now` in seconds."""
    state = SimpleNamespace(records={}, now=100.0, reads=0)

    def read(keys, namespace, timeout_s):
        state.reads += 1
        if state.records is None:
            raise RpcError("away")
        return {key: state.records[key] for key in keys if key in state.records}

    monkeypatch.setattr(heartbeat, "_storage", lambda: SimpleNamespace(internal_kv_multi_get=read))
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: state.now))
    return state


def test_only_seconds_in_which_the_driver_looked_count(storage):
    process, heartbeats, seen = a_process(), Heartbeats(), []
    key, forever = b"heartbeats/actor/0", float("inf")
    away = object()
    for wait_s, record in [(0, None), (5, b"7 3"), (1, b"7 3"), (60, b"7 3"), (2, b"8 3"), (1.5, away), (1, b"8 4")]:
        storage.now += wait_s
        storage.records = None if record is away else {key: record} if record else {}
        heartbeats.look([process])
        seen.append((heartbeats.silent_s(process), heartbeats.idle_s(process)))
    assert seen == [(0, forever), (0, 0), (1, 1), (3, 3), (0, 5), (0, 5), (1, 0)]  # a gap counts for at most 2 s


def test_a_record_is_read_at_most_once_a_second_unless_asked_again(storage):
    process, heartbeats = a_process(), Heartbeats()
    for wait_s, again, reads in [(0, False, 1), (0.5, False, 1), (0.4, True, 2), (0.9, False, 2), (0.2, False, 3)]:
        storage.now += wait_s
        heartbeats.look([process], again=again)
        assert storage.reads == reads


class Beats:
    """Heartbeats that are set by a test; `after_look`: the silence that another look finds."""

    def __init__(self, silent_s=0.0, idle_s=float("inf"), after_look=None):
        self.silent, self.idle, self.after_look = silent_s, idle_s, after_look

    def look(self, processes, *, again=False):
        if again and self.after_look is not None:
            self.silent = self.after_look

    def silent_s(self, process):
        return self.silent

    def idle_s(self, process):
        return self.idle


@pytest.mark.parametrize(
    ("state", "says", "lost_after_s"),
    [
        ("stopped", "is stopped by a signal (T)", 3),
        ("zombie", "has exited (Z)", 3),
        ("unknown", "is unreachable", 3),
        ("running", "is starved, or holds its interpreter lock in C code", 30),
        ("blocked", "sleeps, and cannot run its threads", 30),
    ],
)
def test_a_silent_process_is_lost_by_what_is_seen_of_it(monkeypatch, caplog, state, says, lost_after_s):
    looks = []
    monkeypatch.setattr(silence, "examine", lambda home: looks.append(home) or (state, "the report"))
    home = SimpleNamespace(node_address="10.0.0.1", address=SimpleNamespace(pid=7))
    call, beats = a_call(a_process(home=home), "update"), Beats()
    judge, found = Silence(beats, 3.0), {}
    for beats.silent in (2.9, 3.0, 4.0, 6.5, 29.0, 33.0):
        if lost := judge.find([call]):
            found[beats.silent] = lost
    first = min(found)
    assert first == (3.0 if lost_after_s == 3 else 33.0)
    assert len(looks) == (4 if lost_after_s == 30 else len(looks))  # at 3, 6.5, 29 and 33 s
    process, error = found[first]
    assert process is call.worker.process
    assert str(error).startswith(f"worker actor/0 on node 10.0.0.1, pid 7 {says}: it has not sent a heartbeat for ")
    assert f"while Model.update runs on it (limit: {lost_after_s} s, controller.heartbeat_timeout_s=3)" in str(error)
    assert str(error).endswith("the report")
    assert (error.role, error.rank, error.node) == ("actor", 0, "10.0.0.1")
    assert len(caplog.records) == (3 if lost_after_s == 30 else 0)


def test_a_process_that_goes_on_is_not_lost():
    call = a_call(a_process(), "update")
    assert Silence(Beats(50.0, after_look=0.0), 3.0).find([call]) is None
    assert Silence(Beats(50.0), None).find([call]) is None
    lost = Silence(Beats(50.0), 3.0).find([call])
    assert lost
    assert "its process has not started" in str(lost[1])


# Deadlines


def a_wait(beats, **options):
    """Return a `Waiting` with these heartbeats, and the labels of the processes that it stops."""
    stopped = []
    wait = Waiting([], lambda processes: stopped.extend(p.label for p in processes), Trace(), lambda: None, **options)
    wait._heartbeats = beats
    wait._silence = Silence(beats, options.get("heartbeat_timeout_s"))
    return wait, stopped


def a_group(role, num_ranks=2):
    processes = [a_process(f"{role}/{rank}") for rank in range(num_ranks)]
    for process in processes:
        process.peers = processes
    return processes


def check(wait, *pending):
    wait._check_progress(list(pending), time.monotonic() - 10.0, HangReports(None))


def test_a_call_over_its_deadline_stops_the_ranks_that_are_late():
    wait, stopped = a_wait(Beats())
    actor, critic = a_group("actor"), a_group("critic")
    late = [a_call(actor[0], "generate", 5.0, seconds=6.0), a_call(actor[1], "generate", 5.0, seconds=3.0)]
    reader = a_call(critic[0], "score", 5.0, after=late)
    with pytest.raises(WorkerTimeoutError) as caught:
        check(wait, reader, *late)
    text = str(caught.value)
    assert re.match(r"Model\.generate on actor, rank (0, 1|1, 0), has been running for ", text)
    assert "longer than its deadline of 5 s (controller.call_timeout_s)." in text
    assert "The controller waits for Model.score on critic/0, which waits for this call." in text
    assert "actor/1:\n  its process has not started" in text
    assert "The controller itself waits here:" in text
    assert set(stopped) == {"actor/0", "actor/1"}
    assert actor[0].exit_error is caught.value
    assert critic[0].exit_error is None


@pytest.mark.parametrize(
    ("timeout_s", "seconds", "idle_s", "is_late"),
    [
        (5.0, 4.9, 100.0, False),
        (5.0, 5.1, 100.0, True),
        (5.0, 60.0, 4.0, False),
        (5.0, 60.0, 6.0, True),
        (None, 1e6, 1e6, False),
    ],
)
def test_progress_and_missing_deadlines_keep_a_call_alive(timeout_s, seconds, idle_s, is_late):
    wait, stopped = a_wait(Beats(idle_s=idle_s))
    call = a_call(a_process(), "update", timeout_s, seconds=seconds)
    if is_late:
        with pytest.raises(WorkerTimeoutError, match=r"of them without progress, longer than its deadline of 5 s"):
            check(wait, call)
    else:
        check(wait, call)
    assert bool(stopped) == is_late


def test_a_deadline_counts_from_when_a_call_is_known_to_run():
    wait, _ = a_wait(Beats())
    call = a_call(a_process(), "update", 5.0)
    assert (call.running_s, call.running_since) == (0.0, None)
    check(wait, call)
    assert call.running_since is not None


# Errors of Ray


def test_errors_of_ray_name_the_call_the_worker_and_the_cause():
    wait, stopped = a_wait(Beats())
    actor = a_group("actor")
    call = a_call(actor[0], "update", sources=(("Model.generate", 1), ("controller", 1)))
    killed = OutOfMemoryError("Task was killed due to the node running low on memory.\nObject store memory usage: 1")
    memory = wait.failure(call, killed, killed)
    assert type(memory) is WorkerMemoryError
    text = "worker actor/0 died before Model.update finished: Task was killed due to the node running low on memory."
    assert str(memory) == text
    assert stopped == ["actor/0", "actor/1"]
    assert wait.failure(a_call(actor[1], "update"), killed, killed) is memory  # its peer died, not it
    full = wait.failure(call, OutOfDiskError("full"), OutOfDiskError("full"))
    assert "a result of Model.generate fits neither into the shared memory of its node nor on its disk (OutOf" in str(
        full
    )
    assert isinstance(full.__cause__, OutOfDiskError)
    lost = ObjectLostError("ab", None, "trace")
    assert type(wait.failure(call, lost, lost)) is LostWorkerError
    other = wait.failure(call, ValueError("odd"), ValueError("odd"))
    assert (type(other), str(other)) == (WorkerError, "Model.update failed on worker actor/0: odd")


def test_the_death_of_a_process_that_was_shut_down_names_the_shutdown():
    wait, stopped = a_wait(Beats())
    call = a_call(a_process(is_stopped=True), "update")
    killed = OutOfMemoryError("killed")
    assert "worker actor/0 was shut down before the result of Model.update was read" in str(
        wait.failure(call, killed, killed)
    )
    assert stopped == []


# Reports of hangs


def test_report_is_repeated_after_progress_or_ten_times_as_long(caplog):
    process = a_process()
    _, save = a_call(process, "update"), a_call(process, "save")
    reports, counts = HangReports(60.0), []
    for quiet_s in (1.0, 59.0, 61.0, 62.0, 599.0, 601.0, 0.5, 61.0, 62.0):
        reports.check([save], lambda call, quiet_s=quiet_s: quiet_s)
        counts.append(len(caplog.records))
    assert counts == [0, 0, 1, 1, 1, 2, 2, 3, 3]
    text = caplog.records[0].getMessage()
    assert text.startswith("No progress for 61 s in Model.update on actor/0.\nThe controller waits for Model.save on ")
    assert "on actor/0, which runs after Model.update on actor/0, which runs.\nactor/0:\n" in text
    HangReports(None).check([save], lambda call: 1e9)
    assert len(caplog.records) == 3


def test_a_report_shows_four_workers_and_counts_the_others(caplog):
    calls = [a_call(process, "update") for process in a_group("actor", 6)]
    HangReports(60.0).check(calls, lambda call: 61.0 + call.worker.rank)
    text = caplog.records[0].getMessage()
    assert text.startswith("No progress for 66 s in Model.update on actor/5.")
    assert "... and 2 more calls." in text
    assert "... and 2 more workers without a report." in text
    assert text.count("its process has not started") == 4


def test_a_report_that_cannot_be_made_does_not_fail_the_wait(caplog):
    HangReports(60.0).check([a_call(a_process(home="not a home"), "update")], lambda call: 61.0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("no report of a wait without progress could be made: AttributeError")


# The watch of the cluster's services


@pytest.fixture
def watched(monkeypatch):
    """Return a function that runs the watch on answers, one for each second, and returns (error, seconds, text)."""
    node = SimpleNamespace(gcs_address="10.0.0.1:6379", raylet_socket_name="/raylet", all_processes={})
    clock, ended = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(cluster_watch.ray._private.worker, "_global_node", node)
    monkeypatch.setattr(cluster_watch.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(cluster_watch, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(cluster_watch, "_end_process", lambda text: ended.append((clock.now, text)))

    def watch(answers, *, is_local, stops=False):
        watching, lost_at = ClusterWatch(is_local=is_local), []
        monkeypatch.setattr(cluster_watch, "_accepts", lambda address: address == "/raylet" or answers(clock.now))
        monkeypatch.setattr(cluster_watch, "_is_stopped", lambda pid: stops)

        def tick(seconds):
            clock.now += seconds
            if watching.is_lost and not lost_at:
                lost_at.append(clock.now - 1)
            return clock.now > 200 or ended

        watching._stopped = SimpleNamespace(wait=tick)
        clock.now = 0.0
        watching._watch()
        return watching, lost_at, ended

    return watch


@pytest.mark.parametrize(
    ("is_local", "stops", "lost_at", "says"),
    [(True, False, 6, "has died"), (False, False, 31, "has died"), (True, True, 61, "is stopped")],
)
def test_a_service_that_is_gone_for_long_is_a_lost_cluster(watched, is_local, stops, lost_at, says):
    watching, seen, ended = watched(lambda now: False, is_local=is_local, stops=stops)
    assert seen == [lost_at]
    text = rf"the control service of the Ray cluster \(GCS, 10.0.0.1:6379\) {says}: .* for {lost_at} s"
    with pytest.raises(LostClusterError, match=text):
        watching.require_cluster()
    assert ended[0][0] == (91 if stops else 51)  # no call has asked, so Ray's own code is what the process waits in


def test_a_service_that_answers_now_and_then_is_not_lost(watched):
    watching, seen, ended = watched(lambda now: now % 5 == 0, is_local=True)
    assert (seen, ended) == ([], [])
    watching.require_cluster()


def test_a_service_accepts_while_it_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert cluster_watch._accepts(address)
    assert not cluster_watch._accepts(address)
    assert not cluster_watch._is_stopped(None)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EPERM])
def test_a_process_without_a_free_file_judges_no_service(monkeypatch, number):
    def refuse(_what):
        raise OSError(number, "refused")

    monkeypatch.setattr(cluster_watch.socket, "socket", refuse)
    monkeypatch.setattr(cluster_watch.psutil, "Process", refuse)
    if number == errno.EPERM:
        for asks in (lambda: cluster_watch._accepts("/socket"), lambda: cluster_watch._is_stopped(1)):
            with pytest.raises(OSError, match="refused"):
                asks()
    else:
        assert cluster_watch._accepts(("127.0.0.1", 9))
        assert not cluster_watch._is_stopped(1)
