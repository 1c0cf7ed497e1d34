"""The public import path of rewards; the package itself is `hybridflow.environments.rewards`."""

import sys

from hybridflow.environments import rewards

sys.modules[__name__] = rewards
