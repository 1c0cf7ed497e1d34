"""Idle offload, on the CPU: device and host are the same memory, but every move is made; `test_offload_gpu` does it."""

import pytest
import torch
from torch import nn

from hybridflow.checkpoint import copy_state
from hybridflow.engines import offload
from hybridflow.engines.offload import Offload
from hybridflow.errors import ModelError

CPU = torch.device("cpu")


def loss(outputs, part):
    return -outputs["log_probs"].sum() / 40, {}


@pytest.fixture
def build(build_engine):
    def build(path, dtype="float32", *, idle=False, lora=None):
        engine = build_engine(path, dtype=dtype, max_tokens=64, lr=1e-3, lora=lora)
        if idle:  # on a CPU the engine does not do it by itself
            for parameter in engine.model.parameters():
                parameter.data = parameter.data.clone()  # memory of a file cannot be freed
            engine._start_offload()
        return engine

    return build


def moments_of(engine):
    return [moment for state in engine.learner.optimizer.state.values() for moment in state.values() if moment.ndim]


def num_bytes(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.fixture
def copies(monkeypatch):
    """Record the bytes of each copy between device and host."""
    made = {"to device": [], "to host": []}
    copy = torch.Tensor.copy_

    def recorded(self, source, **options):
        if options.get("non_blocking"):
            made["to device" if is_view_of_a_storage(self) else "to host"].append(self.nbytes)
        return copy(self, source, **options)

    views = set()
    bytes_of = offload._bytes_of

    def remembered(storage, device):
        view = bytes_of(storage, device)
        views.add(view.data_ptr())
        return view

    def is_view_of_a_storage(tensor):
        return tensor.data_ptr() in views

    monkeypatch.setattr(offload, "_bytes_of", remembered)
    monkeypatch.setattr(torch.Tensor, "copy_", recorded)
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_engine_computes_the_same_bits(build, tiny_model, rows, dtype):
    plain, idle = (build(tiny_model("qwen2"), dtype, idle=idle) for idle in (False, True))
    for _ in range(3):
        assert torch.equal(plain.forward(rows)["log_probs"], idle.forward(rows)["log_probs"])
        assert plain.update(rows, loss) == idle.update(rows, loss)
    with idle.on_device():
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters.values(), idle.parameters.values(), strict=True))


def test_forward_needs_weights_only_and_an_update_everything(build, tiny_model, rows):
    engine = build(tiny_model("qwen2"), "bfloat16", idle=True)
    engine.update(rows, loss)
    weights, masters = list(engine.model.parameters()), list(engine.parameters.values())
    sizes = {"weights": 2 * sum(p.numel() for p in weights), "masters": 4 * sum(p.numel() for p in masters)}

    def on_device():
        return num_bytes(weights), num_bytes(masters), num_bytes(moments_of(engine))

    assert on_device() == (0, 0, 0)
    with engine.on_device(with_optimizer=False):
        assert on_device() == (sizes["weights"], 0, 0)
        with engine.on_device():
            assert on_device() == (sizes["weights"], sizes["masters"], 2 * sizes["masters"])
        assert on_device() == (sizes["weights"], 0, 0)
    assert on_device() == (0, 0, 0)


def test_nothing_is_copied_back_unless_it_may_have_changed(build, tiny_model, rows, copies):
    engine = build(tiny_model("qwen2"), "bfloat16", idle=True)
    engine.update(rows, loss)
    for made in copies.values():
        made.clear()
    engine.forward(rows)
    list(engine.weights())
    with engine.on_device(with_optimizer=False):
        pass
    assert copies["to host"] == []
    assert sum(copies["to device"]) == 3 * 2 * sum(p.numel() for p in engine.model.parameters())


def test_frozen_weights_of_adapters_are_copied_to_the_host_once(build, tiny_model, rows, copies):
    engine = build(tiny_model("qwen2"), lora={"rank": 2}, idle=True)
    engine.update(rows, loss)
    copies["to host"].clear()
    engine.update(rows, loss)
    assert sum(copies["to host"]) == 3 * 4 * sum(p.numel() for p in engine.parameters.values())  # and two moments


