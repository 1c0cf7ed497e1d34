import re

import pytest

from fixtures.families import write_family

SHARDED = ("controller.backend=ray", "controller.num_workers=4")
POOLS = ("controller.backend=ray", "placement.pools={learn=[2],generate=[1]}", "placement.roles.rollout=generate")

OF_A_STEP = ["estimate of a step of the policy, not measured", "assumed"]


@pytest.fixture
def lines_of(tiny_model, shown):
    """Return `lines_of(*overrides)`, which gives the cells of each line of `hybridflow memory` by its first cell."""

    def lines(*overrides, **model):
        path = tiny_model("qwen2", **({"hidden_size": 1024, "intermediate_size": 2048} | model))
        arguments = [f"model.path={path}", "data.train_files=['a']", "memory.max_tokens_per_micro_batch=65536"]
        printed = shown("memory", *arguments, *overrides)[0].splitlines()
        return {re.split(r"\s{2,}|:", line)[0]: re.split(r"\s{2,}|: ", line)[1:] for line in printed}

    return lines


def cell(lines, name, column):
    """Return the number in a column of a role's line."""
    return float(lines[name][lines[""].index(column)])


def pool(lines, name):
    return float(lines[f"pool {name}"][0].split()[0])


def test_memory_lists_roles_and_the_need_of_the_pool(lines_of):
    lines = lines_of("algorithm.advantage=gae")
    assert list(lines) == ["", "actor_rollout", "generation", "critic", "pool main", *OF_A_STEP]
    assert lines[""][0] == "ranks"
    totals = [float(cells[-1]) for name, cells in lines.items() if name in ("actor_rollout", "generation", "critic")]
    assert pool(lines, "main") >= max(totals) > 0
    moments = [cell(each, "actor_rollout", "moments") for each in (lines_of(), lines_of(*SHARDED))]
    assert moments[1] == pytest.approx(moments[0] / 4, abs=0.01)
    assert moments[0] > 0.1


def test_a_reward_model_is_counted_with_its_single_output(tiny_model, lines_of):
    lines = lines_of(f"reward.model_path={tiny_model('qwen2', hidden_size=1024, intermediate_size=2048)}")
    assert cell(lines, "reward", "logits") == 0
    assert float(lines["reward"][-1]) > 0


def test_generation_needs_what_its_process_does_not_have(lines_of):
    one_gpu, idle = lines_of(), lines_of("memory.offload={actor_rollout='idle'}")
    assert cell(one_gpu, "generation", "weights") == 0
    assert cell(idle, "generation", "weights") == cell(idle, "actor_rollout", "weights") > 0
    lines = lines_of(*POOLS)
    assert list(lines) == ["", "actor_rollout", "generation", "pool learn", "pool generate", *OF_A_STEP]
    assert lines["generation"][0] == "1"
    assert pool(lines, "generate") == pytest.approx(float(lines["generation"][-1]), abs=0.01)
    assert cell(lines, "generation", "weights") > 0


VLLM = ("rollout.backend=vllm", "--gpu-memory", "80", "rollout.gpu_memory_utilization=0.4")


def test_vllm_has_its_share_of_the_gpu_while_it_generates(lines_of, caplog):
    lines, large = lines_of(*VLLM), lines_of("--gpu-memory", "80")
    assert float(lines["generation"][-1]) == 32
    held = sum(cell(lines, "actor_rollout", part) for part in ("weights", "masters", "moments"))
    assert pool(lines, "main") == pytest.approx(max(32 + held, pool(large, "main")), abs=0.02)
    kept = lines_of(*VLLM, *POOLS)
    assert pool(kept, "generate") == 32
    assert pool(kept, "learn") == float(kept["actor_rollout"][-1])
    cache = ("rollout.backend=vllm", "rollout.kv_cache_bytes=2147483648")
    whole, halves = lines_of(*cache), lines_of(*cache, *SHARDED, "rollout.tensor=2")
    assert cell(whole, "generation", "keys_and_values") == cell(halves, "generation", "keys_and_values") == 2
    weights = [cell(each, "generation", "weights") for each in (whole, halves)]
    assert weights[1] == pytest.approx(weights[0] / 2, abs=0.01)
    on_cpu = lines_of("rollout.backend=vllm", "--device", "cpu")
    assert cell(on_cpu, "generation", "keys_and_values") == 1
    assert list(lines_of("rollout.backend=vllm")) == ["", "actor_rollout", "pool main", *OF_A_STEP]
    assert "generation: left out; vLLM takes rollout.gpu_memory_utilization=0.5 of a GPU" in caplog.text


