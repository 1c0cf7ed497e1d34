"""Models and data files on the hub become local paths; what cannot be downloaded is an error that names the fix."""

import contextlib
import errno
import json
import threading
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from fixtures.hub import _Handler
from hybridflow.cli.main import main
from hybridflow.config import load_config, to_toml
from hybridflow.errors import CheckpointConfigError, DataConfigError, ModelConfigError
from hybridflow.models.hub import local_file, with_local_files, with_names

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
MODEL_PATH, TRAIN_FILES = "model.path=owner/model", "data.train_files=['hf://datasets/owner/rows/data/train-*.jsonl']"
NOWHERE = "http://127.0.0.1:9"
DO_GET = "fixtures.hub._Handler.do_GET"


def config_of(*overrides):
    return load_config(None, ["trainer.run_dir=run", *overrides])


def local(*overrides, **options):
    return with_local_files(config_of(*overrides), **options)


def files_in(directory):
    return {str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file()}


def test_a_model_is_downloaded_without_code_pickles_and_other_formats(hub):
    revision = hub.add("models/owner/model", MODEL)
    config = local(MODEL_PATH, weights=False)  # as for an estimate of memory
    assert files_in(config.model.path) == {"config.json"}
    config = local(MODEL_PATH)
    assert files_in(config.model.path) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert config.model.path.endswith(revision)
    assert with_names(config).model.path == f"owner/model@{revision}"


def test_every_model_and_data_file_may_be_on_the_hub_or_here(hub):
    config = config_of("model.path=/models/a", "data.train_files=['rows.jsonl']")
    assert with_local_files(config) is config
    assert (with_names(config).model.path, hub.requests) == ("/models/a", [])
    hub.add("models/owner/model", MODEL)
    hub.add("models/owner/critic", MODEL)
    data = hub.add("datasets/owner/rows", DATA)
    keys = ("critic.model_path", "reference.model_path", "reward.model_path", "teacher.model_path")
    files = json.dumps(["hf://datasets/owner/rows/data/train-*.jsonl", "mine.jsonl"])
    given = [f"{key}=owner/critic" for key in keys]
    config = local(MODEL_PATH, *given, f"data.train_files={files}", "teacher.loss=forward_kl")
    assert "owner--critic" in config.critic.model_path
    assert config.critic.model_path == config.reference.model_path == config.teacher.model_path
    assert [Path(file).name for file in config.data.train_files] == ["train-0.jsonl", "train-1.jsonl", "mine.jsonl"]
    named = with_names(config).data.train_files
    assert (named[0], named[2]) == (f"hf://datasets/owner/rows@{data}/data/train-0.jsonl", "mine.jsonl")


def test_a_revision_is_that_of_its_branch_tag_or_commit(hub):
    first = hub.add("models/owner/model", MODEL)
    second = hub.add("models/owner/model", {**MODEL, "model.safetensors": b"newer"})
    for name, expected in (("", second), ("@main", second), (f"@{first}", first)):
        assert local(f"{MODEL_PATH}{name}").model.path.endswith(expected)


def test_the_cache_serves_a_run_without_a_network_or_hub(hub, monkeypatch):
    revision = hub.add("models/owner/model", MODEL)
    hub.add("datasets/owner/rows", DATA)
    before = local(MODEL_PATH, TRAIN_FILES)
    with monkeypatch.context() as patched:
        patched.setattr(constants, "HF_HUB_OFFLINE", True)
        assert local(MODEL_PATH, TRAIN_FILES) == before
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    assert local(MODEL_PATH, TRAIN_FILES) == before
    assert local(f"{MODEL_PATH}@{revision}").model == before.model


def test_the_cache_may_be_a_link_to_another_disk(hub, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "link"))
    revision = hub.add("models/owner/model", MODEL)
    assert local(MODEL_PATH).model.path.endswith(revision)


@pytest.mark.parametrize(
    ("path", "expected"), [("*.jsonl", ["a"]), ("data/*.jsonl", ["b"]), ("**/*.jsonl", ["a", "b", "c"])]
)
def test_a_wildcard_downloads_only_the_files_that_it_names(hub, path, expected):
    hub.add("datasets/owner/rows", {"a.jsonl": b"{}", "data/b.jsonl": b"{}", "data/deep/c.jsonl": b"{}"})
    config = local(f"data.train_files=['hf://datasets/owner/rows/{path}']")
    assert [Path(file).stem for file in config.data.train_files] == expected
    assert {Path(request).stem for request in hub.requests if "/resolve/" in request} <= set(expected)


def test_a_recorded_file_whose_name_has_brackets_is_found_again(hub):
    hub.add("datasets/owner/rows", {"[x].jsonl": b"{}", "x.jsonl": b"{}"})
    config = local("data.train_files=['hf://datasets/owner/rows/*.jsonl']")
    assert [Path(file).name for file in config.data.train_files] == ["[x].jsonl", "x.jsonl"]
    assert with_local_files(with_names(config)) == config