def test_host_copies_are_allocated_once(build, tiny_model, rows, monkeypatch):
    blocks = []

    class Counted(offload.HostMemory):
        def __init__(self, sizes, device):
            blocks.append(len(sizes))
            super().__init__(sizes, device)

    monkeypatch.setattr(offload, "HostMemory", Counted)
    engine = build(tiny_model("qwen2"), idle=True)
    engine.update(rows, loss)
    num_parameters = len(engine.parameters)
    assert blocks == [num_parameters, 2 * num_parameters]  # the weights, then the moments of the first step
    state = engine.state_dict()
    copied = {
        "num_updates": state["num_updates"],
        "model": {name: value.clone() for name, value in state["model"].items()},
        "optimizer": {
            name: {key: moment.clone() for key, moment in moments.items()}
            for name, moments in state["optimizer"].items()
        },
    }
    for _ in range(3):
        engine.update(rows, loss)
        engine.forward(rows)
    engine.load_state_dict(copied)  # with new moments
    engine.update(rows, loss)
    assert len(blocks) == 2


def test_restored_offloaded_state_continues_bit_identically(build, tiny_model, rows):
    whole, resumed = (build(tiny_model("qwen2"), "bfloat16", idle=True) for _ in range(2))
    whole.update(rows, loss)
    resumed.load_state_dict(whole.state_dict())
    assert num_bytes([*resumed.model.parameters(), *moments_of(resumed)]) == 0
    for _ in range(2):
        assert whole.update(rows, loss) == resumed.update(rows, loss)


def test_state_of_an_idle_engine_is_the_host_copy(build, tiny_model, rows):
    plain, idle = (build(tiny_model("qwen2"), idle=idle) for idle in (False, True))
    for engine in (plain, idle):
        engine.update(rows, loss)
    state, expected = idle.state_dict(), plain.state_dict()
    assert num_bytes(idle.parameters.values()) == 0
    storages = {tensor.untyped_storage().data_ptr() for tensor in state["model"].values()}
    assert len(storages) == len(state["model"])  # so that a save need not separate them
    for name, tensor in expected["model"].items():
        assert torch.equal(state["model"][name], tensor)
        for key, moment in expected["optimizer"][name].items():
            assert torch.equal(state["optimizer"][name][key], moment)


def test_weights_of_an_idle_engine_remain_valid(build, tiny_model, rows):
    plain, idle = (build(tiny_model("qwen2"), idle=idle) for idle in (False, True))
    kept = dict(idle.weights())
    assert all(torch.equal(kept[name], weight) for name, weight in plain.weights())
    with idle.on_device(with_optimizer=False):
        own = dict(idle.weights())
        assert all(own[name].data_ptr() == p.data_ptr() for name, p in idle.model.named_parameters())


def test_tied_weights_and_views_are_moved_once(copies):
    whole = torch.arange(12.0)
    model = nn.Module()
    model.a, model.b = nn.Parameter(whole[:4].view(2, 2)), nn.Parameter(whole[4:].view(2, 4).T)
    moved = Offload(model, [], {}, CPU)
    assert (copies["to host"], num_bytes([whole])) == ([48], 0)
    assert moved.stored(model.b).tolist() == [[4, 8], [5, 9], [6, 10], [7, 11]]
    with moved(with_optimizer=False):
        assert (model.a.tolist(), whole.tolist()) == ([[0, 1], [2, 3]], list(range(12)))


def test_step_counts_stay_where_fused_adamw_expects_them():
    """Idle offload leaves tensors without dimensions, and a restored one is made beside its parameter."""
    master = nn.Parameter(torch.ones(3))
    moments = {master: {"exp_avg": torch.ones(3), "step": torch.tensor(2.0)}}
    moved = Offload(nn.Linear(2, 2), [master], moments, CPU)
    assert (num_bytes([moments[master]["exp_avg"]]), moments[master]["step"].item()) == (0, 2)
    with moved():
        assert moments[master]["exp_avg"].tolist() == [1, 1, 1]


