"""Light commands and imports do not import torch or other heavy packages."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "tensordict", "transformers", "pyarrow", "matplotlib", "tensorboard", "ray", "vllm")


@pytest.mark.parametrize(
    "program",
    [
        "import hybridflow",
        "import hybridflow; dir(hybridflow); hybridflow.load_config(None)",
        "import hybridflow.config, hybridflow.errors, hybridflow.observability, hybridflow.runtime",
        "from hybridflow.cli.main import main; main(['config'])",
        "from hybridflow.cli.main import main; main(['config', '--reference'])",
        "from hybridflow.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from hybridflow.cli.main import main\ntry: main(['--version'])\nexcept SystemExit: pass",
        "from hybridflow.cli.main import main\ntry: main(['generate', '--help'])\nexcept SystemExit: pass",
        "from hybridflow.cli.main import main; main(['train', 'missing.toml'])",
        "from hybridflow.cli.main import main; main(['evaluate', '--run', 'missing'])",
        "from hybridflow.cli.main import main; main(['config', 'missing.toml'])",
    ],
)
def test_program_imports_no_heavy_module(program):
    check = f"\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program + check], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == ""
