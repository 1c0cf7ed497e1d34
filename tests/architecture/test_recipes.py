"""Every recipe is a valid configuration that trains, and every algorithm has a recipe."""

import math
import random
import shutil
import tomllib
from pathlib import Path

import pytest
from transformers import Qwen2ForSequenceClassification

from fixtures.tiny_episodes import episode_settings
from hybridflow.algorithms import ADVANTAGES, POLICY_LOSSES
from hybridflow.config import leaf_keys, load_config
from hybridflow.config.render import toml_value
from hybridflow.runtime.observe import read_jsonl
from hybridflow.trainers import build_dpo_trainer, build_reward_model_trainer, build_sft_trainer, build_trainer

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "recipes"
DEMO, ONE_GPU = DIRECTORY / "countdown_grpo.toml", DIRECTORY / "gpu/one_gpu.toml"
OVERLAYS = sorted((DIRECTORY / "algorithms").glob("*.toml"))
RECIPES = {str(path.relative_to(DIRECTORY)): [path] for path in sorted(DIRECTORY.rglob("*.toml"))}
RECIPES |= {f"algorithms/{path.name}": [DEMO, path] for path in OVERLAYS}
RECIPES["gpu/eight_gpus.toml"] = [ONE_GPU, DIRECTORY / "gpu/eight_gpus.toml"]
OFFLINE = {"dpo.toml": "dpo", "reward_model.toml": "reward-model"}
BUILD = {
    "train": build_trainer,
    "sft": build_sft_trainer,
    "dpo": build_dpo_trainer,
    "reward-model": build_reward_model_trainer,
}


def kind_of(name: str) -> str:
    return OFFLINE.get(Path(name).name, "sft" if name.endswith("sft.toml") else "train")


@pytest.fixture(scope="session")
def scorer(task, tmp_path_factory):
    directory = tmp_path_factory.mktemp("scorer")
    shutil.copytree(task / "model", directory, dirs_exist_ok=True)
    Qwen2ForSequenceClassification.from_pretrained(directory, num_labels=1).save_pretrained(directory)
    return directory


def small(name: str, task: Path, episode_task: Path, scorer: Path) -> list[str]:
    """Return the changes that make one step of a recipe small: a tiny model, its data, one process."""
    kind, config = kind_of(name), load_config(RECIPES[name])
    file = {"train": "train", "sft": "sft"}.get(kind, "pairs")
    changes = [f"model.path={task}/model", f"data.train_files=['{task}/{file}.parquet']", "model.dtype=float32"]
    changes += ["data.max_prompt_length=16", f"data.max_response_length={12 if kind == 'train' else 112}"]
    if config.environment.classes:
        changes = episode_settings(episode_task)
        changes += [f"environment.classes={{talk='{episode_task}/environments.py:Talk'}}", "model.dtype=float32"]
        changes += ["reward.function="]  # Talk has a reward
    changes += ["data.train_batch_size=2", f"rollout.group_size={min(config.rollout.group_size, 8)}"]
    changes += ["data.val_files=[]", "offline.batch_size=4", "memory.max_tokens_per_micro_batch=2048"]
    changes += [
        "controller.backend=local",
        "controller.num_workers=1",
        "controller.threads=1",
        "rollout.backend=embedded",
    ]
    changes += ["reward.processes=0", "reward.overlong_buffer=0", "trainer.total_steps=1", "trainer.val_every=0"]
    changes += ["critic.warmup_steps=0"]
    changes += [f"actor.mini_batch_size={min(config.actor.mini_batch_size, 2)}"]
    changes += [f"critic.mini_batch_size={min(config.critic.mini_batch_size, 2)}"]
    changes += [f"teacher.model_path={task}/teacher"] * bool(config.teacher.model_path)
    changes += [f"teacher.top_k={min(config.teacher.top_k, 8)}"]
    changes += [f"reward.model_path={scorer}"] * bool(config.reward.model_path)
    return changes


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_a_step_of_a_tiny_model(
    name, task, episode_task, scorer, tmp_path, monkeypatch, restores_the_process
):
    monkeypatch.chdir(ROOT)
    settings = [*small(name, task, episode_task, scorer), f"trainer.run_dir={tmp_path}/run"]
    with BUILD[kind_of(name)](load_config(RECIPES[name], settings)) as trainer:
        trainer.fit()
    row = read_jsonl(tmp_path / "run/metrics.jsonl")[-1]
    loss = {"train": "actor", "reward-model": "reward_model"}.get(kind_of(name), kind_of(name))
    assert all(math.isfinite(row[f"{loss}/{figure}"]) for figure in ("loss", "grad_norm"))


DRAWN_BY_COMMAND = 4


@pytest.mark.runs
@pytest.mark.own_run("grpo: runs the recipes that the seed of --sample draws")
def test_drawn_recipes_train_by_their_command(pytestconfig, task, episode_task, scorer, tmp_path, fork_server):
    seed, names = pytestconfig.option.sample, sorted(RECIPES)
    drawn = names if seed == "all" else random.Random(seed).sample(names, DRAWN_BY_COMMAND)
    for i, name in enumerate(drawn):
        settings = [*small(name, task, episode_task, scorer), f"trainer.run_dir={tmp_path}/{i}"]
        done = fork_server.run(["-m", "hybridflow", kind_of(name), *map(str, RECIPES[name]), *settings])
        assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
        assert (tmp_path / str(i) / "checkpoints/step_000001").is_dir(), name


def test_every_estimator_and_policy_loss_has_a_recipe_of_its_own():
    configs = [load_config([DEMO, overlay]) for overlay in OVERLAYS]
    assert {config.algorithm.advantage for config in configs} == set(ADVANTAGES)
    assert {config.actor.policy_loss for config in configs} == set(POLICY_LOSSES)
    keys = [leaf_keys(config) for config in configs]
    assert [a.name for a, of_a in zip(OVERLAYS, keys, strict=True) if keys.count(of_a) > 1] == []
    eight = load_config(RECIPES["gpu/eight_gpus.toml"])
    assert (eight.controller.backend, eight.controller.num_workers) == ("ray", 8)


def table() -> str:
    """Return a Markdown table of algorithm recipes: name, paper (from the leading comment) and keys."""
    lines = ["| recipe | paper | keys |", "|---|---|---|"]
    for overlay in OVERLAYS:
        text = overlay.read_text("utf-8")
        comment = " ".join(line.removeprefix("# ") for line in text.split("\n\n")[0].splitlines())
        keys = [
            f"`{section}.{key} = {toml_value(value)}`"
            for section, values in tomllib.loads(text).items()
            for key, value in values.items()
        ]
        lines.append(f"| `{overlay.name}` | {comment} | {', '.join(keys)} |")
    return "\n".join(lines)


def test_recipe_table_in_the_docs_equals_the_generated_one():
    text = (ROOT / "docs" / "recipes.md").read_text("utf-8")
    shown = text.partition("<!-- generated: start -->\n\n")[2].partition("\n\n<!-- generated: end -->")[0]
    assert shown == table(), f"docs/recipes.md is outdated; replace its table with:\n{table()}"
