"""The public import path of metrics and trackers; the package itself is `hybridflow.runtime.observe`."""

import sys

from hybridflow.runtime import observe

sys.modules[__name__] = observe
