"""Runs with wrong devices end in one line, before a model is loaded."""

import pytest
import torch


@pytest.mark.parametrize("backend", ["local", "ray"])
@pytest.mark.parametrize("value", ["7", "abc"])
def test_a_run_with_gpus_that_do_not_exist_is_an_error(start, task, tmp_path, value, backend):
    """In a separate process: in this one, an earlier test may have started a cluster, whose GPUs then count."""
    if torch.cuda.is_available():
        pytest.skip("for a machine without a GPU")
    changes = (f"trainer.run_dir={tmp_path / 'run'}", f"controller.backend={backend}")
    process = start("train", task / "rl.toml", *changes, CUDA_VISIBLE_DEVICES=value)
    _, err = process.communicate()
    assert process.returncode == 2, err
    (line,) = [line for line in err.splitlines() if "CUDA_VISIBLE_DEVICES" in line]
    assert f"CUDA_VISIBLE_DEVICES='{value}' is invalid: it names 1 GPUs, but CUDA finds 0 of them" in line
    assert "Traceback" not in err


def test_a_run_with_hidden_gpus_computes_on_the_cpu(hybridflow, task, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = hybridflow("train", task / "rl.toml", f"trainer.run_dir={tmp_path / 'run'}", "trainer.total_steps=1")
    assert done.status == 0, done.err
