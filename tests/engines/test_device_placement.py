"""The whole life of an engine on a simulated device: every tensor is where it should be, and the numbers are the CPU's.

The device raises as a GPU does if an operation gets a tensor of the host; see `fixtures.simulated_device`.
"""

from functools import partial

import pytest
import torch

from fixtures.layout_program import largest_errors, rows_for_losses, run_jobs
from fixtures.simulated_device import META
from hybridflow.checkpoint import StateCopy, describe_state, load_state, read_state_into, save_state
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.rollout.weight_sync.buckets import fill_buckets, plan_buckets, spec_of


@pytest.fixture
def device(simulated_device):
    return simulated_device


@pytest.fixture
def rows(rollout_rows):
    return rollout_rows([3, 3, 5, 2], [4, 6, 1, 3])


def loss(outputs, part):
    return -sum(values.sum() for values in outputs.values()) / 40, {}


@pytest.fixture
def build(build_engine):
    return partial(build_engine, dtype="float64", max_tokens=16, lr=1e-3)


def tensors_of(engine):
    """Return every tensor of an engine by name: weights, buffers, masters, optimizer state."""
    found = {**dict(engine.model.named_parameters()), **dict(engine.model.named_buffers())}
    found |= {f"master {name}": parameter for name, parameter in engine.parameters.items()}
    if engine.learner:
        for number, moments in enumerate(engine.learner.optimizer.state.values()):
            found |= {f"{key} {number}": value for key, value in moments.items()}
    return found


def require_on_device(engine):
    elsewhere = {name: tensor.device for name, tensor in tensors_of(engine).items() if tensor.device != engine.device}
    assert elsewhere == {}


LIVES = {
    "a policy": {},
    "adapters": {"lora": {"rank": 2}},
    "a critic": {"head": "value"},
    "a reference": {"learns": False},
    "offload in bfloat16": {"offload": "idle", "dtype": "bfloat16"},
}


def live(engine, rows, directory):
    """Run every method of an engine, save and restore it, and return its numbers."""
    is_policy, learns = engine.head == "policy", engine.learner is not None
    more = {"with_entropy": True, "with_sum_squared_probs": True, "top_k": 2} if is_policy else {}
    numbers = list(engine.forward(rows, **more).values())
    if learns:
        numbers += [torch.tensor(engine.update(rows, loss, with_entropy=is_policy).grad_norm) for _ in range(2)]
    directory.mkdir()
    save_state(StateCopy()(engine.state_dict()), directory / "actor")
    if engine.is_sharded or not learns:
        read_state_into(engine.state_dict(), directory / "actor")
    engine.load_shards(describe_state(directory / "actor"), lambda state: read_state_into(state, directory / "actor"))
    require_on_device(engine)
    if learns:
        numbers.append(torch.tensor(engine.update(rows, loss).grad_norm))
        require_on_device(engine)
    engine.load_state_dict(load_state(directory / "actor"))
    if learns:
        numbers.append(torch.tensor(engine.update(rows, loss).grad_norm))
    numbers += engine.forward(rows).values()
    return [values.double() for values in numbers]


@pytest.mark.parametrize("life", LIVES)
def test_an_engine_lives_on_its_device(build, tiny_model, rows, life, device, tmp_path):
    options = LIVES[life]
    engine = build(tiny_model("qwen2"), **options)
    require_on_device(engine)
    found = live(engine, rows, tmp_path / "device")
    require_on_device(engine)
    with device.off():
        expected = live(build(tiny_model("qwen2"), **options), rows, tmp_path / "host")
    tolerance = {"rtol": 0.02, "atol": 0.05} if "bfloat16" in life else {"rtol": 1e-5, "atol": 1e-6}
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generation_runs_on_the_device_of_the_model(build, tiny_model, device, temperature):
    def tokens():
        engine = build(tiny_model("qwen2"), learns=False)
        rollout = EmbeddedRollout(engine.rollout_model())
        load_weights(rollout, engine.weights(), version=1)
        sampling = SamplingParams(5, temperature=temperature)
        wanted = [Request(i, prompt, sampling, 2, (7, i)) for i, prompt in enumerate([[5, 9, 12, 7], [8], [3, 30]])]
        return [completion.token_ids for completion in generate(rollout, wanted)]

    found = tokens()
    with device.off():
        assert found == tokens()


@pytest.mark.parametrize("offload", [None, "idle"])
def test_weight_sync_from_a_device_has_the_fingerprints_of_the_cpu(build, tiny_model, device, offload):
    def sent():
        engine = build(tiny_model("qwen2"), dtype="float32", offload=offload)
        with engine.on_device(with_optimizer=False):
            weights = list(engine.weights())
            plan = plan_buckets([spec_of(name, weight) for name, weight in weights], 4000)
            return list(fill_buckets(plan, weights, 1))

    found = sent()
    assert {weight.device for bucket in found for weight in bucket.weights.values()} == {META}
    with device.off():
        assert [bucket.fingerprints for bucket in found] == [bucket.fingerprints for bucket in sent()]


def test_fingerprints_are_read_once_for_each_bucket(build, tiny_model, device):
    engine = build(tiny_model("qwen2"), dtype="float32", learns=False)
    weights = list(engine.weights())
    plan = plan_buckets([spec_of(name, weight) for name, weight in weights], 4000)
    device.waits.clear()
    assert len(list(fill_buckets(plan, weights, 1))) == len(plan) < len(weights)
    assert dict(device.waits) == {"aten._to_copy.default": len(plan)}


@pytest.mark.runs
@pytest.mark.own_run("grpo: two ranks on a simulated device")
def test_two_ranks_on_one_device_train_as_one_process(run_world, rollout_rows, tiny_model, tmp_path):
    """FSDP2 and tensor parallel; `test_layouts_gpu.py` has more, for a GPU and a rehearsal."""
    rows_for_losses(rollout_rows).save_to_disk(tmp_path / "rows")
    job = {"model": tiny_model("qwen2", vocab_size=41), "rows": tmp_path / "rows", "steps": 1}
    tensor = {"tensor": 2, "offload": "idle", "max_logits": 200}
    found = run_jobs(
        run_world, tmp_path, [(2, {"name": "data", **job}), (2, {"name": "tensor", **job, **tensor})], "simulated"
    )
    expected = run_jobs(run_world, tmp_path, [(1, {"name": "alone", **job})])["alone"]
    assert all(max(largest_errors(result, expected).values()) < 1e-8 for result in found.values())
