"""The table of commands, and the entry point that runs one of them and prints errors as one line on stderr.

A command is a module with `add_arguments(parser)` and `run(args) -> int`; its docstring is its help. A command that
trains also has `how_to_go_on(args) -> str`, the hint for an error after which the same command can be run again. `KEYS`
are the keys of a recipe that its help lists.
A command's module is imported only when it runs, so that `hybridflow --help` is fast.
"""

import argparse
import atexit
import errno
import gc
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from hybridflow import __version__
from hybridflow.cli.exit_codes import ExitCode, exit_code, exit_codes_text
from hybridflow.errors import HybridFlowError, LostWeightSyncError, WorkerError
from hybridflow.runtime.lenient_output import LenientOutput, open_standard_files

MAX_LINE_CHARS = 2000
"""Characters of a line of an error."""


class Command(NamedTuple):
    """Help text and example of a command."""

    help: str
    example: str


COMMANDS = {
    "init": Command("write a new task that runs at once", "init mytask"),
    "demo": Command("watch a small model learn, in minutes on a CPU", "demo"),
    "prepare": Command("write a dataset as parquet", "prepare countdown --output-dir data/countdown"),
    "sft": Command("train on given responses (SFT)", "sft recipes/countdown_sft.toml"),
    "dpo": Command("train on preferences by DPO or IPO", "dpo recipes/rlhf/dpo.toml"),
    "reward-model": Command("train a reward model on preferences", "reward-model recipes/rlhf/reward_model.toml"),
    "train": Command("train by reinforcement learning", "train recipes/countdown_grpo.toml actor.optimizer.lr=1e-5"),
    "generate": Command(
        "write responses to prompts",
        'generate recipes/countdown_grpo.toml --prompt "12 5 3 => 10 :"',
    ),
    "evaluate": Command("score a model on the validation data", "evaluate --run runs/countdown/grpo"),
    "serve": Command("serve a model to agents at a base URL", "serve runs/countdown/grpo --record served"),
    "export": Command("save a checkpoint as a Hugging Face model", "export runs/countdown/grpo exported/"),
    "graph": Command("show the dataflow of a recipe", "graph recipes/countdown_ppo.toml"),
    "memory": Command("estimate the memory of a run on each rank", "memory recipes/gpu/one_gpu.toml"),
    "replay": Command("learn a step of a run again", "replay runs/countdown/grpo --step 12 actor.optimizer.lr=1e-5"),
    "bisect": Command(
        "find the step and the samples that lost a run",
        "bisect runs/countdown/grpo --metric val/score/mean --below 0.5",
    ),
    "certify": Command("check that runs of a recipe repeat bit for bit", "certify recipes/countdown_grpo.toml --quick"),
    "report-performance": Command(
        "show the transfers of a run", "report-performance runs/countdown/grpo --steps 10-20"
    ),
    "timeline": Command("show what steps waited for", "timeline runs/countdown/grpo --output trace.json"),
    "diagnose": Command("say what is wrong with a run, and what to change", "diagnose runs/countdown/grpo"),
    "report": Command("write a page that shows a run", "report runs/countdown/grpo"),
    "watch": Command("show the page of a run while it goes on", "watch runs/countdown/grpo"),
    "runs": Command("list the runs of a directory", "runs runs --sort written"),
    "compare": Command("show what differs between two runs", "compare runs/countdown/grpo runs/countdown/ppo"),
    "convert-config": Command("make a recipe of a configuration of verl", "convert-config verl.yaml"),
    "check-template": Command(
        "check whether a chat template serves episodes", "check-template models/Qwen3-0.6B --tools tools.py:Calculator"
    ),
    "check-model": Command(
        "check whether a family of models computes as in transformers", "check-model models/Qwen2.5-7B --ranks 2"
    ),
    "doctor": Command("check this machine before a run", "doctor --dir runs"),
    "config": Command("show the configuration of a run, or all keys", "config recipes/countdown_grpo.toml"),
}


def module_of(name: str) -> ModuleType:
    """Import the module of a command and return it; it has the name of the command."""
    return import_module(f"hybridflow.cli.{name.replace('-', '_')}")


