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


def cell(lines, name, column):
    """Return the number in a column of a role's line."""
    return float(lines[name][lines[""].index(column)])


def test_generation_of_an_offloaded_actor_needs_the_weights(lines_of):
    one_gpu, idle = lines_of(), lines_of("memory.offload={actor_rollout='idle'}")
    assert cell(one_gpu, "generation", "weights") == 0
    assert cell(idle, "generation", "weights") == cell(idle, "actor_rollout", "weights") > 0


def test_generation_in_a_pool_of_its_own_is_estimated_there(lines_of):
    pools = ["controller.backend=ray", "placement.pools={learn=[2],generate=[1]}", "placement.roles.rollout=generate"]
    lines = lines_of(*pools)
    assert list(lines) == ["", "actor_rollout", "generation", "pool learn", "pool generate"]
    assert lines["generation"][0] == "1"
    assert float(lines["pool generate"][0].split()[0]) == pytest.approx(float(lines["generation"][-1]), abs=0.01)
    assert cell(lines, "generation", "weights") > 0


def test_lending_is_estimated_in_the_pool_that_trains(lines_of):
    pools = ["controller.backend=ray", "placement.pools={learn=[2],generate=[1]}", "placement.roles.rollout=generate"]
    alone, lines = lines_of(*pools), lines_of(*pools, "placement.lend=true")
    assert list(lines) == ["", "actor_rollout", "generation", "lending", "pool learn", "pool generate"]
    assert lines["lending"][0] == "2"
    assert cell(lines, "lending", "weights") > 0  # a whole copy of sharded ones
    assert lines["generation"] == alone["generation"]
    assert lines["pool generate"] == alone["pool generate"]


def test_generation_by_vllm_is_reported_as_left_out(lines_of, caplog):
    assert list(lines_of("rollout.backend=vllm")) == ["", "actor_rollout", "pool main"]
    assert "generation: left out; vLLM takes rollout.gpu_memory_utilization=0.5" in caplog.text


def test_keys_and_values_are_bounded_by_the_configured_bytes(lines_of):
    long = ["data.max_response_length=60000", "rollout.max_running_sequences=1024", "data.train_batch_size=64"]
    free, bounded = lines_of(*long), lines_of(*long, "rollout.kv_cache_bytes=1073741824")
    assert cell(free, "generation", "keys_and_values") > 1
    assert cell(bounded, "generation", "keys_and_values") == 1


def test_dtype_auto_is_float32_on_a_cpu(lines_of):
    auto, wide, narrow = (
        cell(lines_of("--device", "cpu", f"model.dtype={dtype}"), "actor_rollout", "activations")
        for dtype in ("auto", "float32", "bfloat16")
    )
    assert auto == wide > narrow


@pytest.mark.parametrize("targets", ["['nope']", "['q_proj', 'lm_head']"])
def test_adapters_of_layers_without_an_estimate_are_an_error(tiny_model, capsys, targets):
    arguments = [f"model.path={tiny_model()}", "data.train_files=['a']", "lora.rank=4", f"lora.targets={targets}"]
    assert main(["memory", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: lora.targets=")
    assert "expected some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj." in error
    assert error.count("\n") == 1


def test_heads_that_tensor_parallel_does_not_divide_are_an_error(tiny_model, capsys):
    layout = ["controller.backend=ray", "controller.num_workers=3", "parallel.tensor=3", "rollout.backend=vllm"]
    assert main(["memory", f"model.path={tiny_model()}", "data.train_files=['a']", *layout]) == 2
    assert "parallel.tensor=3 does not divide num_attention_heads=4" in capsys.readouterr().err


def test_a_larger_gpu_holds_more_logits(tiny_model, capsys):
    path = tiny_model("qwen2", vocab_size=32768)
    logits = []
    for memory in ("8", "16", "80"):
        arguments = ["memory", "--gpu-memory", memory, f"model.path={path}", "data.train_files=['a']"]
        assert main([*arguments, "memory.max_tokens_per_micro_batch=65536"]) == 0
        header, actor, *_ = capsys.readouterr().out.splitlines()
        logits.append(float(actor.split()[header.split().index("logits") + 1]))
    assert logits[0] == logits[1] == 1  # 2^28 logits of two bytes, and their gradient
    assert logits[2] == 5


@pytest.mark.parametrize("memory", ["0", "-1", "nan", "inf", "80GB"])
def test_an_invalid_memory_of_a_gpu_is_an_error(capsys, memory):
    with pytest.raises(SystemExit) as stop:
        main(["memory", "--gpu-memory", memory])
    assert stop.value.code == 2
    assert f"'{memory}' is invalid: expected GiB of one GPU, such as 80" in capsys.readouterr().err
