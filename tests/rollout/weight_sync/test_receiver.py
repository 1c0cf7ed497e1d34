"""Faults planted between a trainer and a real rollout engine, embedded and vLLM: each is detected and named."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hybridflow.errors import HybridFlowError, RolloutError, WeightSyncError
from hybridflow.models.loading import DTYPES, build_with_placeholders, load_causal_lm
from hybridflow.rollout import EmbeddedRollout, Request, RolloutEngine, SamplingParams, generate
from hybridflow.rollout.weight_sync.base import Announcement
from hybridflow.rollout.weight_sync.buckets import Bucket, WeightSpec, fill_buckets, plan_buckets, spec_of
from hybridflow.rollout.weight_sync.in_process import InProcess
from hybridflow.rollout.weight_sync.probe import Probe, probe_sequences
from hybridflow.rollout.weight_sync.receiver import WeightReceiver

Weights = dict[str, torch.Tensor]
WANTED = [Request(0, [5, 6, 7], SamplingParams(6), 2, (0,))]


def embedded(path: Path, dtype: str) -> RolloutEngine:
    model = build_with_placeholders(path, "policy", DTYPES[dtype], torch.device("cpu"))
    return EmbeddedRollout(model, shares_model=False)


def vllm(path: Path, dtype: str) -> RolloutEngine:
    from fixtures.vllm_engines import lend_engine

    return lend_engine(path, dtype=dtype, weights=False)


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
        return Probe(sequences, EmbeddedRollout(self.model).log_probs(sequences))


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


@pytest.fixture(params=["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def build(request) -> Callable[..., RolloutEngine]:
    return {"embedded": embedded, "vllm": vllm}[request.param]


@pytest.fixture(autouse=True)
def engines_taken_back(request) -> Iterator[None]:
    yield
    if request.node.get_closest_marker("vllm"):
        from fixtures.vllm_engines import take_back_engines

        take_back_engines()


@pytest.fixture
def path(tiny_model) -> Path:
    return tiny_model("qwen2", hidden_size=64, num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture
def trainer(path) -> Trainer:
    return Trainer(path)


@pytest.fixture
def engine(build, path) -> RolloutEngine:
    return build(path, "float32")


@pytest.fixture
def receiver(engine) -> WeightReceiver:
    return WeightReceiver(engine, "float32", InProcess())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sync_gives_trainer_log_probs_and_version(build, path, dtype):
    trainer, engine = Trainer(path, dtype), build(path, dtype)
    receiver = WeightReceiver(engine, dtype, InProcess())
    for learning_rate in (0.02, 1e-6, 1e-6):  # the smallest of them changes the engine too
        metrics = sync(trainer, receiver)
        assert metrics["weight_sync/probe_diff_mean"] < (1e-5 if dtype == "float32" else 0.05)
        assert {version for c in generate(engine, WANTED) for version in c.versions} == {trainer.version}
        trainer.step(learning_rate if dtype == "float32" else 0.02)


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


def test_fault_in_transit_is_an_error_that_names_the_tensor(trainer, engine, receiver):
    sync(trainer, receiver)
    expected = generate(engine, WANTED)
    for in_transit, message in FAULTS.values():
        with pytest.raises(WeightSyncError, match=message):
            sync(trainer, receiver, in_transit=in_transit)
        with pytest.raises(RolloutError, match=r"no complete set of weights|no weights to generate with"):
            generate(engine, WANTED)
    sync(trainer, receiver)
    assert [c.token_ids for c in generate(engine, WANTED)] == [c.token_ids for c in expected]


def test_stale_weights_and_buckets_of_another_version_are_detected(trainer, receiver):
    previous, sent = trainer.weights(), []

    def keeping(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        for bucket in buckets:
            sent.append(bucket)
            yield bucket

    def stale(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        for bucket in buckets:
            yield Bucket({name: previous[name] for name in bucket.weights}, bucket.fingerprints, bucket.version)

    sync(trainer, receiver, in_transit=keeping)
    trainer.step(lr=1e-6)
    with pytest.raises(WeightSyncError, match="changed in transit"):
        sync(trainer, receiver, in_transit=stale)
    with pytest.raises(WeightSyncError, match=r"received weights of version 0 .* but expected version 1"):
        sync(trainer, receiver, in_transit=lambda buckets: iter([*list(buckets)[:-1], sent[-1]]))


def test_probe_detects_weights_that_are_not_the_trainers(trainer, engine, receiver, monkeypatch):
    previous, load = trainer.weights(), engine.load

    def transposing(weights):
        for name, tensor in weights:
            if name.endswith("layers.0.self_attn.k_proj.weight"):  # vLLM fuses it with those of queries and values
                tensor = tensor.clone()
                tensor[:16, :16] = tensor[:16, :16].T.clone()
            yield name, tensor

    with monkeypatch.context() as patch:
        patch.setattr(engine, "load", lambda weights: load(transposing(weights)))
        with pytest.raises(WeightSyncError, match="a weight was loaded into the wrong parameter, or not loaded"):
            sync(trainer, receiver)
    sync(trainer, receiver)
    trainer.step(lr=1e-5)
    with pytest.raises(WeightSyncError, match=r"the engine still has the old weights"):  # sent by the trainer
        sync(trainer, receiver, weights=previous)
    with pytest.raises(RolloutError):
        generate(engine, WANTED)
    for kept, message in (
        ("", "the engine still has the old weights"),
        ("model.norm.weight", "differ from the trainer's"),
    ):
        with monkeypatch.context() as patch:  # an engine that ignores all weights, or all but one
            patch.setattr(
                engine, "load", lambda ws, new=kept: load([(n, t if n == new else previous[n]) for n, t in ws])
            )
            with pytest.raises(WeightSyncError, match=rf"after loading version 1 .*{message}"):
                sync(trainer, receiver)


def test_announcement_is_checked_before_anything_is_loaded(trainer, engine, receiver):
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


def test_nan_log_probs_are_detected(trainer, path):
    trainer.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(WeightSyncError, match="differ from the trainer's: mean difference nan"):
        sync(trainer, WeightReceiver(embedded(path, "float32"), "float32", InProcess()))


def test_out_of_memory_of_an_engine_names_settings_and_it_recovers(trainer, path, monkeypatch):
    def lacks_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    engine = embedded(path, "float32")
    receiver = WeightReceiver(engine, "float32", InProcess())
    for method in ("load", "finish_loading", "log_probs"):
        with monkeypatch.context() as patch:
            patch.setattr(engine, method, lacks_memory)
            message = r"^out of memory in a weight sync: CUDA .*; set a smaller rollout\.sync_bucket_bytes or rollout"
            with pytest.raises(WeightSyncError, match=message):
                sync(trainer, receiver)
        with pytest.raises(RolloutError, match="has no weights to generate with"):
            generate(engine, WANTED)
    sync(trainer, receiver)
    assert len(generate(engine, WANTED)) == 2
