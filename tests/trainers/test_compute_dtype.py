import json
from datetime import date, timedelta

import pytest

from hybridflow.config import load_config
from hybridflow.errors import CheckpointError
from hybridflow.trainers.build import preconditions
from hybridflow.trainers.build.preconditions import settle_auto

DEVICES = (None, True, False)
"""No GPUs, GPUs with bfloat16, GPUs without it."""


@pytest.fixture
def settle(tmp_path, monkeypatch):
    def build(has_bfloat16, *overrides, **options):
        monkeypatch.setattr(preconditions, "gpu_has_bfloat16", lambda: has_bfloat16)
        return settle_auto(load_config(None, [f"trainer.run_dir={tmp_path}/run", *overrides]), **options).model.dtype

    return build


@pytest.fixture
def record(tmp_path):
    def write(*dtypes, starts=None):
        (tmp_path / "run" / "checkpoints" / "step_000002").mkdir(parents=True, exist_ok=True)
        starts = [{"config": {"model.dtype": dtype}} for dtype in dtypes] if starts is None else starts
        (tmp_path / "run" / "run.json").write_text(json.dumps({"starts": starts}))
        return tmp_path / "run"

    return write


def test_auto_is_bfloat16_on_gpus_that_compute_in_it(settle, monkeypatch, caplog):
    monkeypatch.setattr(preconditions, "cpu_has_bfloat16", lambda: False)
    assert [settle(has) for has in DEVICES[:2]] == ["float32", "bfloat16"]
    assert not caplog.records
    monkeypatch.setattr(preconditions, "cpu_has_bfloat16", lambda: True)
    assert settle(None) == "float32"
    assert "is float32 on a CPU; this one has bfloat16" in caplog.text
    assert settle(False) == "float32"
    assert "model.dtype='auto' is float32 here: the GPUs do not compute in bfloat16" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_configured_or_recorded_dtype_is_kept_on_every_device(settle, record, dtype):
    assert [settle(has, f"model.dtype={dtype}") for has in DEVICES] == [dtype] * 3
    record("float16", dtype)
    assert [settle(has) for has in DEVICES] == [dtype] * 3


def test_generation_and_a_run_without_checkpoint_start_anew(settle, record):
    directory = record("float32")
    assert settle(True, resumes=False) == "bfloat16"
    (directory / "checkpoints" / "step_000002").rmdir()
    assert settle(True) == "bfloat16"


@pytest.mark.parametrize("starts", [[], ["x"], [{}], [{"config": None}], [{"config": {"model.dtype": "auto"}}]])
def test_a_record_without_dtype_is_ignored_and_a_damaged_one_an_error(settle, record, starts):
    directory = record(starts=starts)
    assert (settle(True), settle(None)) == ("bfloat16", "float32")
    (directory / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json' is damaged"):
        settle(None)


def test_a_template_that_reads_the_clock_keeps_the_date_of_the_start(record, tmp_path):
    """Other templates record no date, so that equal runs of two days stay equal."""

    def settled(*overrides):
        paths = (f"trainer.run_dir={tmp_path}/run", f"model.path={tmp_path}/model", "model.dtype=float32")
        return settle_auto(load_config(None, [*paths, *overrides])).data.date

    (tmp_path / "model").mkdir()
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
    assert settled() == "auto"
    judged = f"reward.model_path={tmp_path}/judge"
    assert settled(judged) in {str(date.today()), str(date.today() - timedelta(days=1))}
    record(starts=[{"config": {"data.date": "2020-02-03"}}])
    assert (settled(judged), settled(judged, "data.date=2021-02-03")) == ("2020-02-03", "2021-02-03")
