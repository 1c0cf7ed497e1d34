"""The check of families: real configurations pass it, and each planted leak fails the line that is about it."""

import json
from dataclasses import replace

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fixtures.families import small_config
from fixtures.published_models import MODELS
from hybridflow.cli.main import main
from hybridflow.config import Config
from hybridflow.errors import ModelError
from hybridflow.models import attention, kv_cache, paged_kv_cache, shared_prompts
from hybridflow.trainers.family_check import required
from hybridflow.trainers.family_check.check import LINES, run_check
from hybridflow.trainers.family_check.small_config import SmallConfig, kinds_of

TRAINED = ["transformers", "packed", "order", "padded", "shared"]
SAMPLED = ["decoded rows", "reused rows", "decoded pages", "reused pages"]


def failures(kind):
    """Return the kinds of layers by line that fails the check of a small model."""
    return {each.line: each.kind for each in run_check(small_config(kind)).findings if not each.is_ok}


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-8B", "Llama-3.1-8B"])
def test_published_models_pass_in_a_small_copy(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name][0]))
    report = run_check(CONFIG_MAPPING[MODELS[name][0]["model_type"]].from_pretrained(tmp_path))
    assert [finding.line for finding in report.findings if finding.is_ok] == list(LINES)


def test_a_copy_keeps_heads_and_has_each_kind_of_layer_once():
    config = CONFIG_MAPPING["deepseek_v3"]()
    small = SmallConfig(config)
    copy = small.with_layers([kind.first for kind in kinds_of(small)])
    assert [kind.first for kind in kinds_of(small)] == [0, 3]  # the first three have no experts
    assert (copy.num_hidden_layers, copy.first_k_dense_replace, copy.n_routed_experts) == (2, 1, 8)
    assert (copy.qk_nope_head_dim, copy.qk_rope_head_dim, copy.v_head_dim) == (128, 64, 128)
    qwen = SmallConfig(CONFIG_MAPPING["qwen2"](**MODELS["Qwen2.5-7B"][0])).with_layers([0, 1])
    assert (qwen.num_attention_heads, qwen.num_key_value_heads, qwen.head_dim) == (14, 2, 128)


def packed_without_boundaries(monkeypatch):
    build = attention.PackedPlan.from_lengths.__func__
    monkeypatch.setattr(
        attention.PackedPlan, "from_lengths", classmethod(lambda cls, lengths: build(cls, [sum(lengths)]))
    )


def branches_that_see_each_other(monkeypatch):
    attend = shared_prompts.SharedPromptPlan.attend

    def joined(plan, *arguments):
        families = tuple((trunk, sum(rest)) if rest else (trunk,) for trunk, *rest in plan.families)
        return attend(shared_prompts.SharedPromptPlan(families), *arguments)

    monkeypatch.setattr(shared_prompts.SharedPromptPlan, "attend", joined)


def cache_rows_off_by_one(monkeypatch):
    append = kv_cache.KVCache.append
    monkeypatch.setattr(
        kv_cache.KVCache, "append", lambda cache, plan, source, *rest: append(cache, plan, source.roll(1), *rest)
    )


def rows_that_do_not_move(monkeypatch):
    def keep(cache, order):
        cache.keys, cache.values = ([x[: len(order)] for x in part] for part in (cache.keys, cache.values))
        cache.lengths = cache.lengths[torch.tensor(order, dtype=torch.int64)]

    monkeypatch.setattr(kv_cache.KVCache, "keep", keep)


def pages_written_one_token_late(monkeypatch):
    build = paged_kv_cache.PagedDecodePlan.__init__

    def late(plan, cache, tables, ends, running):
        build(plan, cache, tables, ends, running)
        plan._counts = plan._counts - 1

    monkeypatch.setattr(paged_kv_cache.PagedDecodePlan, "__init__", late)



def routes_of_sampling_changed(monkeypatch):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    route = Qwen3MoeTopKRouter.forward

    def changed(router, hidden):
        return route(router, hidden if torch.is_grad_enabled() else hidden.flip(-1))

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", changed)


@pytest.mark.parametrize(
    ("kind", "leak", "lines"),
    [
        ("llama", packed_without_boundaries, {"packed", "order"}),
        ("llama", branches_that_see_each_other, {"shared"}),
        ("llama", cache_rows_off_by_one, {"decoded rows", "reused rows"}),
        ("gpt2", rows_that_do_not_move, {"reused rows"}),
        ("gpt2", pages_written_one_token_late, {"decoded pages", "reused pages"}),
        ("qwen3_moe", routes_of_sampling_changed, set(SAMPLED)),
    ],
)
def test_a_planted_leak_is_seen(monkeypatch, kind, leak, lines):
    leak(monkeypatch)
    found = failures(kind)
    assert lines <= found.keys()
    if leak is not packed_without_boundaries:  # which prefills have too
        assert found.keys() == lines
