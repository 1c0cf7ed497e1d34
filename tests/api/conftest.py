"""Runs of these tests are built in this process, whose random state they set."""

import pytest

from hybridflow.runtime import capture_random_state, restore_random_state


@pytest.fixture(autouse=True)
def keep_random_state():
    state = capture_random_state()
    yield
    restore_random_state(state)
