import re
from pathlib import Path

import pytest

from hybridflow.algorithms import AGGREGATIONS
from hybridflow.cli.main import main
from hybridflow.cli.migration import convert
from hybridflow.cli.migration.verl import IGNORED, MOVES, SETTLED
from hybridflow.config import leaf_keys, load_config
from hybridflow.errors import ConfigError

VERL = """
set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo  `# a comment` \\
    data.train_files=$HOME/train.parquet \\
    data.val_files=["a.parquet","b.parquet"] \\
    data.filter_overlong_prompts=True data.truncation='error' \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.clip_ratio=0.3 \\
    actor_rollout_ref.actor.clip_ratio_high=0.4 actor_rollout_ref.rollout.top_k=-1 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \\
    custom_reward_function.path=mine.py custom_reward_function.name=score \\
    trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=8 trainer.nnodes=2 \\
    trainer.save_freq=-1 trainer.test_freq=5 +actor_rollout_ref.actor.strange=3 $@
"""


@pytest.fixture
def converted(tmp_path):
    def converted(text, name="script.sh", *, is_loaded=True):
        (tmp_path / name).write_text(text)
        found = convert(tmp_path / name)
        if not is_loaded:
            return found
        (tmp_path / "recipe.toml").write_text(found.recipe())
        return found, leaf_keys(load_config(tmp_path / "recipe.toml"))

    return converted


def test_a_script_of_verl_becomes_a_recipe(converted):
    found, values = converted(VERL)
    wanted = {
        "algorithm.advantage": "grpo",
        "data.val_files": ("a.parquet", "b.parquet"),
        "data.overlong_prompts": "drop",
        "actor.optimizer.lr": 1e-6,
        "actor.clip_ratio_low": 0.3,
        "actor.clip_ratio_high": 0.4,
        "rollout.top_k": 0,
        "algorithm.kl_in_loss": True,
        "algorithm.kl_coef": 0.001,
        "algorithm.kl_estimator": "k3",
        "rollout.backend": "vllm",
        "rollout.group_size": 5,
        "reward.function": "mine.py:score",
        "trainer.trackers": ("wandb",),
        "controller.backend": "ray",
        "controller.num_workers": 16,
        "trainer.save_every": 0,
        "trainer.val_every": 5,
    }
    assert {key: values[key] for key in wanted} == wanted
    defaults = {"data.train_batch_size": 1024, "actor.mini_batch_size": 256, "trainer.epochs": 30}
    assert {key: values[key] for key in defaults} == defaults
    assert found.left_out == [
        "data.train_files=$HOME/train.parquet holds a variable; set data.train_files",
        "actor_rollout_ref.actor.strange=3",
    ]


def test_yaml_of_verl_is_the_same_as_its_arguments(converted):
    text = "algorithm: {adv_estimator: rloo}\nactor_rollout_ref:\n  rollout: {n: 4, name: hf}\n"
    text += "  actor: {optim: {lr: 1e-6}}\n"
    _, values = converted(text, "config.yaml")
    _, same = converted(
        "x actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=hf algorithm.adv_estimator=rloo "
        "actor_rollout_ref.actor.optim.lr=1e-6"
    )
    assert values == same
    assert (values["rollout.group_size"], values["actor.optimizer.lr"]) == (4, 1e-6)


def test_aggregations_of_verl_keep_their_names_other_values_are_left_out(converted):
    for mode in AGGREGATIONS:
        found, values = converted(f"x actor_rollout_ref.actor.loss_agg_mode={mode} algorithm.adv_estimator=gae")
        assert (values["actor.loss_aggregation"], found.left_out) == (mode, [])
    found, _ = converted("x actor_rollout_ref.rollout.name=sglang algorithm.adv_estimator=gae")
    assert found.left_out == ["actor_rollout_ref.rollout.name=sglang has no equal here (expected one of vllm, hf)"]
    found, _ = converted("x actor_rollout_ref.rollout.name=[hf] algorithm.adv_estimator=gae")
    assert found.left_out == ["actor_rollout_ref.rollout.name=['hf'] has no equal here (expected one of vllm, hf)"]


