"""What the watch of a cluster learns by asking a service."""

import subprocess
import sys

PROGRAM = """
import os, resource, socket
from hybridflow.controller.ray.cluster_watch import _accepts

with socket.create_server(("127.0.0.1", 0)) as server:
    address = server.getsockname()
    answers = [_accepts(address)]
answers.append(_accepts(address))
limits, first_free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
os.close(first_free)
resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
answers.append(_accepts(address))
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
print(answers, _accepts(address))
"""


def test_a_process_without_a_free_file_judges_no_service():
    """In a process of its own, since threads of this one need files."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "[True, False, True] False\n", done.stderr
