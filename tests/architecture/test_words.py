"""Hold the wording of the project to plain English: no private words, and short test names."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = {".py", ".md", ".toml", ".c", ".h", ""}

INSTEAD = {
    "nobody": "name the component, or use the passive",
    "somebody": "name the component, or use the passive",
    "whoever": "name the component, or use the passive",
    "told": "reported, logged, documented, detected, passed to",
    "hears? of": "receives, records",
    "speaks? for": "represents",
    "stretch(es)?": "range, interval, segment",
    "presence": "heartbeat",
    "pulses?": "heartbeat",
    "blames?|blamed": "cause, names the component at fault",
    "drift(s|ed|ing)?": "log-prob mismatch, deviation",
    "(is|are|was|were) no(?! (longer|more|less|later|earlier|smaller|larger|faster|slower|different))": "is not a",
    "is none of": "is not one of",
    "without a word": "silently, without an error message",
    "for want of": "for lack of, because there is no",
    "end(s|ed)? its life": "exited",
    "in (one|two|three) sittings?": "in one run, resumed",
    "dealt out|deals? out|dealing out": "partitioned, split, assigned",
    "comes? along|came along": "is included",
    "put back": "restored",
}
"""Words that a reader new to the project does not understand, and what to write instead."""

NOT_AFTER = "there "
"""`there is no mask` is plain; `x is no mask` is not."""

LONGEST_TEST_NAME = 75


def files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / name for name in listed.splitlines()]
    return [path for path in paths if path.suffix in TEXT and path.name != "LICENSE" and path != Path(__file__)]


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts[:-1]
    return "/".join(parts[:3] if parts[:1] == ("src",) else parts[:2]) or "."


FILES = files() if (ROOT / ".git").exists() else []


@pytest.mark.parametrize("package", sorted({package_of(path) for path in FILES}))
def test_prose_has_no_private_words(package):
    found = []
    for path in FILES:
        if package_of(path) != package or not path.is_file():  # also a link to a directory
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for word, instead in INSTEAD.items():
                if re.search(rf"(?<![a-z])(?<!{NOT_AFTER})({word})(?![a-z])", line, re.IGNORECASE):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:90]!r}; write: {instead}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", sorted({package_of(path) for path in FILES if path.name.startswith("test_")}))
def test_names_of_tests_are_short(package):
    names = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in FILES
        if package_of(path) == package and path.name.startswith("test_") and path.exists()
        for name in re.findall(r"def (test_\w+)", path.read_text())
        if len(name) > LONGEST_TEST_NAME
    ]
    assert not names, f"longer than {LONGEST_TEST_NAME} characters:\n" + "\n".join(names)
