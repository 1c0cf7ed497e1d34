"""Faults planted between a trainer and a real rollout engine, embedded and vLLM: each is detected and named."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hybridflow.errors import HybridFlowError, RolloutError, WeightSyncError
from hybridflow.models import DTYPES, load_causal_lm
from hybridflow.rollout import EmbeddedRollout, Request, RolloutEngine, SamplingParams, generate
from hybridflow.weight_sync import (
    Announcement,
    Bucket,
    InProcess,
    Probe,
    WeightReceiver,
    WeightSpec,
    fill_buckets,
    fingerprint,
    plan_buckets,
    probe_sequences,
    spec_of,
)

Weights = dict[str, torch.Tensor]
WANTED = [Request(0, [5, 6, 7], SamplingParams(6), 2, (0,))]


def embedded(path: Path, dtype: str) -> RolloutEngine:
    from hybridflow.models import build_with_placeholders

    model = build_with_placeholders(path, "policy", DTYPES[dtype], torch.device("cpu"))
    return EmbeddedRollout(model, shares_model=False)


def vllm(path: Path, dtype: str) -> RolloutEngine:
    from hybridflow.rollout.vllm import VLLMRollout

    return VLLMRollout(path, dtype=dtype, enforce_eager=True, kv_cache_bytes=2**26)


@pytest.fixture(params=["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def build(request) -> Callable[..., RolloutEngine]:
    return {"embedded": embedded, "vllm": vllm}[request.param]


@pytest.fixture
def path(tiny_model) -> Path:
    return tiny_model("qwen2", hidden_size=64, num_attention_heads=2, num_key_value_heads=1)


class Trainer:
    """A model that changes with each step, as a sync needs it."""

    def __init__(self, path: Path, dtype: str = "float32") -> None:
        self.model, self.version = load_causal_lm(path, DTYPES[dtype]), 0
        self.model.requires_grad_(False)

    def step(self, lr: float) -> None:
        generator = torch.Generator().manual_seed(self.version)
        for parameter in self.model.parameters():
            parameter += lr * torch.randn(parameter.shape, generator=generator).sign().to(parameter.dtype)
        self.version += 1

    def weights(self) -> Weights:
        return {name: tensor.clone() for name, tensor in self.model.named_parameters()}

    def probe(self) -> Probe:
        sequences = probe_sequences(40, 64)
        log_probs = []
        for sequence in sequences:
            tokens = torch.tensor(sequence)
            with torch.no_grad():
                logits = EmbeddedRollout(self.model).log_probs([sequence])[0]
            assert len(logits) == len(tokens) - 1
            log_probs.append(logits)
        return Probe(sequences, log_probs)


def receiver_of(engine: RolloutEngine, dtype: str = "float32") -> WeightReceiver:
    return WeightReceiver(engine, dtype, InProcess())


def sync(
    trainer: Trainer,
    receiver: WeightReceiver,
    *,
    weights: Weights | None = None,
    specs: Callable[[list[WeightSpec]], list[WeightSpec]] = list,
    in_transit: Callable[[Iterator[Bucket]], Iterator[Bucket]] = iter,
) -> dict[str, float]:
    """Run a whole sync; faults are planted by `weights`, `specs` and `in_transit`."""
    weights = weights or trainer.weights()
    described = [spec_of(name, tensor) for name, tensor in weights.items()]
    plan = plan_buckets(described, 20_000)
    receiver.start(Announcement(specs(described), len(plan), trainer.version))
    for bucket in in_transit(fill_buckets(plan, weights.items(), trainer.version)):
        receiver.receive(InProcess().send(bucket).apart())
    receiver.finish()
    return receiver.check(trainer.probe())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sync_gives_trainer_log_probs_and_version(build, path, dtype):
    trainer, engine = Trainer(path, dtype), build(path, dtype)
    receiver = receiver_of(engine, dtype)
    for _ in range(3):
        metrics = sync(trainer, receiver)
        assert metrics["weight_sync/probe_diff_mean"] < (1e-5 if dtype == "float32" else 0.05)
        versions = {version for c in generate(engine, WANTED) for version in c.versions}
        assert versions == {trainer.version}
        trainer.step(lr=0.02)


def test_step_with_learning_rate_1e_6_changes_engine(build, path):
    trainer, engine = Trainer(path), build(path, "float32")
    receiver = receiver_of(engine)
    for _ in range(4):
        sync(trainer, receiver)
        trainer.step(lr=1e-6)


def one_unit(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
    """Change one element by one unit in the last place in transit."""
    for bucket in buckets:
        for name, tensor in bucket.weights.items():
            if name.endswith("layers.1.mlp.up_proj.weight"):
                changed = tensor.clone()
                changed[3, 5] = torch.nextafter(changed[3, 5], torch.tensor(9.0))
                bucket.weights[name] = changed
        yield bucket


def missing(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
    for bucket in buckets:
        bucket.weights.pop("model.norm.weight", None)
        yield bucket


def twice(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
    first = next(buckets)
    yield first
    yield first


def another_shape(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
    first = next(buckets)
    name = next(iter(first.weights))
    first.weights[name] = first.weights[name].T
    yield first


FAULTS = {
    "one unit in the last place": (one_unit, r"'model\.layers\.1\.mlp\.up_proj\.weight' changed in transit"),
    "missing": (missing, r"weights were not received: model\.norm\.weight"),
    "twice": (twice, r"weight 'model\.embed_tokens\.weight' was received twice"),
    "another shape": (another_shape, r"'model\.embed_tokens\.weight' was received as .*shape=\(64, 40\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_transit_error_names_tensor(build, path, fault):
    trainer, engine = Trainer(path), build(path, "float32")
    receiver = receiver_of(engine)
    sync(trainer, receiver)
    expected = generate(engine, WANTED)
    in_transit, message = FAULTS[fault]
    with pytest.raises(WeightSyncError, match=message):
        sync(trainer, receiver, in_transit=in_transit)
    with pytest.raises(RolloutError, match=r"no complete set of weights|no weights to generate with"):
        generate(engine, WANTED)
    sync(trainer, receiver)
    assert [c.token_ids for c in generate(engine, WANTED)] == [c.token_ids for c in expected]


def test_stale_weights_in_transit_are_detected(build, path):
    trainer, engine = Trainer(path), build(path, "float32")
    receiver = receiver_of(engine)
    previous = trainer.weights()
    sync(trainer, receiver)
    trainer.step(lr=1e-6)

    def stale(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        for bucket in buckets:
            yield Bucket({name: previous[name] for name in bucket.weights}, bucket.fingerprints, bucket.version)

    with pytest.raises(WeightSyncError, match="changed in transit"):
        sync(trainer, receiver, in_transit=stale)


def test_bucket_of_another_version_is_detected_despite_valid_fingerprints(build, path):
    trainer, engine = Trainer(path), build(path, "float32")
    receiver = receiver_of(engine)
    sent = []

    def keeping(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        for bucket in buckets:
            sent.append(bucket)
            yield bucket

    sync(trainer, receiver, in_transit=keeping)
    trainer.step(lr=1e-6)
    with pytest.raises(WeightSyncError, match=r"received weights of version 0 .* but expected version 1"):
        sync(trainer, receiver, in_transit=lambda buckets: iter([*list(buckets)[:-1], sent[-1]]))


def test_probe_detects_engine_that_keeps_most_old_weights(build, path, monkeypatch):
    trainer, engine = Trainer(path), build(path, "float32")
    receiver = receiver_of(engine)
    sync(trainer, receiver)
    old, load = trainer.weights(), engine.load
    new = "model.norm.weight"
    monkeypatch.setattr(engine, "load", lambda ws: load([(n, t if n == new else old[n]) for n, t in ws]))
    trainer.step(lr=1e-5)
    with pytest.raises(WeightSyncError, match=r"after loading version 1 .* differ from the trainer's"):
        sync(trainer, receiver)


def test_probe_detects_trainer_that_sends_stale_weights(build, path):
    trainer, engine = Trainer(path), build(path, "float32")
    receiver = receiver_of(engine)
    previous = trainer.weights()
    sync(trainer, receiver)
    trainer.step(lr=1e-6)
    with pytest.raises(WeightSyncError, match=r"the engine still has the old weights"):
        sync(trainer, receiver, weights=previous)
    with pytest.raises(RolloutError):
        generate(engine, WANTED)


def test_probe_detects_engine_that_ignores_loaded_weights(build, path, monkeypatch):
    trainer, engine = Trainer(path), build(path, "float32")
    receiver = receiver_of(engine)
    sync(trainer, receiver)
    old, load = trainer.weights(), engine.load
    monkeypatch.setattr(engine, "load", lambda weights: load([(name, old[name]) for name, _ in weights]))
    trainer.step(lr=1e-6)
    with pytest.raises(WeightSyncError, match=r"after loading version 1 .* the engine still has the old weights"):
        sync(trainer, receiver)


def test_probe_detects_transposed_block_inside_fused_weight(build, path, monkeypatch):
    trainer, engine = Trainer(path), build(path, "float32")
    receiver, load = receiver_of(engine), engine.load

    def transposing(weights):
        for name, tensor in weights:
            if name.endswith(
                "layers.0.self_attn.k_proj.weight"
            ):  # vLLM fuses it with the weights of queries and values
                tensor = tensor.clone()
                tensor[:16, :16] = tensor[:16, :16].T.clone()
            yield name, tensor

    monkeypatch.setattr(engine, "load", lambda weights: load(transposing(weights)))
    with pytest.raises(WeightSyncError, match="a weight was loaded into the wrong parameter, or not loaded"):
        sync(trainer, receiver)


def test_announcement_is_checked_before_anything_is_loaded(build, path):
    trainer, engine = Trainer(path), build(path, "float32")
    receiver = receiver_of(engine)
    sync(trainer, receiver)
    expected = generate(engine, WANTED)
    for specs, message in (
        (lambda s: s[1:], r"weights are missing: model\.embed_tokens\.weight"),
        (lambda s: [*s, s[0]], "'model.embed_tokens.weight' was announced twice"),
        (lambda s: [*s, WeightSpec("extra", (2,), "float32")], "no weights called extra"),
    ):
        with pytest.raises(HybridFlowError, match=message):
            sync(trainer, receiver, specs=specs)
        assert generate(engine, WANTED) == expected


def test_nan_log_probs_are_detected(path):
    trainer, engine = Trainer(path), embedded(path, "float32")
    trainer.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(WeightSyncError, match="differ from the trainer's: mean difference nan"):
        sync(trainer, receiver_of(engine))


def test_fingerprints_of_bucket_are_those_of_its_tensors(path):
    weights = Trainer(path).weights()
    plan = plan_buckets([spec_of(name, tensor) for name, tensor in weights.items()], 10**9)
    (bucket,) = fill_buckets(plan, weights.items(), 1)
    assert bucket.fingerprints == {name: fingerprint(tensor) for name, tensor in weights.items()}
    assert bucket.num_bytes == sum(tensor.nbytes for tensor in weights.values())


@pytest.mark.parametrize("method", ["load", "finish_loading", "log_probs"])
def test_out_of_memory_of_an_engine_names_settings_and_it_recovers(path, monkeypatch, method):
    def lacks_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    trainer, engine = Trainer(path), embedded(path, "float32")
    receiver = receiver_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine, method, lacks_memory)
        message = r"^out of memory in a weight sync: CUDA .*; set a smaller rollout\.sync_bucket_bytes or rollout\.gpu"
        with pytest.raises(WeightSyncError, match=message):
            sync(trainer, receiver)
    with pytest.raises(RolloutError, match="has no weights to generate with"):
        generate(engine, WANTED)
    sync(trainer, receiver)
    assert len(generate(engine, WANTED)) == 2
