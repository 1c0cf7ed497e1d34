"""`python -m hybridflow`, the same as the command `hybridflow`."""

import sys

from hybridflow.cli.main import command

sys.exit(command())
