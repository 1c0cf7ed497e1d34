"""Write a dataset as train.parquet and test.parquet, ready for training.

countdown and multiplication are generated, environment takes the rows of another package's environment, the others are
converted from .jsonl, .json, .csv or .parquet files: table from any file with prompts and answers, the rest from files
in the format of the data set.
"""

import argparse
from inspect import Parameter

from hybridflow.data import (
    COUNTDOWN_PROMPT,
    MULTIPLICATION_PROMPT,
    PreparedFiles,
    prepare_countdown,
    prepare_files,
    prepare_multiplication,
)
from hybridflow.data.prepare.datasets import DATASETS, OPTIONS, options_of
from hybridflow.data.prepare.prompt_file import write_splits
from hybridflow.environments.adapters import rows_of
from hybridflow.models.hub import local_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand for each dataset."""
    tasks = parser.add_subparsers(dest="task", required=True)

    countdown = _add_task(tasks, "countdown", "reach a target with given numbers, each used once")
    _add_sizes(countdown)
    countdown.add_argument(
        "--num-operands",
        type=int,
        nargs="+",
        default=[3, 4],
        metavar="N",
        help="numbers in a problem; several values are mixed",
    )
    countdown.add_argument("--max-number", type=int, default=99, metavar="N", help="largest number")
    countdown.add_argument("--max-target", type=int, default=999, metavar="N", help="largest target")
    countdown.add_argument("--operators", default="+-*/", help="allowed operators among + - * / (write --operators=+-)")
    countdown.add_argument(
        "--prompt-template",
        default=COUNTDOWN_PROMPT,
        metavar="TEXT",
        help="with {numbers} and {target}, optionally {operators}",
    )
    countdown.add_argument(
        "--number-separator", default=", ", metavar="TEXT", help="separator of the numbers in a prompt"
    )

    multiplication = _add_task(tasks, "multiplication", "multiply two numbers")
    _add_sizes(multiplication)
    multiplication.add_argument("--digits-a", type=int, default=3, metavar="N", help="digits of the first number")
    multiplication.add_argument("--digits-b", type=int, default=3, metavar="N", help="digits of the second number")
    multiplication.add_argument(
        "--prompt-template", default=MULTIPLICATION_PROMPT, metavar="TEXT", help="with {a} and {b}"
    )

    environment = _add_task(tasks, "environment", "rows of an environment of another package")
    environment.add_argument("source", metavar="SOURCE", help="a value of environment.classes, SCHEME:NAME")
    _add_sizes(environment)

    for name, kind in DATASETS.items():
        task = _add_task(tasks, name, kind.summary)
        _add_files(task)
        for option, default in options_of(kind.make_row).items():
            (metavar, help_text), is_required = OPTIONS[option], default is Parameter.empty
            flag = f"--{option.replace('_', '-')}"
            task.add_argument(flag, metavar=metavar, help=help_text, required=is_required, default=default)
    tasks.metavar = "|".join(tasks.choices)


def run(args: argparse.Namespace) -> int:
    """Write the two files and print their sizes and the first row."""
    options = vars(args).copy()
    task, output_dir = options.pop("task"), options.pop("output_dir")
    print(f"preparing {task} ...", flush=True)
    for option in ("train_file", "test_file"):
        if options.get(option):
            options[option] = local_file(f"--{option.replace('_', '-')}", options[option])
    generate = {
        "countdown": prepare_countdown,
        "multiplication": prepare_multiplication,
        "environment": _prepare_environment,
    }.get(task)
    if generate:
        _report(generate(output_dir, **options))
    else:
        _report(prepare_files(task, options.pop("train_file"), output_dir, **options))
    return 0


def _prepare_environment(output_dir: str, *, source: str, train_size: int, test_size: int, seed: int) -> PreparedFiles:
    train, test = (rows_of(source, split, size, seed) for split, size in (("train", train_size), ("test", test_size)))
    return write_splits(output_dir, train, test)


def _report(files: PreparedFiles) -> None:
    for source in files.sources:
        num_dropped = source.num_read - source.num_kept
        print(f"{source.path}: read {source.num_read} rows, kept {source.num_kept}, dropped {num_dropped}")
        for reason, count in source.dropped.items():
            print(f"  dropped {count} {'row' if count == 1 else 'rows'}: {reason}")
    print(f"wrote {files.num_train} rows to {files.train_file}")
    print(f"wrote {files.num_test} rows to {files.test_file}")
    row = files.first_row
    print(f"the first prompt: {row['prompt'][-1]['content']}")
    print(f"its ground truth: {row['reward_model']['ground_truth']}")


def _add_task(
    tasks: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, help_text: str
) -> argparse.ArgumentParser:
    parser = tasks.add_parser(
        name, help=help_text, description=help_text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output-dir", default=f"data/{name}", metavar="DIR", help="directory of the two files")
    return parser


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train-size", type=int, default=20_000, metavar="N", help="training rows")
    parser.add_argument("--test-size", type=int, default=1_000, metavar="N", help="test rows")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed; the same seed gives the same files"
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train-file", required=True, metavar="FILE", default=argparse.SUPPRESS, help="training rows")
    parser.add_argument(
        "--test-file",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="test rows; without it, random rows of the training file",
    )
    parser.add_argument("--test-size", type=int, default=100, metavar="N", help="test rows without a test file")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the test rows")
