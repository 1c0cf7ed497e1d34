"""The comparison with TRL, with hybridflow's own record in place of TRL's: it accepts equal results and no others."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the modules of the comparison, its recipe and inputs, and a record that was written and read back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        from support import agreement, models, planted_errors, record_comparison
        from support.grpo_files import write_task
        from support.grpo_record import draw_inputs, record_hybridflow

        directory = tmp_path_factory.mktemp("agreement")
        patch.setitem(models.MODELS, "small", models.MODELS["small"] | {"hidden_size": 32, "intermediate_size": 48})
        write_task(directory, threads=1, prompts_per_step=2)
    recipe = directory / "recipe.toml"
    config = agreement.load_config(recipe, agreement.SETTINGS)
    inputs = draw_inputs(config)
    save_file(record_hybridflow(config, inputs), directory / "peer.safetensors")
    return SimpleNamespace(
        agreement=agreement,
        comparison=record_comparison,
        recipe=recipe,
        inputs=inputs,
        record=record_hybridflow,
        peer=load_file(directory / "peer.safetensors"),
        planted=planted_errors.PLANTED_ERRORS,
    )


def compare(recorded, overrides=(), inputs=None):
    config = recorded.agreement.load_config(recorded.recipe, [*recorded.agreement.SETTINGS, *overrides])
    return recorded.comparison.compare(recorded.record(config, inputs or recorded.inputs), recorded.peer)


def test_equal_implementations_agree(recorded):
    comparisons = compare(recorded)
    recorded.comparison.require_agreement(comparisons)
    assert {c.name for c in comparisons} >= {"loss, step 2", "log-prob", "gradient element", "change by both steps"}


def test_another_split_into_micro_batches_agrees(recorded):
    recorded.comparison.require_agreement(compare(recorded, ["memory.max_tokens_per_micro_batch=400"]))


def test_each_planted_error_is_noticed(recorded):
    found = {e.name: compare(recorded, e.overrides, e.change(recorded.inputs)) for e in recorded.planted}
    assert len(found) > 20
    assert [name for name, comparisons in found.items() if all(each.agrees for each in comparisons)] == []
    with pytest.raises(recorded.agreement.BenchmarkError, match="hybridflow and TRL differ on identical samples"):
        recorded.comparison.require_agreement(found["no KL"])


def test_clipping_acts_on_some_tokens_and_both_signs(recorded):
    inputs, mask = recorded.inputs, recorded.inputs["completion_mask"].bool()
    ratio = (recorded.peer["log_probs"] - inputs["old_per_token_logps"]).exp()
    gains = (inputs["advantages"] > 0)[:, None].expand_as(mask)
    clipped = [mask & gains & (ratio > 1.28), mask & ~gains & (ratio < 0.8), mask & ~gains & (ratio > 2.0)]
    assert all(4 <= int(tokens.sum()) <= mask.sum() // 4 for tokens in clipped)
    share = (clipped[0] | clipped[1]).sum() / mask.sum()
    assert recorded.peer["clipped_share.0"].item() == pytest.approx(share.item())


def test_gradients_are_clipped_in_both_steps(recorded):
    assert all(recorded.peer[f"grad_norm.{step}"].item() > 0.2 for step in range(2))  # clip_grad_norm is 0.1


@pytest.mark.parametrize("name", ["gradient.model.norm.weight", "change.lm_head.weight", "log_probs"])
def test_one_wrong_number_is_noticed(recorded, name):
    ours = {key: tensor.clone() for key, tensor in recorded.peer.items()}
    index = int(ours[name].abs().argmax())
    ours[name].view(-1)[index] *= -1
    failed = [c for c in recorded.comparison.compare(ours, recorded.peer) if not c.agrees]
    assert [c.where for c in failed] == [name.partition(".")[2]]
    ours[name].view(-1)[index] = torch.nan
    assert any(not c.agrees for c in recorded.comparison.compare(ours, recorded.peer))


def test_records_of_other_parameters_are_an_error(recorded):
    ours = {key: tensor for key, tensor in recorded.peer.items() if key != "gradient.lm_head.weight"}
    with pytest.raises(recorded.agreement.BenchmarkError, match=r"different tensors: gradient\.lm_head\.weight"):
        recorded.comparison.compare(ours, recorded.peer)


def test_an_unnoticed_planted_error_is_an_error(recorded):
    with pytest.raises(recorded.agreement.BenchmarkError, match="did not notice planted errors: no KL"):
        recorded.agreement.require_noticed({"no KL": []})
