import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.ray
@pytest.mark.slow
def test_soak_of_five_clusters_leaves_nothing_behind():
    command = [sys.executable, SOAK, "--cycles", "5", "--killed", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
