"""Restrictions of a process, looked at by a file that was opened before."""

import subprocess
import sys

PROGRAM = """
import os
from hybridflow.rewards import code_limits
status = open("/proc/self/status")
code_limits.restrict(os.getcwd(), 60.0, 2**30, 2**20)
print(status.read())
"""


def test_a_restricted_process_has_no_capabilities(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=True)
    status = dict(line.split(":\t", 1) for line in done.stdout.splitlines() if ":\t" in line)
    for kind in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(status[kind], 16) == 0
    with open("/proc/self/status") as own:
        is_administrator = any(line.startswith("CapEff") and int(line.split()[1], 16) & 1 << 8 for line in own)
    assert int(status["CapBnd"], 16) == 0 or not is_administrator  # CAP_SETPCAP, which the bounding set requires
    assert status["NoNewPrivs"] == "1"
