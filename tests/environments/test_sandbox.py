"""Sandboxes: what commands do in them, and what hostile ones do not do to this machine.

No container runs here: a stand-in for the Docker command line records its arguments and runs commands in a directory.
"""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from hybridflow.environments import sandbox as module
from hybridflow.environments.sandbox import (
    LATE,
    MAX_OUTPUT_BYTES,
    MAX_PROCESSES,
    LocalSandbox,
    SandboxError,
    sandbox_of,
)
from hybridflow.errors import EnvironmentConfigError

STAND_IN = """#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$here/log"
case "$1" in
build)
    [ -f "$3/Dockerfile" ] || { echo "ERROR: no Dockerfile" >&2; exit 1; }
    echo sha256:built ;;
run)
    case "$*" in *missing*) echo "Unable to find image 'missing' locally" >&2; exit 125 ;; esac
    mkdir "$here/root"
    echo $$ > "$here/holder"
    while [ "$1" != "--entrypoint" ]; do shift; done
    shift 3
    exec sh "$@" ;;
exec)
    shift 3
    cd "$here/root" && exec "$@" ;;
rm)
    rm -r "$here/root" ;;
esac
"""


def in_processes(test):
    """Mark a test that starts processes."""
    return pytest.mark.runs(pytest.mark.own_run("grpo: its rewards run no commands of a model")(test))


def use(sandbox, *steps):
    """Return what each step, a function of the sandbox, returns."""

    async def run():
        try:
            return [await step(sandbox) for step in steps]
        finally:
            await sandbox.close()

    return asyncio.run(run())


def command(text, seconds=30.0, **options):
    return lambda sandbox: sandbox.exec(text, timeout_s=seconds, **options)


def wait_for_the_end_of(program):
    while subprocess.run(["pgrep", "-x", "-f", program], capture_output=True).stdout:
        pass


