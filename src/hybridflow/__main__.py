"""`python -m hybridflow` is the command `hybridflow`."""

import sys

from hybridflow.cli.main import command

sys.exit(command())
