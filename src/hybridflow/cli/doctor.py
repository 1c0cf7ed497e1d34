"""Check this machine before a run: devices, versions, memory, file system, network, an all-reduce, a step.

Each line is ok, a warning (some runs do not work, or slowly) or an error (no run works, or none of some kind), with the
fix below it. A program that hangs counts as an error after two minutes.
"""

import argparse
import fcntl
import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import metadata, requires
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hybridflow.cli.check_program import LIMIT_S, CheckProgram, CheckResult
from hybridflow.cli.compatibility import TESTED, installed
from hybridflow.cli.exit_codes import ExitCode
from hybridflow.errors import ConfigError
from hybridflow.runtime.cores import CoreUse
from hybridflow.runtime.device import cpu_has_bfloat16, require_visible_devices
from hybridflow.runtime.files import describe_bytes

NVIDIA = Path("/dev/nvidiactl")
"""There is such a file if the driver of NVIDIA's GPUs is loaded."""

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY = 2**30
"""Bytes that Ray's object store and the collectives of two processes need for small models."""

LEAST_OPEN_FILES = 4096
"""Ray opens some hundred files and sockets for each worker and node."""

RAISED_BY_RAY = 65536
"""Open files up to which Ray raises the limit of its processes, if the hard limit allows it."""

LEAST_TEMPORARY = 2**30
"""Bytes for the logs of Ray and the files of reward processes."""

LEAST_FREE = 5 * 2**30
"""Bytes for two checkpoints of a small model; `hybridflow memory` tells what a run needs."""

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that names the interface of gloo's collectives."""

CORES_S = 0.5
"""Seconds for which the use of the cores is measured."""

ALL_REDUCE = """
import os, sys
rank = int(os.fork() == 0)
import datetime, torch, torch.distributed as dist
limit = datetime.timedelta(seconds=60)  # after which a rank ends whose peer has failed
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2, timeout=limit)
value = torch.ones(1000) * (rank + 1)
dist.all_reduce(value)
if value.tolist() != [3.0] * 1000:
    raise SystemExit(f"wrong sum: {value}")
dist.destroy_process_group()  # an interpreter that ends first may abort on the threads of the group
"""

STEP = "one step of GRPO on a tiny model"
REWARD = "def score(solution_str, **_):\n    return len(set(solution_str)) / 10\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the directory of runs."""
    parser.add_argument(
        "--dir", type=Path, default=Path("runs"), help="directory in which runs are written (default: runs)"
    )


def run(args: argparse.Namespace) -> int:
    """Print each finding as it is known; the status is 1 if there is an error."""
    has_error = False
    for finding in run_checks(args.dir):
        print(f"{finding.state:<8} {finding.name:<15} {finding.text}", flush=True)
        if finding.fix:
            print(f"{'':<8} fix: {finding.fix}", flush=True)
        has_error |= finding.state == "error"
    return ExitCode.FAILED if has_error else ExitCode.DONE


def run_checks(directory: Path) -> Iterator[CheckResult]:
    """Yield each finding as soon as it is known; `directory` is where runs are written, and need not exist yet.

    Checks that import torch are programs of their own, so that a library that cannot be imported or hangs is one
    finding; they run beside the others.
    """
    yield (temporary := check_temporary_files())
    if temporary.state == "error":  # all programs write there
        return
    with tempfile.TemporaryDirectory(prefix="hybridflow-doctor-") as text:
        scratch, programs = Path(text), list[CheckProgram]()
        try:
            yield check_cores()
            programs.append(devices_program(scratch))
            programs.append(all_reduce_program(scratch))
            programs += [step_program(scratch, backend) for backend in ("local", "ray")]
            yield check_versions()
            yield check_shared_memory()
            yield check_open_files()
            yield check_run_directory(directory.absolute())
            yield check_host_name()
            yield from (program.finding() for program in programs)
        finally:
            for program in programs:
                program.stop()


def check_temporary_files(least: int = LEAST_TEMPORARY) -> CheckResult:
    """Report the free space of the temporary directory."""
    name = "temporary files"
    try:
        directory = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(2**20))
    except OSError as error:
        fix = "free space there, or set TMPDIR to a directory that can be written"
        return CheckResult(name, "error", f"nothing can be written: {error}", fix)
    free = shutil.disk_usage(directory).free
    text = f"{describe_bytes(free)} free in {directory}"
    wanted = os.environ.get("TMPDIR", directory)
    if not os.path.isdir(wanted):
        return CheckResult(name, "warning", f"{text}; TMPDIR={wanted} does not exist", "create it, or unset it")
    if free < least:
        return CheckResult(name, "warning", text, "free space there, or set TMPDIR to another disk")
    return CheckResult(name, "ok", text)


