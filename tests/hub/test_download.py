import errno
import json
import threading
from pathlib import Path

import pytest

from hybridflow.config import load_config, to_toml
from hybridflow.errors import CheckpointConfigError, DataConfigError, ModelConfigError
from hybridflow.hub import local_file, with_local_files, with_names

MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"raise SystemExit",
    "tokenizer.json": b"{}",
    "onnx/config.json": b"{}",
}
DATA = {
    "data/train-0.jsonl": b'{"prompt": "a", "answer": "b"}\n',
    "data/train-1.jsonl": b'{"prompt": "c", "answer": "d"}\n',
    "README.md": b"# data",
}


def config_of(*overrides):
    return load_config(None, ["trainer.run_dir=run", *overrides])


def test_a_model_is_downloaded_without_code_pickles_and_other_formats(hub):
    revision = hub.add("models/owner/model", MODEL)
    config = with_local_files(config_of("model.path=owner/model"))
    files = {str(path) for path in _files(config.model.path)}
    assert files == {"config.json", "model.safetensors", "tokenizer.json"}
    assert config.model.path.endswith(revision)
    assert with_names(config).model.path == f"owner/model@{revision}"


def test_every_model_and_data_file_may_be_on_the_hub(hub):
    hub.add("models/owner/model", MODEL)
    hub.add("models/owner/critic", MODEL)
    data = hub.add("datasets/owner/rows", DATA)
    keys = ("critic.model_path", "reference.model_path", "reward.model_path", "teacher.model_path")
    given = [f"{key}=owner/critic" for key in keys]
    files = ["hf://datasets/owner/rows/data/train-*.jsonl", "mine.jsonl"]
    config = with_local_files(
        config_of("model.path=owner/model", *given, f"data.train_files={json.dumps(files)}", "teacher.loss=forward_kl")
    )
    assert "owner--critic" in config.critic.model_path
    assert config.critic.model_path == config.reference.model_path == config.teacher.model_path
    assert [file.rpartition("/")[2] for file in config.data.train_files] == [
        "train-0.jsonl",
        "train-1.jsonl",
        "mine.jsonl",
    ]
    named = with_names(config).data.train_files
    assert named[0] == f"hf://datasets/owner/rows@{data}/data/train-0.jsonl"
    assert named[2] == "mine.jsonl"


def test_a_configuration_of_local_paths_asks_the_hub_for_nothing(hub):
    config = config_of("model.path=/models/a", "data.train_files=['rows.jsonl']")
    assert with_local_files(config) is config
    assert with_names(config).model.path == "/models/a"
    assert hub.requests == []


def test_a_revision_is_that_of_its_branch_tag_or_commit(hub):
    first = hub.add("models/owner/model", MODEL)
    second = hub.add("models/owner/model", {**MODEL, "model.safetensors": b"newer"})
    for name, expected in (("", second), ("@main", second), (f"@{first}", first)):
        config = with_local_files(config_of(f"model.path=owner/model{name}"))
        assert config.model.path.endswith(expected)


def test_a_memory_estimate_downloads_no_weights(hub):
    hub.add("models/owner/model", MODEL)
    config = with_local_files(config_of("model.path=owner/model"), weights=False)
    assert {str(path) for path in _files(config.model.path)} == {"config.json"}


def test_the_cache_serves_a_run_without_a_network(hub, monkeypatch):
    hub.add("models/owner/model", MODEL)
    hub.add("datasets/owner/rows", DATA)
    given = ("model.path=owner/model", "data.train_files=['hf://datasets/owner/rows/data/train-*.jsonl']")
    before = with_local_files(config_of(*given))
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert with_local_files(config_of(*given)) == before


def test_a_hub_that_cannot_be_reached_is_served_by_the_cache(hub, monkeypatch):
    revision = hub.add("models/owner/model", MODEL)
    before = with_local_files(config_of("model.path=owner/model"))
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert with_local_files(config_of("model.path=owner/model")) == before
    assert with_local_files(config_of(f"model.path=owner/model@{revision}")) == before


def test_offline_without_a_copy_is_an_error_that_says_how_to_get_it(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelConfigError, match=r"HF_HUB_OFFLINE is set; run `hf download owner/model`") as error:
        with_local_files(config_of("model.path=owner/model"))
    assert str(error.value).startswith("model.path='owner/model': neither a path here")
    with pytest.raises(ModelConfigError, match=r"`hf download owner/model --revision v1` where there is a network"):
        with_local_files(config_of("model.path=owner/model@v1"))
    with pytest.raises(DataConfigError, match=r"`hf download owner/rows --repo-type dataset`"):
        with_local_files(config_of("data.train_files=['hf://datasets/owner/rows/a.csv']"))


