"""The versions that hybridflow is tested with. Those that it requires are in the metadata of the package."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.version import Version


class Tested(NamedTuple):
    """The tested versions of a package, from `lowest` to `highest`, without the last number of a version."""

    name: str
    lowest: str
    highest: str
    how: str

    def text(self) -> str:
        """Return the range as text."""
        return self.lowest if self.lowest == self.highest else f"{self.lowest} to {self.highest}"

    def specifier(self) -> str:
        """Return the range for pip."""
        major, minor = Version(self.highest).release
        return f">={self.lowest},<{major}.{minor + 1}"

    def includes(self, found: str) -> bool:
        """Return whether a version is within the range."""
        return Version(self.lowest).release <= Version(found).release[:2] <= Version(self.highest).release


TESTED = (
    Tested("Python", "3.11", "3.13", "3.11: all tests; 3.12, 3.13: installation and `hybridflow doctor`"),
    Tested("torch", "2.11", "2.13", "2.13.0: all tests on a CPU; 2.11.0: the tests on one H100"),
    Tested("transformers", "5.19", "5.24", "5.24.0: all tests; 5.19.0: with vLLM, which requires it"),
    Tested("ray", "2.60", "2.60", '2.60.0: all tests with `controller.backend = "ray"`'),
    Tested("vllm", "0.32", "0.32", "0.32.0: its build for CPUs; not run on a GPU"),
)


def installed(name: str) -> str | None:
    """Return the version of Python or of an installed package; None if it is not installed."""
    if name == "Python":
        return platform.python_version()
    for distribution in (name, f"{name}-cpu") if name == "vllm" else (name,):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
