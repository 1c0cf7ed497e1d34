from pathlib import Path

import pytest

from hybridflow.checkpoint import Checkpoint
from hybridflow.config import load_config
from hybridflow.errors import CheckpointError
from hybridflow.trainers.run.run_identity import arithmetic_of, require_same_arithmetic, require_same_run, run_identity


@pytest.fixture
def model(tmp_path):
    def write(name="model", weights=b"weights"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        return tmp_path / name

    return write


@pytest.fixture
def continues(model):
    """Return a function that continues a run with some settings with others; the model of both has the same weights."""

    def run(before, now, kind="train", now_kind="", **changed_weights):
        identities = [
            run_identity(load_config(None, [f"model.path={model(name, **more)}", *changes]), of)
            for name, changes, of, more in (
                ("here", before, kind, {}),
                ("there", now, now_kind or kind, changed_weights),
            )
        ]
        require_same_run(Checkpoint(Path("runs/a/checkpoints/step_000020"), 20, identities[0], ()), identities[1])

    return run


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        ([], [], "train"),  # the model has moved
        (["model.dtype=float32"], [], "train"),
        (["model.dtype=bfloat16"], [], "train"),
        ([], ["algorithm.norm_by_std=false"], "sft"),
        ([], ["lora.alpha=8.0"], "train"),  # without adapters
    ],
)
def test_a_run_continues_itself(continues, caplog, before, now, kind):
    continues(before, now, kind)
    assert "dtype" not in caplog.text


def test_an_allowed_change_is_logged(continues, caplog):
    continues([], ["trainer.total_steps=9", "actor.optimizer.lr=1e-3"])
    assert "actor.optimizer.lr was 1e-06 and is 0.001; trainer.total_steps was 0 and is 9" in caplog.text


LORA = ["lora.rank=8"]
LAG = ["trainer.lag=1", "algorithm.rollout_weights=token"]


@pytest.mark.parametrize(
    ("before", "now", "options", "message"),
    [
        ([], [], {"weights": b"weight2"}, r"the model of model\.path differs from the one in '.*here'"),
        ([], [], {"kind": "sft", "now_kind": "train"}, "was made by `hybridflow sft`, so `hybridflow train` cannot"),
        ([], ["offline.average_log_probs=true"], {"kind": "dpo"}, r"offline\.average_log_probs was False and is True"),
        (LAG, ["trainer.lag=2", *LAG[1:]], {}, r"trainer\.lag was 1 and is 2"),
        (["trainer.stream=true"], [], {}, r"trainer\.stream was True and is False"),
        (LORA, [], {}, r"another run: lora\.rank was 8 and is 0\. Change it back"),
        (LORA, [*LORA, "lora.alpha=8.0"], {}, r"lora\.alpha was 32\.0 and is 8\.0"),
    ],
)
def test_another_run_is_not_continued(continues, before, now, options, message):
    with pytest.raises(CheckpointError, match=message):
        continues(before, now, **options)


def test_every_difference_of_the_algorithm_is_listed(continues):
    now = ["algorithm.norm_by_std=false", "algorithm.kl_in_loss=true", "model.dtype=bfloat16"]
    with pytest.raises(CheckpointError) as caught:
        continues(["model.dtype=float32"], now)
    assert str(caught.value) == (
        "'runs/a/checkpoints/step_000020' belongs to another run: model.dtype was 'float32' and is 'bfloat16'; "
        "algorithm.norm_by_std was True and is False; algorithm.kl_in_loss was False and is True. "
        "Change it back to continue, or choose another trainer.run_dir."
    )


def test_a_separate_reference_model_is_fixed(continues, model):
    kl = "algorithm.kl_in_loss=true"
    reference = model("reference", b"other")
    with pytest.raises(CheckpointError, match=r"the model of reference\.model_path differs from .*reference'"):
        continues([kl, f"reference.model_path={reference}"], [kl])


def test_a_key_newer_than_the_checkpoint_is_ignored(model):
    before, now = (run_identity(load_config(None, [f"model.path={model()}", *more]), "train") for more in ([], []))
    del before["config"]["algorithm.gamma"]
    now["config"]["algorithm.gamma"] = 0.5
    require_same_run(Checkpoint(Path("runs/a/checkpoints/step_000020"), 20, before, ()), now)


ARITHMETIC = {"device": "cpu", "processor": "one", "torch": "2", "threads": "1", "kernels": "compiled C", "build": "a"}


@pytest.fixture
def goes_on(model):
    """Return a function that continues a run whose workers computed otherwise, with changes of the configuration."""

    def run(before, now, *changes):
        first, second = (
            run_identity(load_config(None, [f"model.path={model()}", *more]), "train") for more in ([], changes)
        )
        first["arithmetic"] = arithmetic_of([ARITHMETIC | before])
        second["arithmetic"] = arithmetic_of([ARITHMETIC | now, ARITHMETIC | now])
        require_same_arithmetic(Checkpoint(Path("runs/a/checkpoints/step_000020"), 20, first, ()), second)

    return run


def test_a_run_does_not_go_on_with_other_kernels_unless_they_are_chosen(goes_on, caplog):
    pytorch = {"kernels": "PyTorch"}
    for before, now in (({}, pytorch), (pytorch, {})):
        with pytest.raises(CheckpointError, match=r"PyTorch.*same PATH.*with controller\.compiled_kernels=false"):
            goes_on(before, now)
    goes_on({}, {})
    assert not caplog.records
    goes_on({}, pytorch, "controller.compiled_kernels=false")
    assert "was computed with other rounding; kernels: compiled C, now PyTorch" in caplog.text


def test_another_processor_version_or_number_of_threads_is_logged(goes_on, caplog):
    goes_on({}, {"threads": "2", "build": "b", "torch": "3"})
    assert "torch: 2, now 3; threads: 1, now 2; build: a, now b" in caplog.text
    goes_on({}, {"processor": "other", "kernels": "PyTorch"})
    assert arithmetic_of([ARITHMETIC, ARITHMETIC | {"threads": "2"}]) == ARITHMETIC | {"threads": "1, 2"}