def test_a_hub_that_cannot_be_reached_without_a_copy_is_an_error(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelConfigError, match=r"the hub cannot be reached"):
        with_local_files(config_of("model.path=owner/model"))


def test_a_name_that_does_not_exist_is_an_error_that_names_it(hub):
    with pytest.raises(
        ModelConfigError, match=r"^critic\.model_path='owner/absent': neither a path here .* nor a model"
    ):
        with_local_files(config_of("critic.model_path=owner/absent"))
    with pytest.raises(DataConfigError, match=r"nor a data set on the hub"):
        with_local_files(config_of("data.val_files=['hf://datasets/owner/absent/a.csv']"))


def test_a_private_model_is_as_absent_without_a_token(hub):
    hub.add("models/owner/model", MODEL, private=True)
    with pytest.raises(ModelConfigError, match=r"`hf auth login` if it is private"):
        with_local_files(config_of("model.path=owner/model"))


def test_a_gated_model_is_an_error_that_says_where_its_terms_are(hub):
    hub.add("models/owner/model", MODEL, gated=True)
    with pytest.raises(ModelConfigError, match=rf"accept its terms on {hub.url}/owner/model, then .*hf auth login"):
        with_local_files(config_of("model.path=owner/model"))


def test_a_revision_that_does_not_exist_is_an_error(hub):
    hub.add("models/owner/model", MODEL)
    with pytest.raises(ModelConfigError, match=r"model\.path='owner/model@v9': the model has no such revision"):
        with_local_files(config_of("model.path=owner/model@v9"))


@pytest.mark.parametrize("path", ["", "/data/test-*.jsonl", "/train.parquet"])
def test_a_data_set_without_such_a_file_is_an_error_that_lists_its_files(hub, path):
    hub.add("datasets/owner/rows", DATA)
    with pytest.raises(DataConfigError, match=r"names no file; .*: data/train-0\.jsonl, data/train-1\.jsonl \("):
        with_local_files(config_of(f"data.train_files=['hf://datasets/owner/rows{path}']"))


def test_a_full_disk_is_an_error_that_says_where_the_cache_is(hub, monkeypatch):
    import huggingface_hub

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ModelConfigError, match=r"the disk of the cache '.*' is full; free space, or set HF_HOME"):
        with_local_files(config_of("model.path=owner/model"))


def _files(directory):
    return sorted(path.relative_to(directory) for path in Path(directory).rglob("*") if path.is_file())


def test_a_prepared_data_set_may_come_from_the_hub(hub, capsys):
    from hybridflow.cli.main import main

    rows = "".join(f'{{"question": "{a} + 1?", "answer": "{a + 1}"}}\n' for a in range(4))
    hub.add("datasets/owner/sums", {"train.jsonl": rows.encode()})
    name = "hf://datasets/owner/sums/train.jsonl"
    options = ["--prompt", "question", "--data-source", "sums", "--test-size", "1", "--output-dir", "out"]
    assert main(["prepare", "table", "--train-file", name, *options]) == 0
    assert "read 4 rows, kept 4" in capsys.readouterr().out


def test_a_name_of_several_files_is_an_error_where_one_is_needed(hub):
    hub.add("datasets/owner/rows", DATA)
    with pytest.raises(DataConfigError, match=r"--train-file: '.*' names 2 files, such as train-0\.jsonl; name one"):
        local_file("--train-file", "hf://datasets/owner/rows/data/*.jsonl")


@pytest.mark.parametrize("name", ["owner/a--b", "owner/a.git", "owner/model.", f"owner/{'a' * 97}", "ownér/model"])
def test_a_name_that_the_hub_cannot_have_is_an_error(hub, name):
    with pytest.raises(
        ModelConfigError, match=r"^model\.path='own.r/.*': not a name that a model on the hub can have: "
    ):
        with_local_files(config_of(f"model.path={name}"))


@pytest.mark.parametrize("answer", ["<html>Log in to the network</html>", "[]", "{}"])
def test_an_answer_that_is_not_of_a_hub_is_an_error_with_its_address(hub, monkeypatch, answer):
    handler = type(hub).__module__
    monkeypatch.setattr(
        f"{handler}._Handler.do_GET", lambda self: self._send(200, answer.encode(), {"Content-Type": "text/html"})
    )
    with pytest.raises(
        ModelConfigError, match=rf"the download failed: .*; check that {hub.url} \(HF_ENDPOINT\) is a hub"
    ):
        with_local_files(config_of("model.path=owner/model"))


