"""Tiny runs on a CUDA device, in one process."""

from pathlib import Path

import pytest

from fixtures.tiny_episodes import episode_settings, write_episode_task
from hybridflow.checkpoint import CheckpointStore
from hybridflow.config import load_config
from hybridflow.runtime.observe import read_jsonl
from hybridflow.trainers import build_trainer

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
def test_a_run_on_a_gpu_records_dtype_utilization_and_compilations(task, tmp_path, hybridflow, gpu):
    outcome = hybridflow("sft", task / "sft.toml", f"trainer.run_dir={tmp_path}/run", "trainer.total_steps=2")
    assert outcome.status == 0, outcome.err
    expected = "bfloat16" if gpu.type == "cuda" else "float32"
    assert load_config(tmp_path / "run" / "config.toml").model.dtype == expected
    *_, last = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert last["mfu/sft"] is None or 0 < last["mfu/sft"] <= 1
    assert last["perf/sft_compilations"] >= 0


@pytest.mark.filterwarnings("ignore")
def test_an_interrupted_run_of_episodes_on_a_gpu_equals_an_uninterrupted_one(tmp_path, gpu):
    write_episode_task(tmp_path)
    whole = train_episodes(tmp_path, "whole")
    train_episodes(tmp_path, "parts", stop_after=1)
    assert train_episodes(tmp_path, "parts") == whole
    *_, last = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert last["episode/turns/max"] > 1


def train_episodes(task: Path, name: str, stop_after: int | None = None) -> bytes:
    """Train on episodes of several turns; return the bytes of the actor's weights."""
    settings = (f"trainer.run_dir={task}/{name}", "trainer.save_every=1", "reward.processes=0")
    with build_trainer(load_config(None, episode_settings(task, "Talk", *settings))) as trainer:
        trainer.fit(stop_after=stop_after) if stop_after else trainer.fit()
    store = CheckpointStore(task / name / "checkpoints")
    return (store.path(max(store.list())) / "actor.safetensors").read_bytes()