def test_the_buffers_of_nccl_are_counted_once_for_a_process(lines_of):
    lines = lines_of(*SHARDED, "algorithm.advantage=gae")
    found = [cell(lines, name, "communication") for name in ("actor_rollout", "critic", "generation")]
    assert found == [0.38, 0.38, 0]
    held = [sum(cell(lines, name, part) for part in ("weights", "moments")) for name in ("actor_rollout", "critic")]
    actor, critic, generation = (float(lines[name][-1]) for name in ("actor_rollout", "critic", "generation"))
    expected = max(actor + held[1], critic + held[0], generation + sum(held) + 0.375)
    assert pool(lines, "main") == pytest.approx(expected, abs=0.04)
    assert cell(lines_of("algorithm.advantage=gae"), "actor_rollout", "communication") == 0


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


def test_a_larger_gpu_holds_more_logits(lines_of):
    small = {"vocab_size": 32768, "hidden_size": 32, "intermediate_size": 48}
    logits = [
        cell(lines_of("--gpu-memory", memory, **small), "actor_rollout", "logits") for memory in ("8", "16", "80")
    ]
    assert logits == [1, 1.5, 5.5]  # kept: 2^28 logits of two bytes, 1/32 of the bytes, all; and the gradient of a part


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["model.path=missing"], "model.path='missing' is not a model directory: config.json not found"),
        (["model.dtype=float64"], "model.dtype=float64 has no memory estimate; use float32 or bfloat16."),
        (["lora.rank=4", "lora.targets=['nope']"], "error: lora.targets="),
        (
            ["lora.rank=4", "lora.targets=['q_proj', 'lm_head']"],
            "expected some of q_proj, k_proj, v_proj, o_proj, gate",
        ),
        (
            [*SHARDED, "controller.num_workers=3", "parallel.tensor=3", "rollout.backend=vllm"],
            "parallel.tensor=3 does not divide num_attention_heads=4",
        ),
    ],
)
def test_what_has_no_estimate_is_an_error_of_one_line(tiny_model, shown, arguments, problem):
    out, error = shown("memory", f"model.path={tiny_model()}", "data.train_files=['a']", *arguments, status=2)
    assert problem in error
    assert (out, error.count("\n") == 1 or "parallel" in problem) == ("", True)


def test_a_model_without_an_estimate_is_named(tmp_path, shown, caplog):
    path = write_family(tmp_path, "jetmoe")
    assert shown("memory", f"model.path={path}", "data.train_files=['a']")[0] == ""
    assert f"actor_rollout: '{path}' has no estimate: its code cannot be followed without weights" in caplog.text


def test_an_invalid_memory_of_a_gpu_is_an_error(shown):
    for memory in ("0", "-1", "nan", "inf", "80GB"):
        problem = f"'{memory}' is invalid: expected GiB of one GPU, such as 80"
        assert problem in shown("memory", "--gpu-memory", memory, status=2)[1]


def test_the_seconds_of_a_step_are_estimated_with_what_they_assume(tiny_model, shown):
    recipe = [f"model.path={tiny_model('qwen2')}", "data.train_files=['a']", "actor.epochs=2"]
    estimate, assumed = shown("memory", *recipe, *SHARDED)[0].splitlines()[-2:]
    assert re.search(r"not measured: generation [\d.]+ s, log-probs [\d.]+ s, update [\d.]+ s, sync ", estimate)
    assert estimate.endswith("; 512 responses of 512 tokens")
    assert assumed == "assumed: 450 TFLOP/s of a GPU, 15% of 2.9 TB/s in generation, 50 GB/s between GPUs"
    assert "estimate of a step" not in shown("memory", *recipe, "--device", "cpu")[0]
