"""The check of a family: the lines of a small copy, and which kind of layer fails them.

config.json ─small config─> copy: a layer of each kind ─lines─> table
                            copies of one kind each <─if a line fails─┘
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PretrainedConfig

from hybridflow.config import ParallelConfig
from hybridflow.errors import ModelError
from hybridflow.models.model_files import LOADING_ERRORS
from hybridflow.trainers.family_check.copy import write_copy
from hybridflow.trainers.family_check.layouts import layout_difference, layout_title
from hybridflow.trainers.family_check.lines import Comparison, Difference
from hybridflow.trainers.family_check.small_config import (
    EXPERTS_OF_COPY,
    KV_HEADS,
    Kind,
    SmallConfig,
    kinds_of,
    with_kinds,
)

SEEDS = (0, 1)
"""A line that fails with the first is computed again with the second: rounding can change the choice of an expert."""


@dataclass(frozen=True)
class LineText:
    """The comparison that a line makes, and the advice where it fails."""

    title: str
    remedy: str


OTHER_MODEL = "use another model, or other versions of transformers and torch"
VLLM = "set rollout.backend = 'vllm'"
UNPACKED = "set memory.packing = false"
LINES = {
    "transformers": LineText("a row alone = transformers' code", OTHER_MODEL),
    "packed": LineText("rows packed = alone", UNPACKED),
    "order": LineText("rows packed in another order = alone", UNPACKED),
    "padded": LineText("rows padded = alone", "set memory.packing = true"),
    "shared": LineText("prompts shared = rows alone", "set memory.share_prompts = false"),
    "decoded rows": LineText("decoding token by token = one pass", VLLM),
    "reused rows": LineText("decoding in used rows = one pass", VLLM),
    "decoded pages": LineText("decoding in pages = one pass", VLLM),
    "reused pages": LineText("decoding in used pages = one pass", VLLM),
}


@dataclass(frozen=True)
class Finding:
    """A line of the table; `kind` is the kind of layer that differs, if the line fails."""

    line: str
    difference: Difference
    kind: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the two ways agree."""
        return self.difference.is_ok

    @property
    def title(self) -> str:
        """The line's comparison."""
        return LINES[self.line].title if self.line in LINES else self.line


@dataclass(frozen=True)
class Report:
    """The result of the check of one configuration."""

    model_type: str
    kinds: tuple[str, ...]
    findings: tuple[Finding, ...]
    without_gradient: tuple[str, ...] = ()

    def causes(self, lines: Collection[str] = ()) -> list[str]:
        """Return what fails, once for all lines that fail in the same words, and what to do; of `lines`, if any.

        Where lines with different remedies fail by one cause, none of these helps.
        """
        groups = defaultdict[tuple[str, str], list[Finding]](list)
        for finding in self.findings:
            if not finding.is_ok:
                groups[finding.difference.text.rstrip("."), finding.kind].append(finding)
        found = []
        for (text, kind), failed in groups.items():
            if lines and not any(finding.line in lines for finding in failed):
                continue
            remedies = {LINES[finding.line].remedy for finding in failed if finding.line in LINES}
            where = "all lines" if len(failed) == len(self.findings) > 1 else ", ".join(each.title for each in failed)
            remedy = OTHER_MODEL if len(remedies) > 1 else next(iter(remedies), "")
            layers = f", in layers of {kind}" if kind else ""
            found.append(f"{where}: {text}{layers}{remedy and '; '}{remedy}.")
        return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: on tensors this small, more only wait for each other."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


@_one_thread()
def run_check(config: PretrainedConfig) -> Report:
    """Check the family of a configuration. Raises ModelError if transformers or we cannot compute a small copy."""

    def compute(small: SmallConfig, kinds: Sequence[Kind], chosen: PretrainedConfig) -> Report:
        found, idle = _differences(chosen)
        failed = [line for line, difference in found.items() if not difference.is_ok]
        culprits = _culprits(small, kinds, lambda alone: _differences(alone, failed, SEEDS[:1])[0]) if failed else {}
        findings = tuple(Finding(line, each, "" if each.is_ok else culprits[line]) for line, each in found.items())
        return Report(config.model_type, tuple(_titles(kinds)), findings, tuple(idle))

    return on_small_copy(config, compute)