def check_cores(seconds: float = CORES_S) -> CheckResult:
    """Report how many cores other programs use."""
    use = CoreUse()
    time.sleep(seconds)
    if found := use.read().text:
        fix = "a run beside them is slower, several times at worst; end them, or set controller.threads to fewer cores"
        return CheckResult("cores", "warning", found, fix)
    return CheckResult("cores", "ok", f"{len(use.cores)} cores, which no other program uses")


def check_versions() -> CheckResult:
    """Compare the installed versions with those that hybridflow requires, then with those that it is tested with."""
    found = {entry: installed(entry.name) for entry in TESTED}
    text = ", ".join(f"{entry.name} {has or '-'}" for entry, has in found.items() if has or entry.name != "vllm")
    python = metadata("hybridflow")["Requires-Python"]
    if not SpecifierSet(python).contains(platform.python_version()):
        return CheckResult("versions", "error", f"{text}; hybridflow needs Python {python}", "use another Python")
    needs = [Requirement(need) for need in requires("hybridflow") or ()]
    wrong = {
        str(need): problem
        for need in needs
        if (need.marker is None or need.marker.evaluate({"extra": ""})) and (problem := _problem(need))
    }
    if wrong:
        fix = "install them again: pip install " + " ".join(f"'{need}'" for need in wrong)
        return CheckResult("versions", "error", f"{text}; {'; '.join(wrong.values())}", fix)
    if untested := [entry for entry, has in found.items() if has and not entry.includes(has)]:
        text += "".join(f"; {entry.name} {found[entry]} is not tested, {entry.text()} is" for entry in untested)
        fix = "if a run fails, use " + ", ".join(f"{entry.name}{entry.specifier()}" for entry in untested)
        return CheckResult("versions", "warning", text, fix)
    return CheckResult("versions", "ok", text)


def _problem(requirement: Requirement) -> str:
    """Return what is wrong with the installed package, or ""."""
    found = installed(requirement.name)
    if found is None:
        return f"{requirement.name} is missing"
    fits = requirement.specifier.contains(found, prereleases=True)
    return "" if fits else f"{requirement.name} {found} is not {requirement.specifier}"


def check_shared_memory(directory: Path = SHARED_MEMORY, least: int = LEAST_SHARED_MEMORY) -> CheckResult:
    """Report the free shared memory."""
    if not directory.is_dir():
        return CheckResult("shared memory", "warning", f"there is no {directory}", "mount a tmpfs there; Ray uses it")
    free = shutil.disk_usage(directory).free
    text = f"{describe_bytes(free)} free in {directory}"
    if free < least:
        fix = f"give it {describe_bytes(least)} or more, in Docker by --shm-size; or use controller.backend = 'local'"
        return CheckResult("shared memory", "warning", text, fix)
    return CheckResult("shared memory", "ok", text)


