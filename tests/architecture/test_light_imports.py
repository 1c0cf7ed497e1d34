import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "tensordict",
    "transformers",
    "pyarrow",
    "matplotlib",
    "tensorboard",
    "ray",
    "vllm",
    "starlette",
    "uvicorn",
)
COMMANDS = (
    ["config"],
    ["config", "--reference"],
    ["--help"],
    ["--version"],
    ["generate", "--help"],
    ["train", "missing.toml"],
    ["evaluate", "--run", "missing"],
    ["config", "missing.toml"],
)
PROGRAM = f"""
import sys
def require_light(what):
    found = [name for name in {HEAVY!r} if name in sys.modules]
    assert not found, f"{{what}} imports {{found}}"
import hybridflow
dir(hybridflow)
require_light("hybridflow")
hybridflow.load_config(None)
import hybridflow.environments, hybridflow.environments.agents
import hybridflow.config, hybridflow.cli.doctor, hybridflow.errors, hybridflow.runtime.observe, hybridflow.runtime
from hybridflow.runtime.observe.memory import memory_bytes
memory_bytes()
require_light("a package")
from hybridflow.cli.main import main
for arguments in {COMMANDS!r}:
    try:
        main(arguments)
    except SystemExit:
        pass
    require_light(arguments)
"""


@pytest.mark.runs
@pytest.mark.own_run("grpo: looks at the imports of a new interpreter")
def test_light_commands_import_no_heavy_module():
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
