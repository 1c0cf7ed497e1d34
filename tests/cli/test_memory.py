import re

import pytest

from hybridflow.cli.main import main


@pytest.fixture
def lines_of(tiny_model, capsys):
    """Return `lines_of(*overrides)`, which gives the cells of each line of `hybridflow memory` by its first cell."""

    def lines(*overrides):
        path = tiny_model("qwen2", hidden_size=1024, intermediate_size=2048)
        arguments = [f"model.path={path}", "data.train_files=['a']", "memory.max_tokens_per_micro_batch=65536"]
        assert main(["memory", *arguments, *overrides]) == 0
        printed = capsys.readouterr().out.splitlines()
        return {re.split(r"\s{2,}|:", line)[0]: re.split(r"\s{2,}|: ", line)[1:] for line in printed}

    return lines


def test_memory_lists_roles_and_the_need_of_the_pool(lines_of):
    lines = lines_of("algorithm.advantage=gae")
    assert list(lines) == ["", "actor_rollout", "generation", "critic", "pool main"]
    assert lines[""][0] == "ranks"
    totals = [float(cells[-1]) for name, cells in lines.items() if name in ("actor_rollout", "generation", "critic")]
    assert float(lines["pool main"][0].split()[0]) >= max(totals) > 0


def test_ranks_share_weights_and_optimizer(lines_of):
    alone, sharded = lines_of(), lines_of("controller.backend=ray", "controller.num_workers=4")
    column = alone[""].index("moments")
    moments = [float(lines["actor_rollout"][column]) for lines in (alone, sharded)]
    assert moments[1] == pytest.approx(moments[0] / 4, abs=0.01)
    assert moments[0] > 0.1


def test_a_missing_model_is_an_error_of_one_line(capsys):
    assert main(["memory", "model.path=missing", "data.train_files=['a']"]) == 2
    error = capsys.readouterr().err
    assert "model.path='missing' is not a model directory: config.json not found" in error
    assert error.count("\n") == 1


def test_float64_has_no_estimate(tiny_model, capsys):
    assert main(["memory", f"model.path={tiny_model()}", "data.train_files=['a']", "model.dtype=float64"]) == 2
    assert "model.dtype=float64 has no memory estimate; use float32 or bfloat16." in capsys.readouterr().err


def test_a_model_without_an_estimate_is_named(tiny_model, capsys, caplog):
    path = tiny_model("mistral", sliding_window=None)
    assert main(["memory", f"model.path={path}", "data.train_files=['a']"]) == 0
    assert f"actor_rollout: '{path}' has no estimate; expected a Llama, Qwen2 or Qwen3 model" in caplog.text
    assert capsys.readouterr().out == ""


def test_a_reward_model_is_counted_with_its_single_output(tiny_model, lines_of):
    lines = lines_of(f"reward.model_path={tiny_model('qwen2', hidden_size=1024, intermediate_size=2048)}")
    logits = lines[""].index("logits")
    assert float(lines["reward"][logits]) == 0
    assert float(lines["reward"][-1]) > 0