@pytest.mark.parametrize("unknown", ["${a}", "$(nproc)", "`date`", "???", "[a,$B]", "'{{ a }}'", "'<a>'"])
def test_a_value_that_cannot_be_read_is_listed_with_its_key_and_sets_nothing(unknown, converted):
    known = {key: "1" for key in [*SETTLED, *MOVES] if not key.endswith(("kl_penalty", "logger", "prompt_key"))}
    known |= {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.use_kl_loss": "True"}
    known |= {"actor_rollout_ref.rollout.name": "vllm", "reward_model.overlong_buffer.enable": "True"}
    for key, ours in {**SETTLED, **{key: move.keys for key, move in MOVES.items()}}.items():
        words = " ".join(f"{each}={unknown if each == key else value}" for each, value in {**known, key: ""}.items())
        found = converted(f"x {words} actor_rollout_ref.x=1", is_loaded=False)
        assert [line for line in found.left_out if line.startswith(f"{key}=") and f"; set {' and '.join(ours)}" in line]
        assert not [
            value for value in found.values.values() if any(sign in str(value) for sign in ("$", "`", "{{", "<"))
        ]
    assert (
        "algorithm.kl_coef"
        not in converted(
            f"x actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef={unknown}",
            is_loaded=False,
        ).values
    )


def test_words_of_a_command_that_cannot_be_read_are_listed(converted):
    found = converted(
        "ARGS=(data.train_batch_size=8 actor_rollout_ref.rollout.n=4)\n"
        "ARGS+=(data.max_prompt_length=7)\n"
        'x "${ARGS[@]}" actor_rollout_ref.$ROLE.lr=1 $MORE $(cat args) ~data.shuffle data={seed:1} trainer=$T "$@"',
        is_loaded=False,
    )
    words = ["data={'seed:1':", "${ARGS[@]}", "actor_rollout_ref.$ROLE.lr=1", "$MORE", "$(cat", "~data.shuffle"]
    assert sorted(line.split()[0] for line in found.left_out) == sorted(words)
    sizes = ("rollout.group_size", "data.train_batch_size", "data.max_prompt_length")
    assert [found.values[key] for key in sizes] == [4, 8, 7]


def test_a_key_that_another_unread_one_decides_is_not_set(converted):
    def values_of(words, name="a.sh"):
        return converted(words, name, is_loaded=False).values

    actor = "actor_rollout_ref.actor"
    clip = values_of(f"x {actor}.clip_ratio_low=0.1 {actor}.clip_ratio=0.2 {actor}.clip_ratio_high=$H")
    assert clip["actor.clip_ratio_low"] == 0.1
    assert "actor.clip_ratio_high" not in clip
    kl = f"x {actor}.use_kl_loss=$K algorithm.use_kl_in_reward=True algorithm.kl_penalty=mse"
    assert not {"algorithm.kl_coef", "algorithm.kl_estimator"} & values_of(kl).keys()
    whole = values_of("trainer: ${t}\nactor_rollout_ref: {rollout: {n: 2}, actor: '???'}", "a.yaml")
    assert not {"trainer.epochs", "actor.mini_batch_size"} & whole.keys()


def test_every_move_is_to_keys_that_exist():
    moved = {key for move in MOVES.values() for key in move.keys} | {key for keys in SETTLED.values() for key in keys}
    assert moved <= leaf_keys().keys()
    assert len({*MOVES, *IGNORED, *SETTLED}) == len(MOVES) + len(IGNORED) + len(SETTLED)


def test_the_tables_of_trl_and_openrlhf_name_keys_that_exist():
    page = (Path(__file__).parents[3] / "docs" / "coming_from.md").read_text("utf-8")
    rows = [line.split(" | ") for line in page.partition("## Keys of TRL")[2].splitlines() if line.startswith("| `")]
    named = {key for row in rows for key in re.findall(r"`([^`]+)`", row[1])}
    assert len(rows) == 96
    assert named <= leaf_keys().keys()


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.sh", "echo nothing", "has no key=value;"),
        ("a.sh", "x 'open", "is not a shell script"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.yaml", "a: {b: 1}", "has no key of verl's PPO trainer"),
        (
            "a.yaml",
            "num_generations: 4\nmodel_name_or_path: a",
            r"docs/coming_from.md has the keys of TRL and OpenRLHF",
        ),
        (
            "a.yaml",
            "actor_rollout_ref.actor.x: 1\ntrainer.n_gpus_per_node: a\ntrainer.nnodes: b",
            "another type than verl",
        ),
        ("missing.sh", None, "missing.sh"),
        ("binary.sh", b"\xff\xfe", "binary.sh"),
        ("large.sh", b"a" * (2**20 + 1), "large.sh"),
    ],
)
def test_a_file_that_is_no_configuration_is_an_error(tmp_path, name, text, problem):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=problem):
        convert(tmp_path / name)


def test_the_command_writes_the_recipe_and_names_what_must_change(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(VERL)
    assert main(["convert-config", str(tmp_path / "run.sh"), "--output", str(tmp_path / "recipe.toml")]) == 0
    assert "2 that were not carried over are listed in it" in capsys.readouterr().out
    text = (tmp_path / "recipe.toml").read_text()
    assert text.startswith("# From a configuration of verl. Not carried over:\n#   data.")
    (tmp_path / "run.sh").write_text(VERL.replace("rollout.n=5", "rollout.n=0"))
    assert main(["convert-config", str(tmp_path / "run.sh")]) == 2
    assert "the recipe needs changes before it runs" in capsys.readouterr().err
