"""The advice for a run: all findings, looked for in its evidence."""

from dataclasses import dataclass
from typing import Any

from hybridflow.config import leaf_keys
from hybridflow.config.render import toml_value
from hybridflow.runtime.observe.evidence import Evidence, evidence_of
from hybridflow.runtime.observe.findings import FINDINGS
from hybridflow.runtime.observe.run_files import RunFiles


@dataclass(frozen=True)
class Advice:
    """What was seen in a run, why it matters, and what to change: (key, current value, values to try) of each key.

    Without values to try, the key is to be checked. `steps`: the first and the last step looked at. `metric`: the one
    it was seen in, "" if it was seen in samples.
    """

    name: str
    seen: str
    why: str
    keys: tuple[tuple[str, Any, tuple[Any, ...]], ...]
    steps: tuple[int, int]
    is_note: bool = False
    """Whether nothing that is learned is wrong."""
    metric: str = ""

    @property
    def where(self) -> str:
        """The steps as text: "step 1" or "steps 1 to 20"."""
        first, last = self.steps
        return f"step {last}" if first == last else f"steps {first} to {last}"

    @property
    def changes(self) -> list[str]:
        """What to do with each key, such as "try rollout.group_size = 16 or 32 (now 8)"."""
        return [
            f"try {key} = {' or '.join(map(toml_value, values))} (now {toml_value(now)})"
            if values
            else f"check {key} (now {toml_value(now)})"
            for key, now, values in self.keys
        ]

    @property
    def change(self) -> str:
        """The advice as one sentence."""
        text = ", ".join(self.changes)
        return f"{text[:1].upper()}{text[1:]}."

    @property
    def line(self) -> str:
        """The advice as one line."""
        return f"{self.where}: {self.name}: {self.seen}. {self.why} {self.change}"


def find_advice(run: RunFiles) -> list[Advice]:
    """Return the advice from the files of a run; empty if nothing was found."""
    return advice_from(evidence_of(run))


def advice_from(evidence: Evidence, *, at_first_step: bool = False) -> list[Advice]:
    """Return the advice from evidence, in the order of `FINDINGS`; `at_first_step`: only what one step proves."""
    found = []
    for finding in FINDINGS:
        threshold = finding.threshold
        if isinstance(threshold, str):
            threshold = evidence.config[f"advice.{threshold}"]
        if at_first_step:
            if finding.at_first_step is None:
                continue
            threshold = max(threshold, finding.at_first_step)
        seen = finding.look(evidence, threshold)
        if seen:
            changes = {**seen.changes, **finding.changes}.items()
            suggested = [(key, suggest(evidence.config[key])) for key, suggest in changes]
            named = [(_set_key(key, evidence), values) for key, values in suggested if values is not None]
            keys = tuple((key, evidence.config[key], values) for key, values in named)
            about = (finding.name, seen.text, finding.why, keys, evidence.steps, finding.is_note, seen.metric)
            found.append((finding, Advice(*about)))
    hidden = {name for finding, _ in found for name in finding.hides}
    return [advice for _, advice in found if advice.name not in hidden]


def _set_key(key: str, evidence: Evidence) -> str:
    """Return the key that gives the rewards in place of reward.function, if that is what is to be changed."""
    gives_rewards = evidence.config["environment.classes"] and not evidence.config["reward.function"]
    return "environment.classes" if key == "reward.function" and gives_rewards else key


def earlier_findings(evidence: Evidence) -> dict[str, list[tuple[int, int]]]:
    """Return what the metrics of earlier windows show and those of the newest do not: the steps of each by name."""
    window, num_rows = evidence.config["advice.window"], len(evidence.rows)
    now = {advice.name for advice in advice_from(evidence)}
    found: dict[str, list[tuple[int, int]]] = {}
    for place in range(num_rows - window, 0, -window):
        for advice in advice_from(evidence.until(place, min(window, place))):
            if advice.name not in now:
                found.setdefault(advice.name, []).insert(0, advice.steps)
    return found


def findings_markdown() -> str:
    """Return the findings, with the defaults of their thresholds, as a Markdown table."""
    keys = {key.removeprefix("advice."): f"`{key}` = {value}" for key, value in leaf_keys().items()}
    rows = [
        f"| {each.name} | {each.found_if} | {keys.get(str(each.threshold)) or f'{each.threshold:g}'} | {each.why} |"
        for each in FINDINGS
    ]
    return "\n".join(["| finding | found if | threshold | why it matters |", "|---|---|---|---|", *rows]) + "\n"
