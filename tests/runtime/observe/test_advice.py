"""Each finding of the advice is raised by metrics or data with that fault, and healthy ones raise none."""

import shutil

import pytest
import torch

from hybridflow.cli.main import main
from hybridflow.config import leaf_keys, load_config
from hybridflow.config.render import toml_value
from hybridflow.data import prompt_row, write_prompt_file
from hybridflow.runtime.observe.advice import advice_from, find_advice
from hybridflow.runtime.observe.evidence import Evidence
from hybridflow.runtime.observe.findings import FINDINGS
from hybridflow.runtime.observe.run_files import RunFiles

HEALTHY = {
    "training/epoch": 0,
    "critic/score/mean": 0.5,
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
    "critic/zero_variance_groups": 0.2,
    "critic/advantages/min": -1.0,
    "critic/advantages/max": 1.0,
    "response_length/clip_ratio": 0.1,
    "reward/error_rate": 0.0,
    "reward/timeout_rate": 0.0,
    "reward/format/mean": 0.7,
    "actor/loss": 0.1,
    "actor/kl_loss": 0.01,
    "actor/ppo_kl": 0.001,
    "actor/entropy": 1.0,
    "actor/clipfrac": 0.05,
    "actor/lr": 1e-6,
    "actor/padding_computed": 0.0,
    "rollout/log_prob_mismatch": 0.01,
    "perf/actor_rollout_idle_share": 0.2,
    "perf/num_tokens": 1e5,
}
EQUAL = {"critic/score/min": 0.5, "critic/score/max": 0.5, "critic/zero_variance_groups": 1.0}
PLANTED = {
    "task solved": {"critic/score/mean": 0.99},
    "equal rewards": EQUAL,
    "groups without variance": {"critic/zero_variance_groups": 0.9},
    "format never right": {"reward/format/mean": 0.0},
    "reward errors": {"reward/error_rate": 0.06},
    "reward time-outs": {"reward/timeout_rate": 0.02},
    "KL running away": {"actor/kl_loss": 0.2},
    "updates too large": {"actor/ppo_kl": 0.2},
    "ratio clipped": {"actor/clipfrac": 0.4},
    "log-prob mismatch": {"rollout/log_prob_mismatch": 0.06},
    "learning rate 0": {"actor/lr": 0.0},
    "truncation": {"response_length/clip_ratio": 0.6},
    "padding": {"actor/padding_computed": 0.6},
    "idle processes": {"perf/rollout_idle_share": 0.7},
}
"""Metrics of a run with a fault, in all steps, by the name of the finding."""


def test_findings_that_are_no_faults_are_notes():
    assert {each.name for each in FINDINGS if each.is_note} == {"task solved", "padding", "idle processes"}


def found(*changes, metrics=HEALTHY, steps=20, first_step=False, **evidence):
    config = leaf_keys(load_config(None, changes))
    rows = [{"step": step, **metrics} for step in range(1, steps + 1)]
    return advice_from(Evidence(config, evidence.pop("rows", rows), **evidence), at_first_step=first_step)


def names(*changes, **evidence):
    return [advice.name for advice in found(*changes, **evidence)]


def test_planted_healthy_metrics_raise_no_finding():
    assert names() == names(steps=1) == names(steps=0) == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_in_the_metrics_is_found_with_a_key_to_change(name):
    of_run = ["reward.on_error=zero"] if name.startswith("reward ") else []  # a run with such rewards has it
    (advice,) = found(*of_run, metrics=HEALTHY | PLANTED[name])
    assert advice.name == name
    assert advice.seen
    assert advice.why.endswith(".")
    assert advice.keys
    assert advice.steps == (1, 20)
    assert advice.metric in {"equal rewards": {"critic/score/mean"}}.get(name, PLANTED[name])
    known = leaf_keys(load_config(None, of_run))
    assert all(known[key] == now and now not in values for key, now, values in advice.keys)
    first = [f"{key}={toml_value(values[0])}" for key, _, values in advice.keys if values][:1]
    assert leaf_keys(load_config(None, [*of_run, *first])) != known