@_one_thread()
def check_layout(config: PretrainedConfig, world_size: int, parallel: ParallelConfig) -> Finding:
    """Compare a copy that several processes share with one process, see `layout_difference`."""
    line = layout_title(world_size, parallel)

    def compute(small: SmallConfig, kinds: Sequence[Kind], chosen: PretrainedConfig) -> Finding:
        def differences(config: PretrainedConfig) -> dict[str, Difference]:
            return {line: layout_difference(config, world_size, parallel, SEEDS[0])}

        found = differences(chosen)[line]
        if found.is_ok or found.error:  # a layout that is refused
            return Finding(line, found)
        return Finding(line, found, _culprits(small, kinds, differences)[line])

    experts = parallel.expert * max(1, EXPERTS_OF_COPY // parallel.expert)
    return on_small_copy(config, compute, kv_heads=max(KV_HEADS, parallel.tensor), experts=experts)


CANDIDATES: tuple[dict[str, bool], ...] = ({}, {"widens": True}, {"keeps_widths": True})
"""Options of small configurations, the smallest first."""
T = TypeVar("T")


def on_small_copy(
    config: PretrainedConfig,
    compute: Callable[[SmallConfig, Sequence[Kind], PretrainedConfig], T],
    kv_heads: int = KV_HEADS,
    experts: int = EXPERTS_OF_COPY,
) -> T:
    """Return what `compute` does with the smallest configuration that transformers can compute.

    It gets what can be given other layers, the kinds of layers, and a configuration with a layer of each kind.
    """
    for options in CANDIDATES:
        try:
            small = SmallConfig(config, kv_heads=kv_heads, experts=experts, **options)
            kinds = kinds_of(small)
            chosen = with_kinds(small, kinds)
            if chosen is None:
                raise ValueError(f"none has its layers {', '.join(_titles(kinds))}")
            return compute(small, kinds, chosen)
        except LOADING_ERRORS as error:
            if options is CANDIDATES[-1]:
                reason = " ".join(str(error).split())[:300].rstrip(".")
                reason += ", perhaps a name in config.json" if isinstance(error, KeyError) else ""
                raise ModelError(
                    f"{config.model_type} models are not supported: a small copy cannot be computed "
                    f"({type(error).__name__}: {reason}); {OTHER_MODEL}."
                ) from error
    raise AssertionError("there are candidates")


def _differences(
    config: PretrainedConfig, only: Collection[str] = (), seeds: Sequence[int] = SEEDS
) -> tuple[dict[str, Difference], list[str]]:
    """Return the lines of a copy, or `only` some, and the parameters that get no gradient."""
    found: dict[str, Difference] = {}
    idle: list[str] = []
    for seed in seeds:
        again = {line for line, difference in found.items() if not (difference.is_ok or difference.error)}
        wanted = again if found else set(only or LINES)
        if not wanted:
            break
        with tempfile.TemporaryDirectory(prefix="hybridflow-check-") as directory:
            comparison = Comparison(write_copy(config, Path(directory), seed))
            idle = idle or comparison.without_gradient
            found |= {line: _computed(compute) for line, compute in comparison.differences() if line in wanted}
    return found, idle


def _computed(compute: Callable[[], Difference]) -> Difference:
    try:
        return compute()
    except Exception as error:  # the code of some families fails in its own way
        reason = " ".join(str(error).split())[:300]
        return Difference(error=f"{type(error).__name__}: {reason}")


def _culprits(
    small: SmallConfig, kinds: Sequence[Kind], differences: Callable[[PretrainedConfig], Mapping[str, Difference]]
) -> dict[str, str]:
    """Return, for each line that fails, the kinds of layers that fail it alone, or the mix of all."""
    titles, alone = _titles(kinds), defaultdict[str, list[str]](list)
    for kind, title in zip(kinds, titles, strict=True):
        config = with_kinds(small, [kind]) if len(kinds) > 1 else None
        with suppress(*LOADING_ERRORS, ModelError):
            for line, difference in (differences(config) if config else {}).items():
                if not difference.is_ok:
                    alone[line].append(title)
    mix = titles[0] if len(titles) == 1 else f"the mix of {', '.join(titles)}"
    return defaultdict(lambda: mix, {line: " and ".join(found) for line, found in alone.items()})


def _titles(kinds: Sequence[Kind]) -> list[str]:
    """Return the names of kinds, with the first layer where two have the same name."""
    names = [kind.name for kind in kinds]
    return [kind.name if names.count(kind.name) == 1 else f"{kind.name} as layer {kind.first}" for kind in kinds]
