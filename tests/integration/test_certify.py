"""`hybridflow certify` on a tiny recipe: all lines are exact, and faults planted in single runs are named by theirs."""

import json

import pytest

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.ray,
    pytest.mark.own_run("grpo: a recipe is run, resumed, replayed, killed and run on Ray"),
]

PLANTED = """
import sys
from hybridflow.algorithms import grpo_advantages

FAULTS = {
    "/resumed_run": 1, "replay": 1, "/run_with_a_killed_driver": 1, "/run_on_Ray": 1, "/run_with_a_killed_worker": 2
}

def advantage(scores, group_ids):
    advantages, returns = grpo_advantages(scores=scores, group_ids=group_ids, norm_by_std=True)
    for end, size in FAULTS.items():
        if any(argument.endswith(end) for argument in sys.argv):
            advantages[3] *= 1 + size * 2**-22
    return advantages, returns
"""
FIRST_STEPS = {
    "resumed - uninterrupted": 2,
    "replayed - first run": 2,
    "killed driver - undisturbed": 2,
    "local - Ray": 1,
    "killed worker - undisturbed": 2,
}
"""The first step with the fault that is planted in a run of each line, of two steps."""


def lines_of(directory):
    return {line["name"]: line for line in json.loads((directory / "certificate.json").read_text())["lines"]}


def test_a_recipe_is_certified_and_its_model_exported_with_the_certificate(task, tmp_path, hybridflow):
    recipe, output = task / "rl.toml", tmp_path / "certified"
    done = hybridflow("certify", recipe, "rollout.exact=true", f"trainer.run_dir={tmp_path}/run", "--output", output)
    assert done.status == 0, done.err
    assert {name: line["result"] for name, line in lines_of(output).items()} == {
        "sampler - trainer": "exact",
        "delivered - sent weights": "exact",
        "resumed - uninterrupted": "exact",
        "replayed - first run": "exact",
        "killed driver - undisturbed": "exact",
        "local - Ray": "exact",
        "killed worker - undisturbed": "exact",
    }
    assert "first run: step 4 of 4" in done.err
    assert "No line that must be exact differs." in (output / "certificate.md").read_text()
    assert {path.name for path in output.iterdir()} == {"certificate.json", "certificate.md"}
    for name, changes, status in (("same", ("rollout.exact=true",), 0), ("other", ("rollout.exact=false",), 2)):
        run = tmp_path / name
        short = ("trainer.total_steps=0", "data.val_files=[]", "--stop-after", "1")
        assert hybridflow("train", recipe, *changes, f"trainer.run_dir={run}", *short).status == 0
        exported = hybridflow("export", run, f"{run}_model", "--certificate", output / "certificate.json")
        assert exported.status == status
        assert (run.parent / f"{name}_model/certificate.md").is_file() == (status == 0)
    assert "rollout.exact was True when it was certified and is False" in exported.err


def test_a_fault_in_a_run_is_named_by_its_line(task, tmp_path, hybridflow):
    (tmp_path / "planted.py").write_text(PLANTED)
    planted, output = f"algorithm.advantage={tmp_path}/planted.py:advantage", tmp_path / "faulty"
    done = hybridflow("certify", task / "rl.toml", planted, "--steps", "2", "--output", output)
    assert done.status == 1, done.err
    lines = lines_of(output)
    assert {n for n, line in lines.items() if (line["must_be_exact"], line["result"]) == (True, "differs")} == {
        *FIRST_STEPS
    }
    for name, step in FIRST_STEPS.items():
        assert lines[name]["details"].startswith(f"step {step}: actor/"), lines[name]
        assert f"{name}: {lines[name]['details']}" in done.out
    assert lines["delivered - sent weights"]["result"] == "exact"
    assert (output / "runs/resumed_run/metrics.jsonl").is_file()  # to be looked at
