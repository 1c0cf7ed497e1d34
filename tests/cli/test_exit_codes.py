import errno
import inspect
import os
import pickle

import pytest
from safetensors import SafetensorError

from hybridflow import errors
from hybridflow.cli.exit_codes import ExitCode, exit_code
from hybridflow.errors import CheckpointError, ConfigError, HybridFlowError, LostWorkerError, RewardError, WorkerError

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass)]


def raised_from(error, cause):
    error.__cause__ = cause
    return error


def test_every_error_class_has_the_code_of_its_base_and_survives_pickling():
    for cls in CLASSES:
        if issubclass(cls, ConfigError):
            assert exit_code(cls("what happened")) is ExitCode.USAGE
        elif issubclass(cls, LostWorkerError) or cls is errors.RunInUseError:
            assert exit_code(cls("what happened")) is ExitCode.AGAIN
        else:
            assert exit_code(cls("what happened")) is ExitCode.FAILED
        copy = pickle.loads(pickle.dumps(cls("what happened")))
        assert (type(copy), str(copy)) == (cls, "what happened")


@pytest.mark.ray
@pytest.mark.runs
def test_errors_of_ray_and_its_workers_keep_class_and_code():
    import ray.exceptions

    from hybridflow.controller.ray.transport import pack_error

    for cls in CLASSES:
        arrived = pack_error(cls("what happened"), "Actor.update", "actor", 1, "node").error()
        assert (type(arrived), exit_code(arrived)) == (cls, exit_code(cls("what happened")))
    full = raised_from(CheckpointError("cannot write"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    arrived = pack_error(full, "Actor.save", "actor", 1, "node").error()
    assert exit_code(raised_from(CheckpointError("not saved"), arrived)) is ExitCode.AGAIN
    for full in (ray.exceptions.OutOfDiskError("no room"), ray.exceptions.ObjectStoreFullError("no room")):
        assert exit_code(full) is ExitCode.AGAIN
        assert exit_code(raised_from(WorkerError("an argument does not fit"), full)) is ExitCode.AGAIN


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (type("OfUser", (RewardError,), {})(), ExitCode.FAILED),
        (type("OfUser", (ConfigError,), {})(), ExitCode.USAGE),
        (HybridFlowError(), ExitCode.FAILED),
        (ZeroDivisionError(), ExitCode.FAILED),
        (raised_from(WorkerError("failed"), ZeroDivisionError()), ExitCode.FAILED),
        (OSError(errno.EACCES, "Permission denied"), ExitCode.FAILED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (OSError(errno.ENAMETOOLONG, "too long", "a" * 5000), ExitCode.USAGE),
        (OSError(errno.ELOOP, "a loop", "a"), ExitCode.USAGE),
    ],
    ids=repr,
)
def test_the_code_of_an_error(error, code):
    assert exit_code(error) is code


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
