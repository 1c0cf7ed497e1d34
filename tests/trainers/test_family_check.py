"""The check of families: real configurations pass it, and each planted leak fails the line that is about it."""

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fixtures.families import FAMILIES, small_config
from fixtures.published_models import MODELS
from hybridflow.config import Config, MemoryConfig, ModelConfig
from hybridflow.errors import ModelError
from hybridflow.models import attention, kv_cache, paged_kv_cache, shared_prompts
from hybridflow.models.experts import experts_of
from hybridflow.models.recurrence import States
from hybridflow.trainers.build.preconditions import with_required_files
from hybridflow.trainers.family_check import lines, required
from hybridflow.trainers.family_check.check import LINES, OTHER_MODEL, Finding, Report, run_check
from hybridflow.trainers.family_check.lines import Difference
from hybridflow.trainers.family_check.small_config import SmallConfig, kinds_of

MORE = pytest.mark.exhaustive
SAMPLED = ["decoded rows", "reused rows", "decoded pages", "reused pages"]


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Llama-3.1-8B"])
def test_published_models_pass_in_a_small_copy(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name][0]))
    before = torch.get_rng_state(), torch.get_num_threads()
    report = run_check(CONFIG_MAPPING[MODELS[name][0]["model_type"]].from_pretrained(tmp_path))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]
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
    """Let the next expert compute a token in place of each that its router has chosen."""
    load = lines.load_causal_lm

    def next_ones(experts, arguments):
        hidden, chosen, weights = arguments
        return None if torch.is_grad_enabled() else (hidden, (chosen + 1) % experts.num_experts, weights)

    def changed(directory):
        model = load(directory)
        for experts in experts_of(model):
            experts.register_forward_pre_hook(next_ones)
        return model

    monkeypatch.setattr(lines, "load_causal_lm", changed)


def form_without(part, *, only_sampling=False):
    """Return a leak: attention that ignores a part of its form."""

    def ignored(monkeypatch):
        form = attention.AttentionForm

        def build(*values):
            is_whole = only_sampling and torch.is_grad_enabled()
            return form(*values) if is_whole else replace(form(*values), **{part: None})

        monkeypatch.setattr(attention, "AttentionForm", build)

    return ignored


def states_that_go_on_in_the_next_row(monkeypatch):
    monkeypatch.setattr(attention.PackedPlan, "recur", lambda plan, layer, hidden, compute: compute(hidden, None))


def states_of_sampling_in_other_rows(monkeypatch):
    of_rows = States.of_rows
    monkeypatch.setattr(States, "of_rows", lambda s, i: of_rows(s, i if isinstance(i, slice) else i.roll(1)))


LEAKS = {
    "boundaries": [(packed_without_boundaries, "packed")],
    "states": [(states_that_go_on_in_the_next_row, "packed"), (states_of_sampling_in_other_rows, "decoded rows")],
    "experts": [(routes_of_sampling_changed, "decoded rows")],
    **{
        part: [(form_without(part), "transformers"), (form_without(part, only_sampling=True), "decoded rows")]
        for part in ("window", "softcap", "sinks")
    },
}
"""Leaks of what a family has, each with the line that is about it."""
LAYERS = {
    "window": "sliding",
    "states": "linear_attention|conv",
    "experts": r"(MoE|Moe|M[oO]EBlock|MoeBlock|MoELayer)\b",
}
"""Names of kinds of layers that have it; a family whose layers have other names has it in all of them."""


def parts_of(monkeypatch, config):
    """Return what the layers of a family add to plain attention, after a check that finds no difference."""
    found, form, read, load = set(), attention.AttentionForm, States.read, lines.load_causal_lm

    def build(*values):
        built = form(*values)
        found.update(part for part in ("window", "softcap", "sinks") if getattr(built, part) is not None)
        return built

    def note(part, function):
        return lambda *values: found.update([part]) or function(*values)

    def loaded(directory):
        model = load(directory)
        found.update(["experts"] if experts_of(model) else [])
        return model

    monkeypatch.setattr(attention, "AttentionForm", build)
    monkeypatch.setattr(States, "read", note("states", read))
    monkeypatch.setattr(lines, "load_causal_lm", loaded)
    assert [each.line for each in run_check(config).findings if not each.is_ok] == []
    return found


def require_named(monkeypatch, kind, part, leak, line):
    with monkeypatch.context() as planted:
        leak(planted)
        report = run_check(small_config(kind))
    failed = next(each for each in report.findings if not each.is_ok)
    layers = [title for title in report.kinds if re.search(LAYERS.get(part, ""), title)] or report.kinds
    # No olmo_hybrid has layers of one kind alone.
    names = f"the mix of {', '.join(report.kinds)}" if kind == "olmo_hybrid" else " and ".join(layers)
    assert (failed.line, failed.kind) == (line, names), part


@pytest.mark.parametrize(("kind", "part"), [("gemma3_text", "window"), ("qwen3_5_text", "states")])
def test_a_leak_names_the_kind_of_layer_that_has_it(monkeypatch, kind, part):
    require_named(monkeypatch, kind, part, *LEAKS[part][0])


@MORE
@pytest.mark.parametrize("kind", FAMILIES)
def test_each_leak_of_what_a_family_has_names_the_layers_that_have_it(monkeypatch, kind):
    with monkeypatch.context() as watched:
        parts = {"boundaries"} | parts_of(watched, small_config(kind))
    for part in parts:
        for leak in LEAKS[part]:
            require_named(monkeypatch, kind, part, *leak)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("bloom", "transformers"),  # its code takes no position_ids
        pytest.param("diffllama", "decoded rows", marks=MORE),  # a layer attends twice
        pytest.param("recurrent_gemma", "packed", marks=MORE),  # a state that asks no plan
        pytest.param("stablelm", "transformers", marks=MORE),  # attention without a plan
        pytest.param("bert-generation", "transformers", marks=MORE),  # not causal
        pytest.param("llama4_text", "transformers", marks=MORE),  # chunks
    ],
)
def test_a_family_beside_the_plans_fails_the_check(kind, line):
    config = CONFIG_MAPPING[kind]() if kind == "llama4_text" else small_config(kind)
    assert next(each.line for each in run_check(config).findings if not each.is_ok) == line


