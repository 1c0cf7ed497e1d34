import logging
import subprocess
import sys

import pytest

from hybridflow.errors import ConfigError
from hybridflow.observability.log import get_logger, level_from_environment


def run(program, **environment):
    """Standard error of a fresh interpreter, where no test framework has added handlers."""
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


def test_messages_go_to_stderr_once_with_level_and_name():
    lines = run(SPEAK).splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(" INFO hybridflow.trainers.ppo: step 3")


def test_the_environment_sets_the_level_in_any_case():
    assert [line.split(": ")[1] for line in run(SPEAK, HYBRIDFLOW_LOGGING_LEVEL="DEBUG").splitlines()] == [
        "quiet",
        "step 3",
    ]
    assert run(SPEAK, HYBRIDFLOW_LOGGING_LEVEL="warning") == ""


def test_the_programs_own_logging_replaces_ours():
    shown = run("import logging; logging.basicConfig(level='INFO', format='mine %(message)s')\n" + SPEAK)
    assert shown.splitlines() == ["mine step 3", "mine not ours"]


def test_a_level_that_does_not_exist_is_a_clear_error(monkeypatch):
    monkeypatch.setenv("HYBRIDFLOW_LOGGING_LEVEL", "loud")
    with pytest.raises(
        ConfigError,
        match="HYBRIDFLOW_LOGGING_LEVEL='loud' is no level; use debug, info, warning, error or critical",
    ):
        level_from_environment()


def test_an_empty_level_is_the_default(monkeypatch):
    monkeypatch.setenv("HYBRIDFLOW_LOGGING_LEVEL", "")
    assert level_from_environment() == logging.INFO


def test_a_name_outside_the_package_still_logs_below_it():
    assert get_logger("my_script").name == "hybridflow.my_script"
    assert get_logger("hybridflow").name == "hybridflow"