def test_a_prepared_data_set_may_come_from_the_hub(hub, capsys):
    rows = "".join(f'{{"question": "{a} + 1?", "answer": "{a + 1}"}}\n' for a in range(4))
    hub.add("datasets/owner/sums", {"train.jsonl": rows.encode()})
    options = ["--prompt", "question", "--data-source", "sums", "--test-size", "1", "--output-dir", "out"]
    assert main(["prepare", "table", "--train-file", "hf://datasets/owner/sums/train.jsonl", *options]) == 0
    assert "read 4 rows, kept 4" in capsys.readouterr().out
    hub.add("datasets/owner/rows", DATA)
    with pytest.raises(DataConfigError, match=r"--train-file: '.*' names 2 files, such as train-0\.jsonl; name one"):
        local_file("--train-file", "hf://datasets/owner/rows/data/*.jsonl")


def test_each_key_continues_with_the_revision_that_it_had(hub):
    old = hub.add("models/owner/model", MODEL)
    new = hub.add("models/owner/model", {**MODEL, "model.safetensors": b"newer"})
    given = (MODEL_PATH, f"critic.model_path=owner/model@{old}")
    Path("run").mkdir()
    Path("run/config.toml").write_text(to_toml(with_names(local(*given))))
    hub.add("models/owner/model", {**MODEL, "model.safetensors": b"newest"})
    config = local(*given, "reference.model_path=owner/model")
    paths = (config.model.path, config.critic.model_path, config.reference.model_path)
    assert [path.rpartition("/")[2] for path in paths] == [new, old, new]


@pytest.mark.parametrize("text", ["[model\n", "model = 'x'\n", "[model]\npath = 3\n", "[data]\ntrain_files = [3]\n"])
def test_a_damaged_record_of_revisions_is_an_error_unless_all_are_named(hub, text):
    revision = hub.add("models/owner/model", MODEL)
    Path("run").mkdir()
    Path("run/config.toml").write_text(text)
    with pytest.raises(CheckpointConfigError, match=r"^'run/config\.toml' is damaged \(.*; restore it, name them as"):
        local(MODEL_PATH)
    assert local(f"{MODEL_PATH}@{revision}").model.path.endswith(revision)


# Errors


def answering(status, body=b""):
    """Return a change of the stand-in that gives this answer to every request."""
    return lambda patched: patched.setattr(DO_GET, lambda self: self._send(status, body, {"Content-Type": "text/html"}))


def offline(patched):
    patched.setattr(constants, "HF_HUB_OFFLINE", True)


def unreachable(patched):
    patched.setattr(constants, "ENDPOINT", NOWHERE)


def full(patched):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    patched.setattr(huggingface_hub, "snapshot_download", fail)


def cache_is_a_file(patched):
    Path("file").write_text("")
    patched.setattr(constants, "HF_HUB_CACHE", str(Path("file").resolve()))


NO_HUB = r"the download failed: .*; check that {url} \(HF_ENDPOINT\) is a hub"
NO_FILE = r"names no file; .*: data/train-0\.jsonl, data/train-1\.jsonl \("


@pytest.mark.parametrize(
    ("change", "override", "message"),
    [
        (offline, "model.path=owner/new", r"='owner/new': neither a path .* HF_HUB_OFFLINE is set; run `hf download"),
        (offline, "model.path=owner/new@v1", r"`hf download owner/new --revision v1` where there is a network"),
        (offline, "data.train_files=['hf://datasets/owner/new/a.csv']", "`hf download owner/new --repo-type dataset`"),
        (unreachable, "model.path=owner/new", "the hub cannot be reached"),
        (None, "critic.model_path=owner/absent", r"^critic\.model_path='owner/absent': neither a path here .* nor a"),
        (None, "data.val_files=['hf://datasets/owner/absent/a.csv']", "nor a data set on the hub"),
        (None, "model.path=owner/private", "`hf auth login` if it is private"),
        (None, "model.path=owner/gated", r"accept its terms on {url}/owner/gated, then .*hf auth login"),
        (None, "model.path=owner/model@v9", r"model\.path='owner/model@v9': the model has no such revision"),
        *(
            (None, f"data.train_files=['hf://datasets/owner/rows{path}']", NO_FILE)
            for path in ("", "/data/test-*.jsonl", "/train.parquet", "/data")
        ),
        *(
            (None, f"model.path={name}", r"^model\.path='own.r/.*': not a name that a model on the hub can have: ")
            for name in ("owner/a--b", "owner/a.git", "owner/model.", f"owner/{'a' * 97}", "ownér/model")
        ),
        (full, MODEL_PATH, r"the disk of the cache '.*' is full; free space, or set HF_HOME"),
        (cache_is_a_file, MODEL_PATH, r"the cache '.*/file' cannot be written \(.*\); set HF_HOME to"),
        *((answering(200, body), MODEL_PATH, NO_HUB) for body in (b"<html>Log in to the network</html>", b"[]", b"{}")),
        (answering(401), MODEL_PATH, "the token is not valid: log in again with `hf auth login`, or correct"),
    ],
)
def test_what_cannot_be_downloaded_is_an_error_that_names_the_fix(hub, monkeypatch, change, override, message):
    hub.add("models/owner/model", MODEL)
    hub.add("models/owner/private", MODEL, private=True)
    hub.add("models/owner/gated", MODEL, gated=True)
    hub.add("datasets/owner/rows", DATA)
    if change is None and "rows" in override:
        local("data.train_files=['hf://datasets/owner/rows/data/train-0.jsonl']")  # whatever the cache has
    if change:
        change(monkeypatch)
    error = DataConfigError if override.startswith("data.") else ModelConfigError
    with pytest.raises(error, match=message.replace("{url}", hub.url)):
        local(override)


