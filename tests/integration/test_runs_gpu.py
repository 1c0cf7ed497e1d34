"""A tiny run on a CUDA device, in one process."""

import pytest

from hybridflow.config import load_config
from hybridflow.observability import read_jsonl

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