@pytest.mark.parametrize(
    ("kind", "leak", "about"),
    [
        ("llama", packed_without_boundaries, {"packed", "order"}),
        ("llama", branches_that_see_each_other, {"shared"}),
        # Its embedding makes it repeat tokens.
        ("minicpm3", cache_rows_off_by_one, {"decoded rows", "reused rows"}),
        ("minicpm3", rows_that_do_not_move, {"reused rows"}),
        ("minicpm3", pages_written_one_token_late, {"decoded pages", "reused pages"}),
        ("qwen3_moe", routes_of_sampling_changed, set(SAMPLED)),
    ],
)
def test_a_planted_leak_fails_the_line_about_it(monkeypatch, kind, leak, about):
    leak(monkeypatch)
    found = {each.line for each in run_check(small_config(kind)).findings if not each.is_ok}
    also = set(SAMPLED) if leak is packed_without_boundaries else set()  # prompts are packed
    assert about <= found <= about | also


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Return the configurations that were checked, in an empty cache."""
    checked = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def check(config):
        checked.append(config)
        findings = [Finding(line, Difference(0.5 * (line == "shared"), 0.0, "w"), "a kind") for line in LINES]
        return Report(config.model_type, ("a kind",), tuple(findings))

    monkeypatch.setattr(required, "run_check", check)
    return checked


def test_a_family_is_checked_once_for_its_sizes_and_versions(kept, monkeypatch):
    first = required.report_of(small_config("llama"))
    again = required.report_of(small_config("llama", vocab_size=37, hidden_size=64))  # the same small copy
    assert (len(kept), again) == (1, first)
    required.report_of(small_config("llama", num_key_value_heads=4))
    assert len(kept) == 2
    monkeypatch.setattr(required.transformers, "__version__", "0")
    required.report_of(small_config("llama"))
    assert len(kept) == 3


@pytest.mark.parametrize("kind", ["mamba", "gpt2", "deepseek_v3", "gemma3", "granitemoehybrid"])
def test_any_configuration_has_a_result_of_its_own(kept, kind):
    assert required.report_of(CONFIG_MAPPING[kind]()).model_type == kind


def test_lines_that_fail_by_one_cause_have_one_remedy_or_that_of_any_failure():
    fails, differs = Difference(error="it fails"), Difference(0.5, 0.0, "w")
    found = {"transformers": Difference(), "packed": fails, "order": fails, "padded": differs, "shared": Difference()}
    report = Report("x", ("a",), tuple(Finding(line, each, "" if each.is_ok else "a") for line, each in found.items()))
    first, second = report.causes()
    titles = "rows packed = alone, rows packed in another order = alone"
    assert first == f"{titles}: it fails, in layers of a; set memory.packing = false."
    assert second.endswith("in layers of a; set memory.packing = true.")
    assert report.causes(["padded"]) == [second]
    mixed = Report("x", ("a",), (Finding("packed", fails, "a"), Finding("padded", fails, "a")))
    assert mixed.causes() == [f"all lines: it fails, in layers of a; {OTHER_MODEL}."]


def test_a_run_stops_only_for_lines_that_it_needs(kept, tiny_model):
    models = {"model.path": str(tiny_model("llama"))}
    message = "prompts shared = rows alone: log-probs differ by 0.5 .*in layers of a kind; set memory.share_prompts = f"
    with pytest.raises(ModelError, match=f"model.path='.*llama models fail the check of their family: {message}"):
        required.require_families(Config(), models, generates=True)
    required.require_families(Config(memory=MemoryConfig(share_prompts=False)), models, generates=True)
    needed = required.lines_of_run(Config(memory=MemoryConfig(packing=False)), generates=False)
    assert needed == {"transformers", "padded"}
    assert required.lines_of_run(Config(), generates=True) == set(LINES) - {"padded"}


def test_a_run_checks_its_models_before_it_reads_weights(kept, tiny_model, tmp_path):
    for file in tiny_model("llama").iterdir():
        if "safetensors" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = Config(model=ModelConfig(path=str(tmp_path)))
    with pytest.raises(ModelError, match="llama models fail the check of their family: prompts shared"):
        with_required_files(config)
    assert len(kept) == 1


def test_a_line_that_cannot_be_computed_says_why(monkeypatch):
    def refused(*_):
        raise ModelError("no such plan")

    monkeypatch.setattr(shared_prompts.SharedPromptPlan, "attend", refused)
    (failed,) = [each for each in run_check(small_config("llama")).findings if not each.is_ok]
    assert (failed.line, failed.difference.text) == ("shared", "ModelError: no such plan")


def test_a_name_that_no_code_knows_is_named():
    for change in ({"hidden_act": "evil"}, {"rope_parameters": {"rope_type": "evil"}}):
        with pytest.raises(ModelError, match=r"KeyError: 'evil', perhaps a name in config\.json\)"):
            run_check(small_config("llama", **change))


def test_a_list_as_long_as_the_model_is_not_always_one_of_its_layers():
    config = small_config("falcon_h1", num_hidden_layers=2)
    assert len(config.time_step_limit) == 2
    assert SmallConfig(config).with_layers([0, 0]).time_step_limit == config.time_step_limit
