import logging
import os
import subprocess
import sys

import pytest

from hybridflow.errors import ConfigError
from hybridflow.runtime.observe.log import get_logger, level_from_environment


def run(*programs, **environment):
    """Return the lines on standard error of a new interpreter, which has no handlers of the test framework."""
    command = [sys.executable, "-W", "error", "-c", "\n".join(programs)]
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"], **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == ""
    return done.stderr.splitlines()


SPEAK = (
    "from hybridflow.runtime.observe.log import get_logger\n"
    "logger = get_logger('hybridflow.trainers.ppo'); get_logger('hybridflow.other')\n"
    "logger.debug('quiet'); logger.info('step %d', 3)\n"
    "import logging; logging.getLogger('elsewhere').info('not ours')\n"
)


@pytest.mark.runs
@pytest.mark.own_run("grpo: looks at the standard error of a process")
def test_messages_are_on_stderr_once_at_the_chosen_level():
    (line,) = run(SPEAK)
    assert line.endswith(" INFO hybridflow.trainers.ppo: step 3")
    assert [line.split(": ")[1] for line in run(SPEAK, HYBRIDFLOW_LOGGING_LEVEL="DEBUG")] == ["quiet", "step 3"]
    assert run(SPEAK, HYBRIDFLOW_LOGGING_LEVEL="warning") == []
    own_handler = "import logging; logging.basicConfig(level='INFO', format='mine %(message)s')"
    assert run(own_handler, SPEAK) == ["mine step 3", "mine not ours"]


def test_a_level_is_known_and_a_logger_is_below_the_package(monkeypatch):
    monkeypatch.setenv("HYBRIDFLOW_LOGGING_LEVEL", "loud")
    message = "HYBRIDFLOW_LOGGING_LEVEL='loud' is not a log level; use debug, info, warning, error or critical"
    with pytest.raises(ConfigError, match=message):
        level_from_environment()
    for text, level in (("", logging.INFO), ("Error", logging.ERROR), ("debug", logging.DEBUG)):
        monkeypatch.setenv("HYBRIDFLOW_LOGGING_LEVEL", text)
        assert level_from_environment() == level
    names = ("my_script", "hybridflow")
    assert [get_logger(name).name for name in names] == ["hybridflow.my_script", "hybridflow"]