def test_a_hub_that_never_answers_is_as_one_that_cannot_be_reached(hub, monkeypatch):
    hub.add("models/owner/model", MODEL)
    before, answered = local(MODEL_PATH), threading.Event()
    monkeypatch.setattr(DO_GET, lambda self: answered.wait(20))
    monkeypatch.setattr("hybridflow.models.hub.download.TIMEOUT_S", 0.2)
    assert local(MODEL_PATH) == before
    with pytest.raises(ModelConfigError, match=r"the hub cannot be reached \(ReadTimeout"):
        local("model.path=owner/another")
    answered.set()


# Hostile hubs

OUTSIDE = "../../../outside/evil"


def absolute(text):
    """Return a text with the path of the directory outside the cache in place of /OUT."""
    return text.replace("/OUT", str(Path.cwd().parent / "outside"))


def with_header(name, value):
    """Return a change of the stand-in that gives this header with every answer."""

    def change(patched):
        send = _Handler._send
        added = {name: absolute(value)}
        patched.setattr(_Handler, "_send", lambda self, *answer: send(self, *answer[:2], answer[2] | added))

    return change


def with_json(change_of):
    """Return a change of the stand-in's answers in JSON, by a function of a commit or of a file in a listing."""

    def change(patched):
        json_, api = _Handler._json, _Handler._api
        patched.setattr(_Handler, "_api", lambda self, *a: api(self, *a[:2], [*a[2][:1], "main"]))
        patched.setattr(constants, "HF_HUB_DISABLE_XET", False)

        def answer(self, value, *rest):
            for each in value if isinstance(value, list) else [value]:
                each.update(change_of(each))
            json_(self, json.loads(absolute(json.dumps(value))), *rest)

        patched.setattr(_Handler, "_json", answer)

    return change


def large(path):
    """Return a change of a file in a listing to a large one, the hash of whose content is a path."""
    return lambda each: {"lfs": {"oid": path, "size": 7, "pointerSize": 7}, "xetHash": "a" * 64}


@pytest.mark.parametrize(
    "change",
    [
        with_header("ETag", f'"{OUTSIDE}"'),
        with_header("ETag", 'W/"/OUT/evil"'),
        with_header("ETag", '"/OUT/secret"'),  # would be read, as the model's file
        with_header("X-Linked-Etag", OUTSIDE),
        with_header("X-Repo-Commit", OUTSIDE),
        with_header("Location", "file:///OUT/secret"),
        with_json(lambda each: {"sha": OUTSIDE} if "sha" in each else {}),
        with_json(lambda each: {"sha": "/OUT"} if "sha" in each else {"path": "no", "xetHash": "no"}),
        with_json(lambda each: {"path": f"{OUTSIDE}.json"} if "path" in each else {}),
        with_json(lambda each: {"path": "/OUT/evil.json"} if "path" in each else {}),
        with_json(large(OUTSIDE)),
        with_json(large("/OUT/evil")),
    ],
)
def test_a_hostile_hub_writes_and_reads_nothing_outside_the_cache(hub, tmp_path, monkeypatch, change):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    hub.add("models/owner/model", MODEL)
    hub.add("datasets/owner/rows", DATA)
    before = files_in(tmp_path)
    change(monkeypatch)
    with pytest.raises(DataConfigError, match=r"the download failed: .*(out of the cache|Invalid|pointer|Protocol)"):
        local("data.train_files=['hf://datasets/owner/rows/**/*.json*']")
    with contextlib.suppress(ModelConfigError):  # files of subdirectories are not asked for
        local(MODEL_PATH)
    after = files_in(tmp_path)
    assert {name for name in after - before if not name.startswith("cache/")} == set()
    assert "secret" not in {path.read_text() for path in (tmp_path / "cache").rglob("*") if path.is_file()}
