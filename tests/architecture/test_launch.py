"""The scripts of launch/ and the Dockerfile: checked by the tools that read them, and run with stand-ins for Slurm."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import yaml
from support.faults import plan_faults

from fixtures import tiny_run
from hybridflow.config import load_config
from hybridflow.runtime.observe import read_jsonl

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
TOOLS = ROOT / ".launch" / "bin"

CHECKED_BY_TOOLS = r"""
import sys, yaml, kubernetes_validate, sky
job = yaml.safe_load(open(sys.argv[1] + "/kuberay.yaml"))
cluster = job["spec"]["rayClusterSpec"]
for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
    kubernetes_validate.validate(pod, "1.35", strict=True)
with open(sys.argv[1] + "/sky.yaml") as file:
    task = sky.Task.from_yaml_config(yaml.safe_load(file), secrets_overrides=[("RAY_AUTH_TOKEN", "x")])
assert task.num_nodes == 2
with open(sys.argv[2], "w") as file:
    file.write("#!/bin/bash\n" + task.run)
"""

STAND_INS = {
    "srun": """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
""",
    "scontrol": """#!/bin/bash
[ "$1" = requeue ] && { echo "$2" >> "$REQUEUED"; exit; }
echo "$3"
""",
}


def test_the_launch_files_ask_for_what_the_configuration_knows(tmp_path):
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
    task = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
    (asked,) = re.findall(r"'(placement\.pools=[^']*)'", job["spec"]["entrypoint"])
    for pools, workers in ((asked, 2), (f"placement.pools={task['envs']['POOLS']}", task["num_nodes"])):
        config = load_config([], ["model.path=m", 'data.train_files=["d"]', "controller.backend=ray", pools])
        assert config.placement.pools == {"main": (8,) * workers}
    assert job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 2
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    ray = job["spec"]["rayClusterSpec"]["rayVersion"]
    assert f'"ray>={ray.rpartition(".")[0]},' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: tools of other programs")
def test_the_launch_files_are_valid_for_the_tools_that_read_them(tmp_path):
    if not TOOLS.exists():
        pytest.skip("the tools are not installed in .launch; run `make .launch`, or `make test-all`.")
    home = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = tmp_path / "sky.sh"
    subprocess.run([TOOLS / "python", "-c", CHECKED_BY_TOOLS, LAUNCH, command], env=home, check=True)
    subprocess.run([TOOLS / "shellcheck", *sorted(LAUNCH.glob("*.sh")), command], check=True)
    subprocess.run([TOOLS / "hadolint", ROOT / "Dockerfile"], check=True)


@pytest.mark.runs
@pytest.mark.own_run("grpo: a shell that repeats a command")
def test_a_run_on_a_started_cluster_is_repeated_while_it_ends_with_75(tmp_path):
    """A stand-in for `hybridflow` ends with one status of a file at each start; `wait`: when SIGTERM comes."""
    (tmp_path / "hybridflow").write_text(
        """#!/bin/bash
echo "$@" >> calls
next=$(head -n 1 statuses); sed -i 1d statuses
if [ "$next" = wait ]; then trap 'exit 75' TERM; kill -TERM "$PPID"; while true; do sleep 0.1; done; fi
exit "$next"
"""
    )
    (tmp_path / "hybridflow").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RETRY_AFTER_S": "0"}
    for statuses, calls, status in (("75 75 0", 3, 0), ("75 1", 2, 1), ("75 wait", 2, 75)):
        (tmp_path / "statuses").write_text("\n".join(statuses.split()) + "\n")
        (tmp_path / "calls").unlink(missing_ok=True)
        command = ["bash", LAUNCH / "train_until_done.sh", "recipe.toml", "a.b=c d"]
        assert subprocess.run(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL).returncode == status
        shown = ["train recipe.toml a.b=c d controller.backend=ray controller.address=auto"] * calls
        assert (tmp_path / "calls").read_text().splitlines() == shown


@pytest.fixture
def short_directory():
    """Return a directory for Ray, the paths of whose sockets may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="ray-") as directory:
        yield directory


@pytest.fixture
def slurm(tmp_path, short_directory):
    """Return a function that starts launch/slurm.sh as a job with one node, and its run directory.

    Each job has its own process ids, since Ray stops every cluster that it finds; its processes end with it.
    """
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("a" * 64)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        "REQUEUED": str(tmp_path / "requeued"),
        "RAY_TMPDIR": short_directory,
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "SLURM_JOB_NUM_NODES": "1",
        "SECONDS_FOR_EACH_REWARD": "0.05",
    }
    task = tiny_run.write_task(tmp_path / "task")
    run = tmp_path / "run"
    settings = [task / "rl.toml", f"trainer.run_dir={run}", "trainer.save_every=1", "recovery.max_restarts=0"]
    running = []

    def start(**variables):
        spaces = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = [*spaces, "bash", LAUNCH / "slurm.sh", *settings]
        running.append(subprocess.Popen(command, cwd=tmp_path, env={**environment, **variables}))
        return running[-1]

    yield start, run
    for process in running:
        process.kill()
        process.wait()


def requeued(run):
    path = run.parent / "requeued"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.exhaustive
@pytest.mark.own_run("ray: a cluster that a script starts")
def test_a_job_that_loses_a_worker_is_queued_again_and_continues(slurm):
    start, run = slurm
    faults = plan_faults(run, ["2: kill actor_rollout/0 in backward"])
    assert start(HYBRIDFLOW_FAULTS=faults).wait() == 75
    assert requeued(run) == 1
    assert start(HYBRIDFLOW_FAULTS=faults).wait() == 0
    assert requeued(run) == 1
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == list(range(7))


@pytest.mark.exhaustive
@pytest.mark.own_run("ray: a cluster that a script starts")
def test_a_job_before_its_time_limit_saves_and_is_queued_again(slurm):
    start, run = slurm
    process = start()
    while not ((run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) > 1):
        assert process.poll() is None
        time.sleep(0.1)
    (script,) = psutil.Process(process.pid).children()
    script.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert requeued(run) == 1
    assert 0 < int(max((run / "checkpoints").iterdir()).name.removeprefix("step_")) < 6


@pytest.mark.exhaustive
@pytest.mark.own_run("ray: a cluster that a script starts")
def test_a_job_whose_cluster_does_not_start_fails(slurm):
    start, run = slurm
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 20000 + os.getpid() % 10000))
        taken.listen()
        assert start().wait() == 1
    assert (requeued(run), run.exists()) == (0, False)


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: installs the package elsewhere")
def test_the_steps_of_the_dockerfile_give_a_command(tmp_path):
    """The steps of the stage `cpu`, without Docker: those that copy and those that install Python packages."""
    root, stage = tmp_path / "root", ""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    root.mkdir()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        word, _, rest = line.partition(" ")
        stage = rest.rpartition(" ")[2] if word == "FROM" else stage
        if stage == "cuda":
            continue
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, root / (target if (ROOT / source).is_dir() else source))
        elif rest.startswith("pip install"):
            for step in rest.replace("${TORCH}", "torch==2.13.0").replace("--no-cache-dir", "--quiet").split(" && "):
                subprocess.run([python, "-m", *shlex.split(step)], cwd=root, check=True)
    done = subprocess.run([python.with_name("hybridflow"), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: hybridflow")
