"""Check on this machine that runs of a recipe repeat bit for bit, and write a certificate.

The recipe runs for a few steps, with its model and data, and is then resumed, replayed, killed and run on Ray; rows,
metrics and weights are compared. The exit status is 1 if a comparison that must be exact is not.
"""

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.cli.arguments import add_recipe_arguments, config_of, number
from hybridflow.cli.output import aligned
from hybridflow.errors import ConfigError

if TYPE_CHECKING:
    from hybridflow.checkpoint.certificate import Certificate

KEYS = ("model.path", "data.train_files", "rollout.exact", "controller.backend")
STEPS, QUICK_STEPS = 4, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipe, the number of steps and the directory."""
    add_recipe_arguments(parser)
    steps = number(int, lambda count: 2 <= count <= 10**6, "a number of steps from 2 to 1,000,000")
    parser.add_argument("--steps", type=steps, metavar="N", help=f"steps of each run (default: {STEPS}; at least 2)")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_STEPS} steps, and no kill of a worker: minutes, not many"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="new directory to write (default: trainer.run_dir-certificate)"
    )


def run(args: argparse.Namespace) -> int:
    """Make the short runs and comparisons, and write the certificate."""
    config = config_of(args)
    output = args.output or Path(f"{config.trainer.run_dir.rstrip('/')}-certificate")
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ConfigError(
            f"'{output}' exists and is not an empty directory; remove it, or give another one with --output."
        )
    num_steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    if 0 < config.trainer.total_steps < num_steps:
        raise ConfigError(
            f"trainer.total_steps={config.trainer.total_steps} has fewer steps than the {num_steps} that are compared; "
            "use a larger number, or fewer with --steps (at least 2)."
        )
    from hybridflow.checkpoint import CheckpointStore
    from hybridflow.checkpoint.certificate import PAGE, Certificate, identity_of
    from hybridflow.config import leaf_keys
    from hybridflow.config.render import toml_value
    from hybridflow.runtime.observe.run_info import collect_run_info
    from hybridflow.trainers.certify.certify import Comparisons, middle_of, shortened
    from hybridflow.trainers.certify.short_runs import ShortRuns

    changes = shortened(config, num_steps)
    before, short = leaf_keys(config), leaf_keys(config_of(args, after=changes))
    arguments = [argument for argument in (args.recipe, *args.overrides) if argument is not None]
    scratch = (output / "runs").absolute()
    start, made_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--output '{output}' cannot be made: {error.strerror}; give another directory.") from error
    try:
        runs = ShortRuns([*arguments, *changes], scratch, num_steps, middle_of(num_steps), _say)
        comparisons = Comparisons(config, runs, quick=args.quick)
        checkpoint = CheckpointStore(comparisons.first / "checkpoints").open(num_steps)
        lines = []
        for line in comparisons.lines():
            _say(f"{line.name}: {line.result}")
            lines.append(line)
        certificate = Certificate(
            command=shlex.join(["hybridflow", "certify", *arguments]),
            made_at=made_at,
            num_steps=num_steps,
            changes=[f"{key}={toml_value(value)}" for key, value in short.items() if before[key] != value],
            identity=identity_of(checkpoint, [change.partition("=")[0] for change in (*changes, "trainer.run_dir")]),
            environment={name: collect_run_info()[name] for name in ("versions", "hardware")},
            lines=lines,
            seconds=round(time.monotonic() - start, 1),
        )
        certificate.write(output)
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(scratch)
            output.rmdir()
        raise
    if certificate.is_kept:
        shutil.rmtree(scratch)
    print("\n".join(_shown(certificate)))
    kept = "" if certificate.is_kept else f"; its runs are in {scratch}"
    print(f"wrote {output / PAGE} in {certificate.seconds:.0f} s{kept}")
    return 0 if certificate.is_kept else 1


def _shown(certificate: "Certificate") -> Iterable[str]:
    rows = [[line.name, line.result, f"{line.seconds:.0f} s", line.compared] for line in certificate.lines]
    yield from aligned([["comparison", "result", "time", "compared"], *rows], ends_with_text=True)
    yield from (f"{line.name}: {line.details}" for line in certificate.lines if line.details)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
