import errno
import inspect
import os
import pickle
from pathlib import Path

import pytest
from safetensors import SafetensorError

from hybridflow import errors
from hybridflow.cli.exit_codes import CODES, ExitCode, exit_code, exit_codes_markdown
from hybridflow.errors import CheckpointError, ConfigError, HybridFlowError, LostWorkerError, RewardError, WorkerError

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass)]
PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def raised_from(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_class_has_a_code(cls):
    assert cls in CODES


@pytest.mark.parametrize("cls", CLASSES)
def test_the_code_follows_from_the_base_classes(cls):
    if issubclass(cls, ConfigError):
        assert CODES[cls] is ExitCode.USAGE
    elif issubclass(cls, LostWorkerError):
        assert CODES[cls] is ExitCode.AGAIN
    else:
        assert CODES[cls] is (ExitCode.AGAIN if cls is errors.RunInUseError else ExitCode.FAILED)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_class_survives_pickling(cls):
    copy = pickle.loads(pickle.dumps(cls("what happened")))
    assert type(copy) is cls
    assert str(copy) == "what happened"


@pytest.mark.ray
@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_of_a_ray_worker_keeps_class_and_code(cls):
    from hybridflow.controller.ray.transport import pack_error

    arrived = pack_error(cls("what happened"), "Actor.update", "actor", 1, "node").error()
    assert type(arrived) is cls
    assert exit_code(arrived) is CODES[cls]


@pytest.mark.ray
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_of_a_ray_worker_is_found_in_the_causes(number):
    from hybridflow.controller.ray.transport import pack_error

    full = raised_from(CheckpointError("cannot write"), OSError(number, os.strerror(number)))
    arrived = pack_error(full, "Actor.save", "actor", 1, "node").error()
    assert exit_code(raised_from(CheckpointError("not saved"), arrived)) is ExitCode.AGAIN


@pytest.mark.ray
@pytest.mark.parametrize("name", ["OutOfDiskError", "ObjectStoreFullError"])
def test_a_full_object_store_counts_as_lack_of_space(name):
    import ray.exceptions

    full = getattr(ray.exceptions, name)("no room")
    assert exit_code(full) is ExitCode.AGAIN
    assert exit_code(raised_from(WorkerError("an argument does not fit"), full)) is ExitCode.AGAIN


def test_a_user_defined_error_has_the_code_of_its_base():
    class JudgeIsGone(RewardError):
        pass

    class TypingError(ConfigError):
        pass

    assert exit_code(JudgeIsGone()) is ExitCode.FAILED
    assert exit_code(TypingError()) is ExitCode.USAGE
    assert exit_code(HybridFlowError()) is ExitCode.FAILED


def test_an_unexpected_error_is_a_failed_run():
    assert exit_code(ZeroDivisionError()) is ExitCode.FAILED
    assert exit_code(raised_from(WorkerError("failed"), ZeroDivisionError())) is ExitCode.FAILED
    assert exit_code(OSError(errno.EACCES, "Permission denied")) is ExitCode.FAILED
    assert exit_code(KeyboardInterrupt()) is ExitCode.INTERRUPTED


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.ELOOP])
def test_a_path_that_cannot_exist_is_a_usage_error(number):
    assert exit_code(OSError(number, os.strerror(number), "a" * 5000)) is ExitCode.USAGE


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_lack_of_space_is_found_in_the_chain_of_causes(number):
    full = OSError(number, os.strerror(number))
    assert exit_code(full) is ExitCode.AGAIN
    assert exit_code(raised_from(CheckpointError("not saved"), full)) is ExitCode.AGAIN
    assert exit_code(raised_from(ConfigError("the directory cannot be written"), full)) is ExitCode.AGAIN
    safetensors = SafetensorError(f"Error while serializing: I/O error: it is full (os error {number})")
    twice = raised_from(CheckpointError("not saved"), raised_from(CheckpointError("cannot write"), safetensors))
    assert exit_code(twice) is ExitCode.AGAIN


def test_a_cyclic_chain_of_causes_ends():
    error = RewardError("a ring")
    assert exit_code(raised_from(error, raised_from(KeyError(), error))) is ExitCode.FAILED


def test_the_table_in_the_documentation_equals_the_code():
    assert f"\n{exit_codes_markdown()}\n" in PAGE.read_text("utf-8")
