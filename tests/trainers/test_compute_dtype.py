import json

import pytest

from hybridflow.config import load_config
from hybridflow.errors import CheckpointError
from hybridflow.trainers import compute_dtype
from hybridflow.trainers.compute_dtype import settle_dtype


@pytest.fixture
def settle(tmp_path, monkeypatch):
    """Return a function that settles the dtype of the run directory `run` on pretended devices."""

    def build(has_bfloat16, *overrides, **options):
        monkeypatch.setattr(compute_dtype, "gpu_has_bfloat16", lambda: has_bfloat16)
        return settle_dtype(load_config(None, [f"trainer.run_dir={tmp_path}/run", *overrides]), **options).model.dtype

    return build


def record(directory, dtype, *, with_checkpoint=True):
    """Write the files of a run whose last start recorded `dtype`."""
    (directory / "checkpoints" / "step_000002").mkdir(parents=True)
    if not with_checkpoint:
        (directory / "checkpoints" / "step_000002").rmdir()
    starts = [{"config": {"model.dtype": "float64"}}, {"config": {"model.dtype": dtype}}]
    (directory / "run.json").write_text(json.dumps({"starts": starts}))


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(None, "float32"), (True, "bfloat16"), (False, "float32")])
def test_auto_is_bfloat16_on_gpus_that_compute_in_it(settle, has_bfloat16, dtype):
    assert settle(has_bfloat16) == dtype


def test_a_gpu_without_bfloat16_is_logged(settle, caplog):
    settle(None)
    settle(True)
    assert not caplog.records
    settle(False)
    assert "model.dtype='auto' is float32 here: the GPUs do not compute in bfloat16" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_configured_dtype_is_kept_on_every_device(settle, dtype):
    assert [settle(has, f"model.dtype={dtype}") for has in (None, True, False)] == [dtype] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_keeps_its_dtype_on_other_devices(settle, tmp_path, dtype):
    record(tmp_path / "run", dtype)
    assert [settle(has) for has in (None, True, False)] == [dtype] * 3


def test_generation_uses_the_dtype_of_its_devices(settle, tmp_path):
    record(tmp_path / "run", "float32")
    assert settle(True, resumes=False) == "bfloat16"


def test_a_run_without_checkpoint_starts_anew(settle, tmp_path):
    record(tmp_path / "run", "bfloat16", with_checkpoint=False)
    assert settle(None) == "float32"


def test_a_damaged_record_is_an_error(settle, tmp_path):
    record(tmp_path / "run", "bfloat16")
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json' is damaged"):
        settle(None)


@pytest.mark.parametrize("starts", [[], ["x"], [{}], [{"config": None}], [{"config": {"model.dtype": "auto"}}]])
def test_a_record_without_dtype_is_ignored(settle, tmp_path, starts):
    record(tmp_path / "run", "bfloat16")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"starts": starts}))
    assert settle(True) == "bfloat16"