def test_advice_is_one_line_with_values_computed_from_the_current_ones():
    (advice,) = found("rollout.group_size=6", "rollout.top_p=0.9", metrics=HEALTHY | PLANTED["groups without variance"])
    assert advice.line == (
        "steps 1 to 20: groups without variance: the responses to a prompt have equal scores in 90% of the groups. A "
        "group with equal scores has advantages of 0, so its generation is spent without a learning signal. Try "
        "rollout.group_size = 12 or 24 (now 6), try rollout.temperature = 1.2 or 1.4 (now 1.0), try rollout.top_p = "
        "1.0 (now 0.9), try algorithm.filter_groups = true (now false), check data.train_files (now [])."
    )


def test_thresholds_are_keys_or_fixed():
    named = {f"advice.{each.threshold}" for each in FINDINGS if isinstance(each.threshold, str)}
    assert named == {key for key in leaf_keys() if key.startswith("advice.")} - {"advice.enabled", "advice.window"}
    fixed = {each.name: each.threshold for each in FINDINGS if not isinstance(each.threshold, str)}
    assert fixed == {"learning rate 0": 0, "chat template suspicious": 0.1, "data contradictory": 0, "padding": 0.5}


def test_advice_on_rewards_names_the_environments_that_give_them():
    config = ["environment.classes={maze = 'maze.py:Maze'}"]
    (advice,) = found(*config, metrics=HEALTHY | PLANTED["reward errors"])
    assert ("environment.classes", {"maze": "maze.py:Maze"}, ()) in advice.keys
    assert "reward.function" not in advice.line


def test_a_threshold_turns_its_finding_off():
    assert names("advice.truncation=0.7", metrics=HEALTHY | PLANTED["truncation"]) == []
    assert names("advice.truncation=1.0", metrics=HEALTHY | {"response_length/clip_ratio": 1.0}, first_step=True) == []


def test_only_the_newest_steps_count():
    rows = [{"step": step, **HEALTHY, "actor/kl_loss": 0.5 if step < 30 else 0.0} for step in range(1, 51)]
    assert names(rows=rows) == []
    (advice,) = found("advice.window=30", rows=rows)
    assert (advice.name, advice.steps) == ("KL running away", (21, 50))


def test_one_step_proves_only_what_is_total():
    assert names(metrics=HEALTHY | {"response_length/clip_ratio": 0.9}, steps=1, first_step=True) == []
    assert names(metrics=HEALTHY | {"response_length/clip_ratio": 1.0}, steps=1, first_step=True) == ["truncation"]
    assert names(metrics=HEALTHY | PLANTED["groups without variance"], steps=1, first_step=True) == []
    assert names(metrics=HEALTHY | EQUAL, steps=1, first_step=True) == ["equal rewards"]


GAE, REMAX = ["algorithm.advantage=gae"], ["algorithm.advantage=remax", "rollout.group_size=1"]


def test_equal_rewards_are_those_that_the_estimator_compares():
    assert names(*GAE, metrics=HEALTHY | {"critic/zero_variance_groups": 1.0}) == []
    assert names(*GAE, metrics=HEALTHY | EQUAL) == ["equal rewards"]
    one = [*GAE, "rollout.group_size=1", "data.train_batch_size=1"]
    assert names(*one, metrics=HEALTHY | EQUAL) == []
    assert names(*REMAX, metrics=HEALTHY | EQUAL) == []
    same_as_greedy = {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}
    assert names(*REMAX, metrics=HEALTHY | EQUAL | same_as_greedy) == ["equal rewards"]
    distillation = ["algorithm.advantage=distillation", "teacher.model_path=m"]
    assert names(*distillation, metrics=HEALTHY | EQUAL) == []


def test_dynamic_sampling_is_judged_by_the_sampled_groups():
    metrics = HEALTHY | {"critic/zero_variance_groups": 0.0, "sampling/differing_groups": 0.1}
    (advice,) = found("algorithm.filter_groups=true", metrics=metrics)
    assert advice.seen == "the responses to a prompt have equal scores in 90% of the sampled groups"


def test_a_partial_reward_that_all_responses_get_is_not_solved():
    rows = [{"step": 1, **HEALTHY, "critic/score/max": 0.1, "critic/score/mean": 0.05}]
    rows += [{"step": step, **HEALTHY} | dict.fromkeys(("critic/score/mean", *EQUAL), 0.1) for step in range(2, 30)]
    assert names(rows=rows) == ["equal rewards"]


