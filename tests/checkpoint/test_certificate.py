"""A certificate is read back, and is refused for a checkpoint of another run."""

import json
from dataclasses import replace

import pytest
import torch

from hybridflow.checkpoint import CheckpointStore, save_state
from hybridflow.checkpoint.certificate import Certificate, CertificateLine, identity_of, read_certificate
from hybridflow.errors import CheckpointConfigError
from hybridflow.runtime.observe.run_info import collect_run_info

CONFIG = {"model.path": "models/a", "actor.optimizer.lr": 1e-4, "trainer.run_dir": "runs/a"}


@pytest.fixture
def checkpoint(tmp_path):
    """Return a function that makes a checkpoint of a run with other keys, other data or another model."""

    def make(name, data="d1", model="m1", **changes):
        config = CONFIG | {key.replace("__", "."): value for key, value in changes.items()}
        store = CheckpointStore(tmp_path / name)
        with store.begin(2, {"kind": "train", "config": config, "models": {"model.path": model}}) as directory:
            save_state({"loader": {"fingerprint": data}, "random": torch.zeros(1)}, directory / "controller")
        return store.open(2)

    return make


@pytest.fixture
def certificate(checkpoint):
    environment = {name: collect_run_info()[name] for name in ("versions", "hardware")}
    lines = [
        CertificateLine("sampler - trainer", "differs", "8 tokens", "by 1e-9", 1.0, must_be_exact=False),
        CertificateLine("local - Ray", "not checked", "", "Ray is not\n installed"),
    ]
    identity = identity_of(checkpoint("short"), ["trainer.run_dir"])
    return Certificate("hybridflow certify a.toml", "2026-01-01", 4, ["a.b=1"], identity, environment, lines, 9.0)


def test_a_certificate_is_written_as_json_and_a_page(certificate, tmp_path):
    certificate.write(tmp_path)
    assert read_certificate(tmp_path / "certificate.json") == certificate
    page = (tmp_path / "certificate.md").read_text()
    for text in ("| sampler - trainer | differs | 8 tokens | 1 s |", "- local - Ray: Ray is not installed"):
        assert text in page
    assert page.endswith("\n\nNo line that must be exact differs.\n")
    failed = replace(certificate, lines=[CertificateLine("local - Ray", "failed")])
    assert (certificate.is_kept, failed.is_kept) == (True, False)
    assert failed.page().endswith("**A line that must be exact is not.**\n")


def test_a_certificate_is_for_runs_of_the_same_keys_models_and_data(certificate, checkpoint):
    certificate.require_same_run(checkpoint("same", model__path="/moved", trainer__run_dir="runs/b"))
    for name, changes, text in (
        ("keys", {"actor__optimizer__lr": 1e-3}, "actor.optimizer.lr was 0.0001 when it was certified and is 0.001"),
        ("data", {"data": "d2"}, "the data of the run: 'd2', certified was 'd1'"),
        ("model", {"model": "m2"}, "the models of the run: {'model.path': 'm2'}, certified was {'model.path': 'm1'}"),
    ):
        with pytest.raises(CheckpointConfigError) as error:
            certificate.require_same_run(checkpoint(name, **changes))
        assert text in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("format"),
        lambda document: document.pop("lines"),
        lambda document: document.update(lines=[1]),
        lambda document: document["lines"][0].update(seconds="1"),
        lambda document: document.update(environment={}),
        lambda document: document["identity"].update(config=[]),
        lambda document: document["identity"].pop("data"),
    ],
)
def test_what_is_not_a_certificate_is_an_error(certificate, tmp_path, change):
    certificate.write(tmp_path)
    file = tmp_path / "certificate.json"
    document = json.loads(file.read_text())
    change(document)
    for text in (json.dumps(document), "[]", "", "{"):
        file.write_text(text)
        with pytest.raises(CheckpointConfigError, match="is not a certificate"):
            read_certificate(file)
    with pytest.raises(CheckpointConfigError, match="is not a certificate"):
        read_certificate(tmp_path)
