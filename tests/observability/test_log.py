import logging
import subprocess
import sys

import pytest

from hybridflow.errors import ConfigError
from hybridflow.observability.log import get_logger, level_from_environment


def run(program, **environment):
    """Return the standard error of a new interpreter, which has no handlers of the test framework."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), **environment},
    )
    assert done.stdout == ""
    return done.stderr


SPEAK = (
    "from hybridflow.observability.log import get_logger\n"
    "logger = get_logger('hybridflow.trainers.ppo'); get_logger('hybridflow.other')\n"
    "logger.debug('quiet'); logger.info('step %d', 3)\n"
    "import logging; logging.getLogger('elsewhere').info('not ours')\n"
)


def test_messages_are_on_stderr_once_with_level_and_name():
    lines = run(SPEAK).splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(" INFO hybridflow.trainers.ppo: step 3")


def test_environment_sets_the_level_in_any_letter_case():
    assert [line.split(": ")[1] for line in run(SPEAK, HYBRIDFLOW_LOGGING_LEVEL="DEBUG").splitlines()] == [
        "quiet",
        "step 3",
    ]
    assert run(SPEAK, HYBRIDFLOW_LOGGING_LEVEL="warning") == ""


def test_handlers_of_the_program_replace_the_default_handler():
    shown = run("import logging; logging.basicConfig(level='INFO', format='mine %(message)s')\n" + SPEAK)
    assert shown.splitlines() == ["mine step 3", "mine not ours"]


def test_unknown_level_is_an_error_with_the_valid_levels(monkeypatch):
    monkeypatch.setenv("HYBRIDFLOW_LOGGING_LEVEL", "loud")
    with pytest.raises(
        ConfigError,
        match="HYBRIDFLOW_LOGGING_LEVEL='loud' is not a log level; use debug, info, warning, error or critical",
    ):
        level_from_environment()


def test_an_empty_level_is_the_default(monkeypatch):
    monkeypatch.setenv("HYBRIDFLOW_LOGGING_LEVEL", "")
    assert level_from_environment() == logging.INFO


def test_logger_of_another_name_is_below_the_package():
    assert get_logger("my_script").name == "hybridflow.my_script"
    assert get_logger("hybridflow").name == "hybridflow"
