"""Write a dataset as train.parquet and test.parquet, ready for training.

countdown and multiplication are generated; gsm8k is converted from files in GSM8K's format (.jsonl or .parquet), table
from any file with prompts and answers (.jsonl, .json, .csv or .parquet).
"""

import argparse

from hybridflow.data.prepare import (
    COUNTDOWN_PROMPT,
    GSM8K_INSTRUCTION,
    MULTIPLICATION_PROMPT,
    PreparedFiles,
    prepare_countdown,
    prepare_gsm8k,
    prepare_multiplication,
    prepare_table,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand for each dataset."""
    tasks = parser.add_subparsers(dest="task", required=True, metavar="countdown|multiplication|gsm8k|table")

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

    gsm8k = _add_task(tasks, "gsm8k", "grade-school word problems, from files with the columns question and answer")
    gsm8k.add_argument("--train-file", required=True, metavar="FILE", help="training problems, .jsonl or .parquet")
    gsm8k.add_argument("--test-file", required=True, metavar="FILE", help="test problems, .jsonl or .parquet")
    gsm8k.add_argument(
        "--instruction", default=GSM8K_INSTRUCTION, metavar="TEXT", help="appended to each question after a space"
    )

    table = _add_task(tasks, "table", "your own prompts and answers, from a .jsonl, .json, .csv or .parquet file")
    table.add_argument("--train-file", required=True, metavar="FILE", help="training rows")
    table.add_argument("--test-file", metavar="FILE", help="test rows; without it, random rows of the training file")
    table.add_argument("--test-size", type=int, default=100, metavar="N", help="test rows without a test file")
    table.add_argument("--prompt", default="prompt", metavar="COLUMN", help="column of the prompts: texts or messages")
    table.add_argument("--answer", default="answer", metavar="COLUMN", help="column of the answers, as a.b if nested")
    table.add_argument(
        "--data-source", required=True, metavar="NAME", help="a name, which can choose the reward function"
    )
    table.add_argument("--instruction", default="", metavar="TEXT", help="appended to each prompt after a space")
    table.add_argument("--system", default="", metavar="TEXT", help="system message before each prompt")
    table.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the test rows")


def run(args: argparse.Namespace) -> int:
    """Write the two files and print their sizes and the first row."""
    print(f"preparing {args.task} ...", flush=True)
    _report(_prepare(args))
    return 0


def _prepare(args: argparse.Namespace) -> PreparedFiles:
    if args.task == "gsm8k":
        return prepare_gsm8k(args.train_file, args.test_file, args.output_dir, instruction=args.instruction)
    if args.task == "table":
        return prepare_table(
            args.train_file,
            args.output_dir,
            data_source=args.data_source,
            test_file=args.test_file,
            test_size=args.test_size,
            prompt=args.prompt,
            answer=args.answer,
            instruction=args.instruction,
            system=args.system,
            seed=args.seed,
        )
    if args.task == "multiplication":
        return prepare_multiplication(
            args.output_dir,
            train_size=args.train_size,
            test_size=args.test_size,
            digits_a=args.digits_a,
            digits_b=args.digits_b,
            seed=args.seed,
            prompt_template=args.prompt_template,
        )
    return prepare_countdown(
        args.output_dir,
        train_size=args.train_size,
        test_size=args.test_size,
        num_operands=args.num_operands,
        max_number=args.max_number,
        max_target=args.max_target,
        operators=args.operators,
        seed=args.seed,
        prompt_template=args.prompt_template,
        number_separator=args.number_separator,
    )


def _report(files: PreparedFiles) -> None:
    print(f"wrote {files.num_train} rows to {files.train_file}")
    print(f"wrote {files.num_test} rows to {files.test_file}")
    for reason, count in files.dropped.items():
        print(f"dropped {count} row{'s' * (count != 1)}: {reason}")
    prompt = files.first_row["prompt"][-1]["content"]
    print(f"the first prompt: {prompt}")
    print(f"its ground truth: {files.first_row['reward_model']['ground_truth']}")


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