def command() -> int:
    """Run `main` as all that this process does."""
    open_standard_files()
    status = main()
    if status == ExitCode.INTERRUPTED:  # threads of native code may abort when the interpreter ends beside them
        atexit._run_exitfuncs()
        os._exit(status)
    gc.freeze()  # the collector's last look at half a million objects of modules would take a second
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hybridflow ARGV...` and return its exit status; `hybridflow.cli.exit_codes` has one for each error.

    An error that is neither a HybridFlowError nor caused by lack of disk space, by a path that cannot exist or by the
    permissions of a file is raised, with its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = outputs = LenientOutput(sys.stdout), LenientOutput(sys.stderr)
    try:
        status = _status(arguments)
        outputs[0].flush()
        return status if outputs[0].error is None else _status_of_lost_output(outputs[0].error, status, arguments)
    finally:
        sys.stdout, sys.stderr = streams
        for output in outputs:
            output.flush()
            if output.error is not None:
                output.discard()


def _status(arguments: list[str]) -> int:
    interrupts: list[int] = []
    try:
        with _raising_interrupts(interrupts):
            return _run(arguments)
    except (KeyboardInterrupt, Exception) as error:
        if interrupts or isinstance(error, KeyboardInterrupt):  # an import may have made it another error
            print("interrupted", file=sys.stderr)
            return ExitCode.INTERRUPTED
        code = exit_code(error)
        if not isinstance(error, HybridFlowError | PermissionError) and code is ExitCode.FAILED:
            raise
        _print_error(error)
        if code is ExitCode.AGAIN and arguments and hasattr(module := module_of(arguments[0]), "how_to_go_on"):
            print(module.how_to_go_on(_arguments_of(module, arguments)), file=sys.stderr)
        return code


def _status_of_lost_output(error: Exception, status: int, arguments: list[str]) -> int:
    """Return the exit status of a command whose output could not be written.

    A run has files, and `hybridflow config --reference | head` closes the pipe early; a full disk has lost a result.
    """
    if not status and hasattr(module_of(arguments[0]), "how_to_go_on"):
        print(f"stdout could not be written ({error}): the files of the run have everything", file=sys.stderr)
    elif not status and not isinstance(error, BrokenPipeError) and getattr(error, "errno", None) != errno.EIO:
        _print_error(error)
        return exit_code(error)
    return status


@contextmanager
def _raising_interrupts(seen: list[int]) -> Iterator[None]:
    """Make SIGINT and SIGTERM raise KeyboardInterrupt, and note them in `seen`.

    Not one that is ignored or has a handler, and not outside the main thread. Cleanup then runs as after Ctrl-C.
    Training loops have a handler of their own.
    """

    def interrupt(number: int, _: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number, handler in defaults.items() if is_main and signal.getsignal(number) == handler]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, defaults[number])


def _print_error(error: Exception) -> None:
    is_expected = isinstance(error, LostWeightSyncError)  # another process was lost; the message says which
    if isinstance(error, WorkerError) and error.__cause__ is not None and not is_expected:
        traceback.print_exception(error.__cause__)  # an unexpected error of a worker needs its traceback
    text = f"error: {error}".encode(errors="backslashreplace").decode()  # names of files may not be UTF-8
    print("\n".join(map(_shortened, text.split("\n"))), file=sys.stderr)
    if os.environ.get("HYBRIDFLOW_LOGGING_LEVEL", "").lower() == "debug":
        from hybridflow.runtime.observe.log import get_logger

        get_logger(__name__).debug("where it was raised:", exc_info=error)


def _shortened(line: str) -> str:
    """Return a line without its middle if it is too long, for example by the name of a file."""
    half = MAX_LINE_CHARS // 2
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:half]} ... {line[-half:]}"


def _run(arguments: list[str]) -> int:
    name = next((a for a in arguments if not a.startswith("-")), None)
    parser = _main_parser()
    if name is None or arguments[0] != name:
        parser.parse_args(arguments)  # exits for --help, --version and unknown options
        parser.print_help()
        return ExitCode.USAGE
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}."
        parser.error(f"{name!r} is not a command; {hint}")
    module = module_of(name)
    return module.run(_arguments_of(module, arguments))


def _arguments_of(module: ModuleType, arguments: list[str]) -> argparse.Namespace:
    name, keys = arguments[0], ""
    if hasattr(module, "KEYS") and {"-h", "--help"} & {*arguments}:
        from hybridflow.config.render import keys_text

        keys = f"keys that matter most; `hybridflow config --reference` lists all:\n{keys_text(module.KEYS)}\n\n"
    parser = argparse.ArgumentParser(
        prog=f"hybridflow {name}",
        description=module.__doc__,
        epilog=f"{keys}example: hybridflow {COMMANDS[name].example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return _parse(parser, arguments[1:])


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Parse options that stand anywhere among the overrides of a recipe; a command with subcommands takes none."""
    if any(action.dest == "overrides" for action in parser._actions):
        for argument in arguments:
            if dashed := re.match(r"--?([a-z_]+\.[a-z_.]+)(=.*)?$", argument, re.DOTALL):
                override = f"{dashed[1]}{dashed[2] or '=VALUE'}"
                parser.error(f"{argument} is not an option: overrides are written without dashes: {override}")
    has_commands = any(action.nargs == argparse.PARSER for action in parser._actions)
    return parser.parse_args(arguments) if has_commands else parser.parse_intermixed_args(arguments)


def _main_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    examples = "\n".join(f"  hybridflow {command.example}" for command in COMMANDS.values())
    parser = argparse.ArgumentParser(
        prog="hybridflow",
        usage="hybridflow COMMAND ...",
        description="Reinforcement-learning post-training of language models.\n\ncommands:\n" + listed,
        epilog=f"examples:\n{examples}\n\nexit status:\n{exit_codes_text()}\n\n"
        "`hybridflow COMMAND --help` explains a command. Recipes are TOML files; section.key=value overrides a key.\n"
        "HYBRIDFLOW_LOGGING_LEVEL=debug shows more log messages.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hybridflow {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
