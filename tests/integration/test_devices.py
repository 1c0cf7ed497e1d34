import pytest
import torch


@pytest.mark.runs
@pytest.mark.own_run("grpo: with devices that do not exist")
@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_a_run_with_gpus_that_do_not_exist_is_an_error(start, task, tmp_path):
    """In a separate process: in this one, an earlier test may have started a cluster, whose GPUs then count."""
    process = start("train", task / "rl.toml", f"trainer.run_dir={tmp_path / 'run'}", CUDA_VISIBLE_DEVICES="7")
    _, err = process.communicate()
    assert process.returncode == 2, err
    (line,) = [line for line in err.splitlines() if "CUDA_VISIBLE_DEVICES" in line]
    assert "CUDA_VISIBLE_DEVICES='7' is invalid: it names 1 GPUs, but CUDA finds 0 of them" in line
    assert "Traceback" not in err