@pytest.fixture
def local():
    """Return a local sandbox, if namespaces of users are permitted here."""
    try:
        use(LocalSandbox(), command("true"))
    except SandboxError as error:
        pytest.skip(str(error))
    return LocalSandbox("/app")


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Return the directory of a stand-in for `docker`, which is found first."""
    (tmp_path / "docker").write_text(STAND_IN)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@in_processes
def test_a_local_sandbox_runs_commands_and_keeps_files(local, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "of the rank")

    async def copied(sandbox):
        await sandbox.put("/app/new/file", bytes(range(256)) * 4096)
        return await sandbox.get("/app/new/file")

    first, echoed, argv, wrote, content, left = use(
        local,
        command("pwd; id -u; env"),
        command("cat; exit 3", stdin="ä"),
        command(["echo", "$HOME; x"]),
        command("echo kept > kept; (sleep 98764; echo never) & echo on"),
        copied,
        command("cat kept; ls new; cat /proc/[0-9]*/cmdline | tr '\\0' ' '"),
    )
    assert first.stdout.startswith("/app\n0\n")
    assert "SECRET" not in first.stdout
    assert (echoed.exit_code, echoed.stdout) == (3, "ä")
    assert argv.stdout == "$HOME; x\n"
    assert wrote.stdout == "on\n"  # without waiting for the process in the background, which goes on
    assert content == bytes(range(256)) * 4096
    assert left.stdout.startswith("kept\nfile\n")
    assert "sleep 98764" in left.stdout
    wait_for_the_end_of("sleep 98764")
    with pytest.raises(SandboxError, match="the sandbox is closed"):
        asyncio.run(command("true")(local))


@in_processes
def test_a_local_sandbox_bounds_hostile_commands(local, monkeypatch):
    monkeypatch.setattr(module, "_SETUP", module._SETUP.replace(f"size={module.LOCAL_BYTES}", "size=16m"))
    many = f"for i in $(seq {MAX_PROCESSES + 50}); do setsid sleep 1000 & done"
    late, flood, _, on, files, forks, copied = use(
        local,
        command("echo begun; sleep 1000", 0.5),
        command("yes; echo never", 0.5),
        command("kill -9 1; kill -9 -1"),
        command("echo still here"),
        command("head -c 64M /dev/zero > big; rm big"),
        command(many),
        lambda sandbox: sandbox.put("/tests/test.sh", b"x"),
    )
    assert (late.exit_code, late.stdout, late.stderr) == (LATE, "begun\n", "\n[killed after 0.5 s]\n")
    assert flood.exit_code == LATE
    assert "bytes are left out" in flood.stdout
    assert len(flood.stdout) < MAX_OUTPUT_BYTES + 100
    assert on.stdout == "still here\n"
    assert "No space left on device" in files.stderr
    assert "fork" in forks.stderr
    assert copied is None  # also when the processes of commands are as many as they may be


@in_processes
def test_a_local_sandbox_shows_and_changes_nothing_of_the_host(local, tmp_path):
    (tmp_path / "secret").write_text("of the host")
    reach = f"cat {tmp_path}/secret /etc/shadow /proc/1/environ; ls /home; mount -o remount,bind,rw /usr && echo yes"
    escape = "unshare --user --map-root-user --mount sh -c 'mount -o remount,bind,rw /usr && echo yes'"
    kernel = "echo x > /proc/sys/kernel/domainname; mknod disk b 254 0"
    network = "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 5)'"
    links = f"ln -s {tmp_path}/secret out; ln -s /dev/zero endless; mkfifo pipe"
    *tried, _ = use(local, *(command(f"{text}; false") for text in (reach, escape, kernel, network)), command(links))
    assert [each.stdout for each in tried] == [""] * 4
    for path, problem in (("out", "No such file"), ("endless", "more than 67,108,864 bytes"), ("/usr", "directory")):
        with pytest.raises(SandboxError, match=problem):
            use(LocalSandbox("/app"), command(links), lambda sandbox, path=path: sandbox.get(path))
    with pytest.raises(SandboxError, match=r"cannot be written in the sandbox: .*out"):
        use(LocalSandbox("/app"), command(links), lambda sandbox: sandbox.put("out", b"overwritten"))
    assert (tmp_path / "secret").read_text() == "of the host"


@in_processes
def test_a_local_sandbox_ends_with_the_process_that_uses_it(local):
    program = (
        "import asyncio, os, signal\n"
        "from hybridflow.environments.sandbox import LocalSandbox\n"
        "async def main():\n"
        "    sandbox = LocalSandbox()\n"
        "    await sandbox.exec('setsid sleep 98765 &', timeout_s=30)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (-9, "")
    wait_for_the_end_of("sleep 98765")


@in_processes
def test_a_cancelled_command_is_killed(local):
    async def run():
        try:
            task = asyncio.create_task(local.exec("touch begun; sleep 1000", timeout_s=60))
            while (await local.exec(["test", "-e", "begun"], timeout_s=60)).exit_code:
                pass
            task.cancel()
            await asyncio.wait({task})
            return await local.exec("cat /proc/[0-9]*/cmdline", timeout_s=60)
        finally:
            await local.close()

    assert "sleep" not in asyncio.run(run()).stdout.replace("/proc/[0-9]*/cmdline", "")


@in_processes
def test_a_container_is_used_by_its_command_line(docker, tmp_path):
    make = sandbox_of("docker")
    sandbox = make(image="python:3.12", workdir="/app", options=["--memory", "1g"])

    async def copied(sandbox):
        await sandbox.put("a/b", b"\0x")
        return await sandbox.get("a/b")

    listed, content, late = use(sandbox, command("cat; exit 2", stdin="in"), copied, command("echo a; sleep 1000", 0.5))
    assert (listed.exit_code, listed.stdout, content) == (2, "in", b"\0x")
    assert (late.exit_code, late.stdout) == (LATE, "a\n")
    calls, name = (tmp_path / "log").read_text().splitlines(), sandbox._name
    assert calls[0] == (
        f"run --interactive --rm --name {name} --memory 1g --pids-limit {MAX_PROCESSES} --network none --workdir /app "
        "--entrypoint sh python:3.12 -c echo ready; exec cat"
    )
    assert calls[1] == f"exec --interactive {name} timeout -s KILL 30 sh -c cat; exit 2"
    assert calls[-1] == f"rm --force {name}"
    assert not (tmp_path / "root").exists()


@in_processes
@pytest.mark.parametrize(("program", "code"), [("exec timeout -s KILL 0.1 sleep 1000", LATE), ("exit 2", 2)])
def test_a_program_whose_end_is_seen_late_is_late_if_it_was_killed(program, code):
    async def run():
        started = await module.Program.start(["sh", "-c", program], {})
        with suppress(ChildProcessError):  # a thread of asyncio has waited for it
            os.waitid(os.P_PID, started.transport.get_pid(), os.WEXITED | os.WNOWAIT)
        time.sleep(0.1)
        await started.wait(0.1)
        return started.exit_code

    assert asyncio.run(run()) == code


@in_processes
def test_a_container_that_cannot_run_or_has_ended_is_an_error(docker, tmp_path, monkeypatch):
    def killed(sandbox):
        os.kill(int((tmp_path / "holder").read_text()), 9)
        return command("echo lost; false")(sandbox)

    (tmp_path / "context").mkdir()
    make = sandbox_of("docker")
    for sandbox, problem in (
        (
            make(image="missing"),
            "cannot be started: Unable to find image 'missing' locally; see whether the same image",
        ),
        (make(context=tmp_path / "context"), r"docker cannot build the image of '.*context': ERROR: no Dockerfile"),
        (sandbox_of("podman")(image="x"), r"'podman' cannot be run: No such file or directory"),
    ):
        with pytest.raises(SandboxError, match=problem):
            use(sandbox, command("true"))
    with pytest.raises(SandboxError, match="the sandbox has ended"):
        use(make(image="x"), command("true"), killed, command("true"))
    (tmp_path / "context/Dockerfile").touch()
    use(make(context=tmp_path / "context", network=True), command("true"))
    assert " --pids-limit 256 --entrypoint sh sha256:built " in (tmp_path / "log").read_text()


@in_processes
def test_a_local_sandbox_without_namespaces_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(module, "_SETUP", "echo unshare failed: Operation not permitted >&2; exit 1")
    with pytest.raises(
        SandboxError, match=r"Operation not permitted; a local one needs Linux, util-linux and namespaces"
    ):
        use(LocalSandbox(), command("true"))


def test_a_sandbox_has_a_name_that_is_known_or_a_path(tmp_path):
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    assert sandbox_of("local") is LocalSandbox
    assert sandbox_of(f"{tmp_path}/mine.py:Mine").__name__ == "Mine"
    with pytest.raises(EnvironmentConfigError, match="sandbox='dcoker' is not known; use local, docker, podman or"):
        sandbox_of("dcoker")
    with pytest.raises(EnvironmentConfigError, match="sandbox='docker' needs an image"):
        sandbox_of("docker")()
