from pathlib import Path

import pytest

from hybridflow.checkpoint import Checkpoint
from hybridflow.checkpoint.model_fingerprint import model_fingerprint, require_same_base
from hybridflow.errors import CheckpointError


def test_fingerprint_of_large_file_detects_change_at_start_and_end(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    with open(file, "wb") as handle:
        handle.truncate(200 << 20)  # a hole: no disk is used
    whole = model_fingerprint(tmp_path)
    seen = {whole}
    for offset in (0, 100, (200 << 20) * 63 // 64):
        with open(file, "r+b") as handle:
            handle.seek(offset)
            handle.write(b"x")
        seen.add(model_fingerprint(tmp_path))
    assert len(seen) == 4


def test_adapters_require_the_base_model_of_their_training(tmp_path):
    for name, weights in (("base", b"1"), ("copy", b"1"), ("other", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    info = {"models": {"model.path": model_fingerprint(tmp_path / "base")}, "config": {"model.path": "runs/base"}}
    checkpoint = Checkpoint(Path("step_000003"), 3, info, ())
    require_same_base(checkpoint, tmp_path / "copy")
    with pytest.raises(
        CheckpointError, match=r"adapters of 'step_000003' .*different base model than .*other.*'runs/base'"
    ):
        require_same_base(checkpoint, tmp_path / "other")
    require_same_base(Checkpoint(Path("step_000003"), 3, {}, ()), tmp_path / "other")  # no fingerprint recorded
