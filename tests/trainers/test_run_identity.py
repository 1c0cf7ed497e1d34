from pathlib import Path

import pytest

from hybridflow.checkpoint import Checkpoint
from hybridflow.config import load_config
from hybridflow.errors import CheckpointError
from hybridflow.trainers.run_identity import require_same_run, run_identity


@pytest.fixture
def model(tmp_path):
    """Return a function that writes a model directory with given weights."""

    def write(name="model", weights=b"weights"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        return tmp_path / name

    return write


def identity(model, *overrides, kind="train"):
    return run_identity(load_config(None, [f"model.path={model}", *overrides]), kind)


def continues(before, now):
    require_same_run(Checkpoint(Path("runs/a/checkpoints/step_000020"), 20, before, ()), now)


def test_a_run_continues_itself(model):
    path = model()
    continues(identity(path), identity(path))


def test_an_allowed_change_is_logged(model, caplog):
    path = model()
    continues(identity(path), identity(path, "trainer.total_steps=9", "actor.optimizer.lr=1e-3"))
    assert "actor.optimizer.lr was 1e-06 and is 0.001; trainer.total_steps was 0 and is 9" in caplog.text


def test_every_difference_of_the_algorithm_is_listed(model):
    path = model()
    now = identity(path, "algorithm.norm_by_std=false", "algorithm.kl_in_loss=true", "model.dtype=bfloat16")
    with pytest.raises(CheckpointError) as caught:
        continues(identity(path, "model.dtype=float32"), now)
    assert str(caught.value) == (
        "'runs/a/checkpoints/step_000020' belongs to another run: model.dtype was 'float32' and is 'bfloat16'; "
        "algorithm.norm_by_std was True and is False; algorithm.kl_in_loss was False and is True. "
        "Change it back to continue, or choose another trainer.run_dir."
    )


def test_the_order_of_batches_cannot_change(model):
    before, now = identity(model()), identity(model("again"))
    now["config"]["rollout.order"] = "ready"
    with pytest.raises(CheckpointError, match=r"rollout\.order was 'sampled' and is 'ready'"):
        continues(before, now)


def test_the_dtype_auto_continues_a_run_of_any_dtype(model, caplog):
    path = model()
    for dtype in ("float32", "bfloat16"):
        continues(identity(path, f"model.dtype={dtype}"), identity(path))
    assert not caplog.records


def test_a_model_may_move_but_not_change(model):
    before = identity(model("here"))
    continues(before, identity(model("there")))
    with pytest.raises(CheckpointError, match=r"the model of model\.path differs from the one in '.*here'"):
        continues(before, identity(model("other", b"weight2")))


def test_a_separate_reference_model_is_fixed(model):
    path, reference = model(), model("reference", b"other")
    before = identity(path, "algorithm.kl_in_loss=true", f"reference.model_path={reference}")
    with pytest.raises(
        CheckpointError, match=r"the model of reference\.model_path differs from the one in '.*reference'"
    ):
        continues(before, identity(path, "algorithm.kl_in_loss=true"))


def test_an_sft_run_ignores_algorithm_keys(model):
    path = model()
    continues(identity(path, kind="sft"), identity(path, "algorithm.norm_by_std=false", kind="sft"))
    with pytest.raises(CheckpointError, match="was made by `hybridflow sft`, so `hybridflow train` cannot continue it"):
        continues(identity(path, kind="sft"), identity(path))


def test_a_dpo_run_keeps_averaging_or_summing_log_probs(model):
    path = model()
    with pytest.raises(CheckpointError, match=r"offline\.average_log_probs was False and is True"):
        continues(identity(path, kind="dpo"), identity(path, "offline.average_log_probs=true", kind="dpo"))


def test_a_key_newer_than_the_checkpoint_is_ignored(model):
    path = model()
    before = identity(path)
    del before["config"]["algorithm.gamma"]
    continues(before, identity(path, "algorithm.gamma=0.5"))


def test_lora_keys_are_fixed_only_with_adapters(model):
    path = model()
    with pytest.raises(CheckpointError, match=r"another run: lora\.rank was 8 and is 0\. Change it back"):
        continues(identity(path, "lora.rank=8"), identity(path))
    with pytest.raises(CheckpointError, match=r"lora\.alpha was 32\.0 and is 8\.0"):
        continues(identity(path, "lora.rank=8"), identity(path, "lora.rank=8", "lora.alpha=8.0"))
    continues(identity(path), identity(path, "lora.alpha=8.0"))
