"""Hold the wording of the project to plain English: no private words, and short test names."""

import re
import subprocess
from pathlib import Path

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
    "presence(?!_penalty)": "heartbeat",  # but a parameter of OpenAI
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
ANY_WORD = re.compile(rf"(?<![a-z])(?<!{NOT_AFTER})({'|'.join(INSTEAD)})(?![a-z])", re.IGNORECASE)


def texts() -> dict[str, str]:
    """Return the texts of the checkout by their path; none outside a checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    paths = [Path(name) for name in listed.splitlines() if name not in ("LICENSE", "tests/architecture/test_words.py")]
    return {
        str(path): (ROOT / path).read_text() for path in paths if path.suffix in TEXT and (ROOT / path).is_file()
    }  # not a link to a directory


def test_prose_has_no_private_words():
    found = []
    for path, text in texts().items():
        for number, line in enumerate(text.splitlines(), 1):
            for match in ANY_WORD.finditer(line):
                instead = next(i for word, i in INSTEAD.items() if re.fullmatch(word, match[1], re.IGNORECASE))
                found.append(f"{path}:{number}: {line.strip()[:90]!r}; write: {instead}")
    assert not found, "\n".join(found)


def test_names_of_tests_are_short():
    names = [f"{path}: {name}" for path, text in texts().items() for name in re.findall(r"def (test_\w+)", text)]
    assert [name for name in names if len(name.partition(": ")[2]) > LONGEST_TEST_NAME] == []