def check_open_files(least: int = LEAST_OPEN_FILES) -> CheckResult:
    """Report how many files a process of a run may open."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (limit, hard):
        return CheckResult("open files", "ok", "any number of files for each process")
    limit = max(limit, min(hard, RAISED_BY_RAY))
    text = f"up to {limit} files for each process"
    if limit < least:
        fix = f"raise the hard limit to {least} or more, as root: `ulimit -Hn`; many workers need more"
        return CheckResult("open files", "warning", text, fix)
    return CheckResult("open files", "ok", text)


def check_run_directory(directory: Path, least_free: int = LEAST_FREE) -> CheckResult:
    """Write, rename and lock a file in the nearest directory that exists."""
    name = "run directory"
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists() or path.is_symlink())
    if not existing.is_dir():
        return CheckResult(name, "error", f"'{existing}' is not a directory", "name another one by --dir")
    try:
        with tempfile.TemporaryDirectory(prefix=".hybridflow-doctor-", dir=existing) as scratch:
            first, second = Path(scratch) / "a", Path(scratch) / "b"
            first.write_text("new")
            second.write_text("old")
            os.replace(first, second)
            has_locks = _can_lock(second)
    except OSError as error:
        return CheckResult(name, "error", f"'{existing}' cannot be written: {error}", "name another one by --dir")
    free = shutil.disk_usage(existing).free
    text = f"{describe_bytes(free)} free in '{existing}'"
    if not has_locks:
        fix = "two processes in one run directory are not noticed there; start each run once, or use a local disk"
        return CheckResult(name, "warning", f"{text}; its file system has no locks", fix)
    if free < least_free:
        fix = "checkpoints take twelve bytes a parameter; free space, or name another disk"
        return CheckResult(name, "warning", text, fix)
    return CheckResult(name, "ok", f"{text}, with renames and locks")


def _can_lock(file: Path) -> bool:
    """Return whether a lock that one descriptor holds keeps another from it."""
    with open(file) as holder, open(file) as other:
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def check_host_name(name: str | None = None) -> CheckResult:
    """Report the interface that collectives use: that of INTERFACE, or of the address of the host name."""
    interfaces = psutil.net_if_addrs()
    if chosen := os.environ.get(INTERFACE):
        if chosen not in interfaces:
            fix = f"set it to one of {', '.join(sorted(interfaces))}, or unset it"
            return CheckResult("host name", "error", f"{INTERFACE}='{chosen}' names no interface of this machine", fix)
        return CheckResult("host name", "ok", f"{INTERFACE}='{chosen}' chooses the interface")
    name = name or socket.gethostname()
    fix = f"correct '{name}' in /etc/hosts, or set {INTERFACE} to the interface of this machine"
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        return CheckResult("host name", "warning", f"'{name}' has no address: {error}", fix)
    by_address = {entry.address: interface for interface, entries in interfaces.items() for entry in entries}
    own = [f"{address} ({by_address[address]})" for address in addresses if address in by_address]
    if not own:
        return CheckResult("host name", "warning", f"'{name}' is {', '.join(addresses)}, not this machine", fix)
    return CheckResult("host name", "ok", f"'{name}' is {', '.join(own)}")


def check_devices(driver: Path = NVIDIA) -> CheckResult:
    """Report the GPUs with their memory, or that the CPU computes."""
    import torch

    try:
        require_visible_devices()
    except ConfigError as error:
        return CheckResult("devices", "error", str(error), "correct or unset CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        text = f"no GPU: the CPU computes, with {len(os.sched_getaffinity(0))} cores"
        if cpu_has_bfloat16():
            text += ", in float32 unless model.dtype = 'bfloat16', which it has too and is faster"
        if driver.exists():
            fix = f"torch {torch.__version__} does not find the GPUs of this machine; install a CUDA build of torch"
            return CheckResult("devices", "warning", text, fix)
        return CheckResult("devices", "ok", text)
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    free = [torch.cuda.mem_get_info(index)[0] for index in range(len(gpus))]
    text = ", ".join(
        f"{gpu.name} ({describe_bytes(left)} of {describe_bytes(gpu.total_memory)} free)"
        for gpu, left in zip(gpus, free, strict=True)
    )
    if old := [gpu.name for gpu in gpus if gpu.major < 8]:
        fix = f"{old[0]} does not compute in bfloat16; set model.dtype = 'float32'"
        return CheckResult("devices", "warning", text, fix)
    return CheckResult("devices", "ok", text)


def devices_program(scratch: Path, limit_s: float = LIMIT_S) -> CheckProgram:
    """Start the check of the devices, which imports torch."""
    fix = "see what the last line says; `python -X faulthandler -c 'import torch'` shows where an import hangs"
    return CheckProgram("devices", ["-m", "hybridflow.cli.doctor", "devices"], scratch, fix, limit_s=limit_s)


def all_reduce_program(scratch: Path) -> CheckProgram:
    """Start the sum of a tensor over two processes on gloo."""
    fix = f"set {INTERFACE} to an interface of this machine, such as lo or eth0, and see the line on the host name"
    done = "two processes added a tensor by gloo"
    return CheckProgram("all-reduce", ["-c", ALL_REDUCE, str(scratch)], scratch, fix, done)


def step_program(scratch: Path, backend: str) -> CheckProgram:
    """Start a step of GRPO on a tiny model: data, generation, a reward, an update, a checkpoint."""
    name, fix = "a step", "read the error; `hybridflow train` cannot work here before it is mended"
    if backend == "ray":
        name, fix = "a step on Ray", "read the error, and docs/ray.md; until then, use controller.backend = 'local'"
    return CheckProgram(name, ["-m", "hybridflow.cli.doctor", backend], scratch, fix, STEP)


def make_step(backend: str, directory: Path) -> None:
    """Write a task with a model of 10,000 weights and make one step on it; raises what goes wrong."""
    from hybridflow.config import load_config
    from hybridflow.data import prompt_row, write_prompt_file
    from hybridflow.models.tiny_model import write_model
    from hybridflow.trainers import build_trainer

    write_model(directory / "model")
    (directory / "reward.py").write_text(REWARD)
    rows = [
        prompt_row(data_source="doctor", prompt=prompt, ground_truth="", split="train", index=i)
        for i, prompt in enumerate(("a b", "c d"))
    ]
    file = write_prompt_file(directory / "train.parquet", rows)
    changes = [
        *(f"model.path={directory}/model", f"data.train_files=['{file}']", "data.train_batch_size=2"),
        *("data.max_prompt_length=4", "data.max_response_length=4", "rollout.group_size=2"),
        *(f"reward.function={directory}/reward.py:score", f"controller.backend={backend}", "controller.threads=1"),
        *("trainer.total_steps=1", f"trainer.run_dir={directory}/run"),
    ]
    with build_trainer(load_config(None, changes)) as trainer:
        trainer.fit()


if __name__ == "__main__":  # as a program of `run_checks`
    if sys.argv[1] == "devices":
        print(json.dumps(check_devices()))
    else:
        make_step(sys.argv[1], Path.cwd())