def test_error_inside_context_offloads_and_drops_gradients(build, tiny_model, rows):
    engine = build(tiny_model("qwen2"), idle=True)

    def failing(outputs, part):
        if failing.calls:
            raise ValueError("second micro-batch")
        failing.calls += 1
        return loss(outputs, part)

    failing.calls, engine.max_tokens = 0, 9
    with pytest.raises(ValueError, match="second micro-batch"):
        engine.update(rows, failing)
    assert num_bytes(engine.parameters.values()) == 0
    assert all(parameter.grad is None for parameter in engine.parameters.values())


def test_out_of_memory_in_a_move_leaves_everything_on_the_host(build, tiny_model, rows, monkeypatch):
    plain, idle = (build(tiny_model("qwen2"), idle=idle) for idle in (False, True))
    for engine in (plain, idle):
        engine.update(rows, loss)
    resize, calls = torch.UntypedStorage.resize_, []

    def full(self, size):
        calls.append(size)
        if len(calls) == 9:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 KiB.")
        return resize(self, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", full)
        with pytest.raises(ModelError, match=r"out of memory in the move of 0\.0 GiB from the host: CUDA out"):
            idle.update(rows, loss)
    assert calls[9:] == [0] * 8  # what was there is freed again
    assert num_bytes([*idle.parameters.values(), *moments_of(idle)]) == 0
    assert plain.update(rows, loss) == idle.update(rows, loss)


def test_optimizer_state_is_awaited_when_the_optimizer_steps(build, tiny_model, rows, monkeypatch):
    """The device waits for weights on entry, for masters and moments only at the step."""
    engine, events = build(tiny_model("qwen2"), "bfloat16", idle=True), []
    engine.update(rows, loss)
    monkeypatch.setattr(engine._offload._stream, "wait", lambda: events.append("wait"))
    monkeypatch.setattr(engine.learner.masters, "cast", lambda: events.append("stepped"))
    engine.update(rows, lambda outputs, part: (events.append("loss"), loss(outputs, part))[1])
    first = events.index("loss")
    assert set(events[:first]) == {"wait"}
    assert events[first:] == ["loss", "wait", "stepped", "wait"]


@pytest.mark.parametrize("method", ["load_state_dict", "load_shards"])
def test_optimizer_state_is_awaited_before_a_load_frees_it(build, tiny_model, rows, monkeypatch, method):
    engine, awaited = build(tiny_model("qwen2"), idle=True), []
    engine.update(rows, loss)
    state = copy_state(engine.state_dict())
    monkeypatch.setattr(
        engine, "_wait_for_optimizer_state", lambda: awaited.append(list(engine.learner.optimizer.state.values()))
    )
    before = list(engine.learner.optimizer.state.values())
    arguments = {"load_state_dict": (state,), "load_shards": (state, lambda own: None)}[method]
    getattr(engine, method)(*arguments)
    assert [id(moments) for moments in awaited[0]] == [id(moments) for moments in before]


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_shard_that_the_first_pass_pads_keeps_its_size_and_contents(is_trained):
    """FSDP2 replaces shards of uneven size by a part of a longer tensor in its first pass, which changes no weight."""
    model = nn.Linear(4, 3, bias=False)
    expected = model.weight.detach().clone()
    offloaded = Offload(model, model.parameters() if is_trained else [], {}, CPU)
    with offloaded(with_optimizer=False):
        padded = torch.zeros(4, 4)
        padded[:3] = model.weight.detach()
        model.weight.data = padded[:3]
    assert padded.untyped_storage().nbytes() == 0
    for _ in range(2):
        with offloaded(with_optimizer=False):
            assert padded.untyped_storage().nbytes() == 64
            assert torch.equal(padded[:3], expected)
            assert padded[3].tolist() == [0] * 4
