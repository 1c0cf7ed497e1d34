"""The micro-batch loop does not wait for the device: it runs on the meta device, where every read of a tensor raises.

A read by the host, `nonzero`, indexing with a mask and a copy to the host raise there, in the forward and the backward
pass. Only a model without a fused forward pass and with memory.packing=false reads one number per micro-batch.
"""

import pytest
import torch

from hybridflow.config import Config
from hybridflow.workers.losses import actor_loss, critic_loss, sft_loss, slope_loss

META = torch.device("meta")
SETTINGS = {"actor": {"entropy_coef": 0.01, "epochs": 2}, "algorithm": {"kl_in_loss": True}}


@pytest.fixture
def rows(rollout_rows):
    batch = rollout_rows([3, 1, 5, 2, 4, 3], [4, 6, 1, 3, 6, 0])
    mask = batch.batch["response_mask"]
    for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "values", "returns"):
        batch.batch[name] = torch.zeros(mask.shape)
    batch.batch["loss_slopes"] = torch.ones(len(mask))
    return batch


@pytest.fixture
def build_on_meta(tiny_model, build_engine, monkeypatch):
    """Return a function that builds an engine on the meta device."""
    monkeypatch.setattr("hybridflow.engines.torch_engine.own_device", lambda: META)

    def build(family="qwen3", head="policy", **options):
        path = tiny_model(family, **{"sliding_window": None} if family == "mistral" else {})
        return build_engine(path, head, **{"dtype": "bfloat16", "max_tokens": 16} | options)

    return build


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True, "lora": {"rank": 2}},
        {"packing": False, "head": "value"},
        {"family": "mistral", "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_the_host_reads_no_tensor_between_micro_batches(build_on_meta, rows, options):
    engine = build_on_meta(**options)
    of_policy = engine.head == "policy"
    loss = (actor_loss if of_policy else critic_loss)(
        *([Config(**SETTINGS), 0.05] if of_policy else [Config()]), num_tokens=20, num_sequences=5
    )
    engine.add_to_update(rows, loss, number=0, is_last=True, with_entropy=of_policy, temperature=0.7)
    shares, counts = engine.learner._started.shares, engine.learner._started.counts
    assert len(shares) > 1
    assert counts["num_tokens"] == int(rows.batch["attention_mask"].sum())
    values = [value for share in shares for value in (share.loss, *share.metrics.values())]
    assert {value.device for value in values} == {META}
    assert all(parameter.grad.device == META for parameter in engine.parameters.values())


@pytest.mark.parametrize("loss", [sft_loss(20), slope_loss("log_probs")], ids=["sft", "dpo"])
def test_the_losses_of_offline_training_read_no_tensor(build_on_meta, rows, loss):
    engine = build_on_meta()
    engine.add_to_update(rows, loss, number=0, is_last=True)
    assert len(engine.learner._started.shares) > 1


def test_outputs_without_gradient_are_computed_without_a_read(build_on_meta, rows):
    engine = build_on_meta()
    rows.batch["candidate_ids"] = torch.zeros(*rows.batch["response_mask"].shape, 3, dtype=torch.int64)
    with torch.no_grad():
        for indices in engine.row_forward.micro_batches(rows):
            model_input = engine.row_forward.arrange(rows.select_idxs(indices))
            outputs = engine.row_forward.compute(
                model_input,
                with_entropy=True,
                temperature=0.7,
                with_sum_squared_probs=True,
                top_k=4,
                top_k_below=30,
            )
            assert {values.device for values in outputs.values()} == {META}
            assert outputs["top_ids"].shape == (*model_input.response_mask.shape, 4)
