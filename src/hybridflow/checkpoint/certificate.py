"""A certificate: the results that `hybridflow certify` compared bit for bit, and the run that it holds for."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hybridflow.checkpoint.store import Checkpoint
from hybridflow.errors import CheckpointConfigError
from hybridflow.runtime.files import write_text_atomically

CERTIFICATE, PAGE = "certificate.json", "certificate.md"
FORMAT = "hybridflow-certificate"
BY_CONTENTS = ("data.train_files",)
"""Keys of which the contents count: the fingerprint of the data; also the paths of models."""

Result = Literal["exact", "differs", "failed", "not checked"]


@dataclass(frozen=True)
class CertificateLine:
    """A comparison: what was compared, and the first difference, the error, or why it could not be checked.

    `must_be_exact`: hybridflow claims that nothing differs. `details`: empty if the result is "exact".
    """

    name: str
    result: Result
    compared: str = ""
    details: str = ""
    seconds: float = 0.0
    must_be_exact: bool = True

    @property
    def is_kept(self) -> bool:
        """Whether the claim of the line, if it has one, is not refuted."""
        return not self.must_be_exact or self.result in ("exact", "not checked")


@dataclass(frozen=True)
class Certificate:
    """The lines of a certificate, and the `identity` of the run that it holds for, see `identity_of`.

    `changes`: what the short runs had in place of the recipe's values. `environment`: versions and hardware.
    """

    command: str
    made_at: str
    num_steps: int
    changes: Sequence[str]
    identity: dict[str, Any]
    environment: dict[str, Any]
    lines: Sequence[CertificateLine] = ()
    seconds: float = 0.0

    @property
    def is_kept(self) -> bool:
        """Whether no claim is refuted."""
        return all(line.is_kept for line in self.lines)

    def write(self, directory: Path) -> None:
        """Write the certificate as JSON and as a page."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False)
        write_text_atomically(directory / CERTIFICATE, f"{text}\n")
        write_text_atomically(directory / PAGE, self.page())

    def page(self) -> str:
        """Return the certificate in Markdown."""
        versions, hardware = self.environment["versions"], self.environment["hardware"]
        place = ", ".join([hardware["cpu"], f"{hardware['usable_cores']} cores", *map(str, hardware["gpus"] or ())])
        rows = [f"| {x.name} | {x.result} | {x.compared} | {x.seconds:.0f} s |" for x in self.lines]
        details = [f"- {x.name}: {' '.join(x.details.split())}" for x in self.lines if x.details]
        sections = [
            "# Certificate",
            f"`{self.command}`, {self.made_at}, in {self.seconds:.0f} s",
            f"Runs of {self.num_steps} steps, compared bit for bit. hybridflow {versions['hybridflow']}, torch "
            f"{versions['torch']}; {place}. Their values in place of the recipe's: {', '.join(self.changes)}.",
            "\n".join(["| comparison | result | compared | time |", "|---|---|---|---|", *rows]),
            "\n".join(details),
            "No line that must be exact differs." if self.is_kept else "**A line that must be exact is not.**",
        ]
        return "\n\n".join(filter(None, sections)) + "\n"

    def require_same_run(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointConfigError, with all differences, unless the certificate holds for a checkpoint's run."""
        found = identity_of(checkpoint, without=())
        wrong = [
            f"{key} was {value!r} when it was certified and is {found['config'].get(key)!r}"
            for key, value in self.identity["config"].items()
            if found["config"].get(key) != value
        ]
        for what in ("kind", "models", "data"):
            if found[what] != self.identity[what]:
                wrong.append(f"the {what} of the run: {found[what]!r}, certified was {self.identity[what]!r}")
        if wrong:
            raise CheckpointConfigError(
                f"the certificate of {self.made_at} is not for '{checkpoint.directory}': {'; '.join(wrong)}. "
                "Run `hybridflow certify` with the recipe of this run."
            )


def identity_of(checkpoint: Checkpoint, without: Sequence[str]) -> dict[str, Any]:
    """Return the kind, the keys, the models and the data of a checkpoint's run, `without` some keys."""
    info, models = checkpoint.info, checkpoint.info.get("models", {})
    return {
        "kind": info.get("kind"),
        "config": {
            key: value for key, value in info.get("config", {}).items() if key not in {*BY_CONTENTS, *models, *without}
        },
        "models": models,
        "data": checkpoint.load("controller", "loader").get("fingerprint"),
    }


def read_certificate(file: Path) -> Certificate:
    """Read a certificate. Raises CheckpointConfigError if the file is not one."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        certificate = Certificate(**{**document, "lines": [CertificateLine(**line) for line in document["lines"]]})
        certificate.page()
        _ = [certificate.identity[what] for what in ("kind", "models", "data")], certificate.identity["config"].items()
        return certificate
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointConfigError(
            f"'{file}' is not a certificate ({error}); give the {CERTIFICATE} that `hybridflow certify` wrote."
        ) from error