def test_a_token_that_is_not_valid_is_an_error_that_names_it(hub, monkeypatch):
    monkeypatch.setattr(f"{type(hub).__module__}._Handler.do_GET", lambda self: self._send(401, b"", {}))
    with pytest.raises(
        ModelConfigError, match=r"the token is not valid: log in again with `hf auth login`, or correct"
    ):
        with_local_files(config_of("model.path=owner/model"))


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    hub.add("models/owner/model", MODEL)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelConfigError, match=r"the cache '.*/file' cannot be written \(.*\); set HF_HOME to"):
        with_local_files(config_of("model.path=owner/model"))


def test_a_wildcard_downloads_only_the_files_that_it_names(hub):
    hub.add("datasets/owner/rows", {"a.jsonl": b"{}", "data/b.jsonl": b"{}", "data/deep/c.jsonl": b"{}"})
    for path, expected in (("*.jsonl", ["a"]), ("data/*.jsonl", ["b"]), ("**/*.jsonl", ["a", "b", "c"])):
        hub.requests.clear()
        config = with_local_files(config_of(f"data.train_files=['hf://datasets/owner/rows/{path}']"))
        assert [Path(file).stem for file in config.data.train_files] == expected
        assert {Path(request).stem for request in hub.requests if "/resolve/" in request} <= set(expected)


def test_a_directory_of_a_data_set_is_not_a_file_whatever_the_cache_has(hub):
    hub.add("datasets/owner/rows", DATA)
    with_local_files(config_of("data.train_files=['hf://datasets/owner/rows/data/train-0.jsonl']"))
    with pytest.raises(DataConfigError, match=r"names no file; data files of owner/rows: data/train-0\.jsonl"):
        with_local_files(config_of("data.train_files=['hf://datasets/owner/rows/data']"))


def test_a_recorded_file_whose_name_has_brackets_is_found_again(hub):
    hub.add("datasets/owner/rows", {"[x].jsonl": b"{}", "x.jsonl": b"{}"})
    config = with_local_files(config_of("data.train_files=['hf://datasets/owner/rows/*.jsonl']"))
    assert [Path(file).name for file in config.data.train_files] == ["[x].jsonl", "x.jsonl"]
    assert with_local_files(with_names(config)) == config


def test_each_key_continues_with_the_revision_that_it_had(hub):
    old = hub.add("models/owner/model", MODEL)
    new = hub.add("models/owner/model", {**MODEL, "model.safetensors": b"newer"})
    given = ("model.path=owner/model", f"critic.model_path=owner/model@{old}")
    Path("run").mkdir()
    Path("run/config.toml").write_text(to_toml(with_names(with_local_files(config_of(*given)))))
    hub.add("models/owner/model", {**MODEL, "model.safetensors": b"newest"})
    config = with_local_files(config_of(*given, "reference.model_path=owner/model"))
    assert config.model.path.endswith(new)
    assert config.critic.model_path.endswith(old)
    assert config.reference.model_path.endswith(new)


@pytest.mark.parametrize("text", ["[model\n", "model = 'x'\n", "[model]\npath = 3\n", "[data]\ntrain_files = [3]\n"])
def test_a_damaged_record_of_revisions_is_an_error_unless_all_are_named(hub, text):
    revision = hub.add("models/owner/model", MODEL)
    Path("run").mkdir()
    Path("run/config.toml").write_text(text)
    with pytest.raises(CheckpointConfigError, match=r"^'run/config\.toml' is damaged \(.*; restore it, name them as"):
        with_local_files(config_of("model.path=owner/model"))
    assert with_local_files(config_of(f"model.path=owner/model@{revision}")).model.path.endswith(revision)


def test_a_hub_that_never_answers_is_as_one_that_cannot_be_reached(hub, monkeypatch):
    hub.add("models/owner/model", MODEL)
    before = with_local_files(config_of("model.path=owner/model"))
    answered = threading.Event()
    monkeypatch.setattr(f"{type(hub).__module__}._Handler.do_GET", lambda self: answered.wait(20))
    monkeypatch.setattr("hybridflow.hub.download.TIMEOUT_S", 0.2)
    assert with_local_files(config_of("model.path=owner/model")) == before
    with pytest.raises(ModelConfigError, match=r"the hub cannot be reached \(ReadTimeout"):
        with_local_files(config_of("model.path=owner/another"))
    answered.set()
