"""Runs whose model and data are on the hub: they equal runs of local files, and keep their revision."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import hybridflow
from fixtures import tiny_run
from fixtures.hub import TOKEN
from hybridflow.cli.main import main
from hybridflow.errors import CheckpointConfigError, CheckpointError
from hybridflow.runtime.observe import read_jsonl

pytestmark = [
    pytest.mark.runs,
    pytest.mark.own_run("grpo: its model and its prompts are on the hub"),
    pytest.mark.usefixtures("restores_the_process"),
]
NAMES = ("model.path=owner/model", "data.train_files=['hf://datasets/owner/rows/train.parquet']", "data.val_files=[]")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return tiny_run.write_task(tmp_path_factory.mktemp("hub") / "task")


@pytest.fixture
def published(hub, task):
    """Return the stand-in with the model and the prompts of the task, and their revisions."""
    data = {"train.parquet": (task / "train.parquet").read_bytes()}
    return hub, hub.add("models/owner/model", task / "model"), hub.add("datasets/owner/rows", data)


def train(task, *overrides):
    return main(["train", str(task / "rl.toml"), "trainer.run_dir=run", "trainer.total_steps=2", *overrides])


def losses(directory="run"):
    return [row["actor/loss"] for row in read_jsonl(Path(directory) / "metrics.jsonl") if row["step"] > 0]


def check_commands(task, capsys):
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(constants, "HF_HUB_OFFLINE", True)
        assert main(["generate", "--run", "run", "--prompt", "3 4 7"]) == 0
        assert "response" in capsys.readouterr().out
        assert main(["export", "run", "exported"]) == 0
        card = Path("exported/README.md").read_text("utf-8")
        assert "base_model: owner/model\n" in card
        assert "# owner/model, trained with hybridflow" in card
        trained, initial = load_file("exported/model.safetensors"), load_file(task / "model/model.safetensors")
        assert trained.keys() == initial.keys()
        assert main(["replay", "run", "--step", "2"]) == 0


def test_a_run_of_the_hub_equals_one_of_local_files_and_keeps_its_revision(published, task, capsys):
    hub, model, data = published
    assert train(task, "trainer.run_dir=local", "data.val_files=[]") == 0
    assert train(task, *NAMES) == 0
    assert losses() == losses("local")
    check_commands(task, capsys)
    text = Path("run/config.toml").read_text("utf-8")
    assert f'path = "owner/model@{model}"' in text
    assert f'"hf://datasets/owner/rows@{data}/train.parquet"' in text
    start = json.loads(Path("run/run.json").read_text("utf-8"))["starts"][-1]
    assert start["config"]["model.path"] == f"owner/model@{model}"

    other = {**{path.name: path.read_bytes() for path in (task / "model").iterdir()}, "config.json": b"{}"}
    hub.add("models/owner/model", other)  # the main branch moves on
    hub.add("datasets/owner/rows", {"train.parquet": b""})
    assert train(task, *NAMES, "trainer.total_steps=3") == 0
    assert train(task, "trainer.run_dir=local", "data.val_files=[]", "trainer.total_steps=3") == 0
    assert losses() == losses("local")
    assert f'path = "owner/model@{model}"' in Path("run/config.toml").read_text("utf-8")


def test_a_model_whose_repository_wants_to_run_code_runs_none(hub, task, capsys):
    files = {path.name: path.read_bytes() for path in (task / "model").iterdir()}
    config = json.loads(files["config.json"]) | {
        "model_type": "own",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoModelForCausalLM": "modeling.OwnModel", "AutoConfig": "modeling.OwnConfig"},
    }
    code = b"open('executed', 'w')\n"
    hub.add("models/owner/model", {**files, "config.json": json.dumps(config).encode(), "modeling.py": code})
    assert train(task, "model.path=owner/model") != 0
    assert "model_type='own'" in capsys.readouterr().err
    assert not Path("executed").exists()


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # inside huggingface_hub
def test_an_export_is_uploaded_or_fails_before_or_after_it(published, task, capsys, monkeypatch):
    hub, _, _ = published
    assert train(task, *NAMES, "trainer.total_steps=1") == 0
    for name, token, message in (
        ("owner/trained", None, r"needs a token of the hub; log in with `hf auth login`, or set HF_TOKEN"),
        ("owner/trained", "wrong", r"cannot be created .*the token has no right to write there"),
        ("trained", TOKEN, r"'trained' is invalid: expected OWNER/NAME"),
    ):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(CheckpointConfigError, match=message):
            hybridflow.open_run("run").export("exported", push_to_hub=name)
        assert not Path("exported").exists()

    assert main(["export", "run", "exported", "--push-to-hub", "owner/trained", "--private"]) == 0
    assert f"uploaded: {hub.url}/owner/trained" in capsys.readouterr().out
    repository = hub.repositories["models/owner/trained"]
    assert repository.private
    files = repository.commits[repository.branches["main"]]
    assert files == {path.name: path.read_bytes() for path in Path("exported").iterdir()}
    assert b"base_model: owner/model\n" in files["README.md"]
    assert train(task, "trainer.run_dir=again", "model.path=owner/trained", "trainer.total_steps=1") == 0

    monkeypatch.setattr(
        "hybridflow.cli.api.run.require_upload", lambda *_, **__: None
    )  # as if the right was lost since
    hub.refuses_writes = True
    with pytest.raises(CheckpointError, match=r"'kept' is complete, .*`hf upload owner/trained kept`"):
        hybridflow.open_run("run").export("kept", push_to_hub="owner/trained")
    assert Path("kept/model.safetensors").is_file()