def test_entropy_is_compared_with_its_first_value():
    rows = [{"step": step, **HEALTHY, "actor/entropy": 2.0 / step} for step in range(1, 41)]
    (advice,) = found(rows=rows)
    assert advice.name == "entropy collapse"
    assert advice.seen.startswith("the entropy fell from 2 to 0.05")
    assert names("advice.entropy=0.0", rows=rows) == []


CHAT = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "rendered", "sign"),
    [
        ("How many?", CHAT, None),
        ("How many?", "<s>[INST] How many? [/INST]", None),
        ("How many?", "How many?", None),
        ("Be short.\nHow many?\n", "<|user|>Be short.\n\nHow many?<|assistant|>", None),
        ("How many?", "<s><s>[INST] How many? [/INST]", "begin with two BOS tokens"),
        ("How many?", CHAT.removesuffix("<|im_start|>assistant\n"), "end without a generation prompt"),
        ("How many?", "<|user|>How many?", "end without a generation prompt"),
        ("How many?", CHAT.replace("How many?", ""), "lack the text of the prompt after the template is applied"),
        (CHAT, f"<|im_start|>user\n{CHAT}", "hold '<|im_start|>' before the template is applied to them"),
        (CHAT, CHAT, "hold '<|im_start|>', but no template was applied"),
    ],
)
def test_rendered_prompts_show_a_wrong_chat_template(prompt, rendered, sign):
    samples = [{"step": 1, "prompt": prompt, "rendered_prompt": rendered}]
    assert [each.seen for each in found(samples=samples)] == [f"1 of 1 logged prompts {sign}"] * (sign is not None)
    if prompt == rendered == CHAT:  # prompts that the user or an environment has rendered
        assert names("data.chat_template=false", samples=samples) == []
    if sign == "lack the text of the prompt after the template is applied":
        assert names("environment.classes={a = 'a.py:A'}", samples=samples) == []


def test_samples_show_contradictory_truths():
    for truth in ({"value": 2, "unit": "m"}, {1: "a", "b": 2}):  # keys of several types are compared
        samples = [{"step": 1, "prompt": "1 + 1", "ground_truth": truth} for _ in range(2)]
        assert names(samples=samples) == []
        (advice,) = found(samples=[*samples, {"step": 1, "prompt": "1 + 1", "ground_truth": 3}])
        assert advice.seen == "1 of 1 logged prompts have several ground truths, such as '1 + 1'"
        assert advice.metric == ""


def test_offline_runs_are_judged_by_their_own_metrics():
    advice = found(metrics={"sft/lr": 0.0, "sft/padding_computed": 0.7, "perf/num_tokens": 100})
    assert [each.name for each in advice] == ["learning rate 0", "padding"]
    assert advice[0].seen == "sft/lr is 0"


TEMPLATE = "{% for m in messages %}<|im_start|>user {{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: its data have faults")
def test_a_run_whose_data_have_faults_raises_their_findings(task, tmp_path):
    numbers = [{"target": target, "numbers": [target]} for target in (3, 4)]
    rows = [
        prompt_row(data_source="countdown", prompt=f"{i % 6} =>", ground_truth=numbers[i // 12], split="train", index=i)
        for i in range(24)
    ]
    write_prompt_file(tmp_path / "faulty.parquet", rows)
    shutil.copytree(task / "model", tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    changes = [f"data.train_files=['{tmp_path}/faulty.parquet']", "data.val_files=[]", "data.max_prompt_length=32"]
    changes += [f"model.path={tmp_path}/chat", "trainer.log_samples=8", f"trainer.run_dir={tmp_path}/run"]
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    assert main(["train", f"{task}/rl.toml", *changes]) == 0
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    names = {each.name for each in find_advice(RunFiles(tmp_path / "run"))}
    assert {"data contradictory", "chat template suspicious"} <= names


@pytest.mark.runs
def test_canonical_runs_have_the_findings_of_their_data(grpo_run):
    names = {each.name for each in find_advice(RunFiles(grpo_run))}
    assert names <= {"idle processes", "groups without variance", "padding", "truncation"}, names
