import pytest

from hybridflow.algorithms import AGGREGATIONS
from hybridflow.cli.main import main
from hybridflow.config import leaf_keys, load_config
from hybridflow.errors import ConfigError
from hybridflow.migration import convert
from hybridflow.migration.convert import FRAMEWORKS

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

TRL = """
model_name_or_path: models/qwen
learning_rate: 1e-6
num_generations: 4
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
beta: 0.04
epsilon: 0.2
epsilon_high: 0.28
loss_type: dr_grpo
scale_rewards: false
bf16: true
report_to: [wandb, none]
reward_funcs: [accuracy]
logging_steps: 10
"""

OPENRLHF = """
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \\
   --pretrain models/llama --prompt_data data.jsonl --input_key question --label_key gold \\
   --rollout_batch_size 256 --train_batch_size 128 --n_samples_per_prompt 4 \\
   --advantage_estimator group_norm --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 \\
   --eps_clip_low_high 0.2 0.3 --adam_betas 0.9 0.95 --bf16 --gradient_checkpointing \\
   --actor_num_nodes 1 --actor_num_gpus_per_node 8 --colocate_all_models --something_else 3
"""


@pytest.fixture
def converted(tmp_path):
    def converted(text, name="script.sh", framework=""):
        (tmp_path / name).write_text(text)
        found = convert(tmp_path / name, framework)
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
        "data.train_files=$HOME/train.parquet holds a variable of the shell; set data.train_files",
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


def test_yaml_of_trl_becomes_a_recipe(converted):
    found, values = converted(TRL, "config.yaml")
    wanted = {
        "model.path": "models/qwen",
        "model.dtype": "bfloat16",
        "rollout.group_size": 4,
        "data.train_batch_size": 8,
        "actor.clip_ratio_low": 0.2,
        "actor.clip_ratio_high": 0.28,
        "actor.clip_ratio_dual": None,
        "actor.loss_aggregation": "seq-mean-token-sum-norm",
        "algorithm.norm_by_std": False,
        "algorithm.kl_in_loss": True,
        "algorithm.kl_coef": 0.04,
        "algorithm.kl_importance_weight": True,
        "trainer.trackers": ("wandb",),
    }
    assert {key: values[key] for key in wanted} == wanted
    assert [line.partition(":")[0].partition("=")[0] for line in found.left_out] == [
        "per_device_train_batch_size",
        "reward_funcs",
    ]


def test_flags_of_openrlhf_become_a_recipe(converted):
    found, values = converted(OPENRLHF)
    wanted = {
        "model.path": "models/llama",
        "data.train_files": ("data.jsonl",),
        "data.columns": {"prompt": "question", "answer": "gold"},
        "data.train_batch_size": 256,
        "actor.mini_batch_size": 32,
        "rollout.group_size": 4,
        "algorithm.advantage": "grpo",
        "algorithm.kl_in_loss": True,
        "algorithm.kl_in_reward": False,
        "actor.clip_ratio_high": 0.3,
        "actor.optimizer.betas": (0.9, 0.95),
        "model.gradient_checkpointing": True,
        "controller.num_workers": 8,
    }
    assert {key: values[key] for key in wanted} == wanted
    assert found.left_out == ["something_else=3"]


OPENRLHF_0_11 = """
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.model_name_or_path models/llama --data.prompt_dataset data.jsonl --data.input_key question \\
   --data.label_key gold --rollout.batch_size 256 --train.batch_size 128 --rollout.n_samples_per_prompt 4 \\
   --algo.advantage.estimator group_norm --algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3 \\
   --algo.kl.unbiased_gradient --actor.loss_agg_mode seq-mean-token-mean --rollout.max_new_tokens 512 \\
   --actor.eps_clip_low_high 0.2 0.3 --actor.adam.betas 0.9 0.95 --actor.gradient_checkpointing_enable \\
   --actor.num_nodes 1 --actor.num_gpus_per_node 8 --train.colocate_all --ds.param_dtype bf16 \\
   --data.max_len 2048 --some.thing_else 3
"""


def test_flags_of_openrlhf_0_11_become_the_same_recipe(converted):
    before, (found, values) = converted(OPENRLHF)[1], converted(OPENRLHF_0_11)
    changed = {key: value for key, value in values.items() if value != before[key]}
    assert changed == {
        "data.max_response_length": 512,
        "actor.loss_aggregation": "seq-mean-token-mean",
        "algorithm.kl_importance_weight": True,
    }
    limits = "max_len=2048 limits prompt and response together; data.max_prompt_length and data.max_response_length"
    assert found.left_out == ["some.thing_else=3", f"{limits} limit each, here 1024 and 512"]


def test_aggregations_of_verl_keep_their_names_other_values_are_left_out(converted):
    for mode in AGGREGATIONS:
        found, values = converted(f"x actor_rollout_ref.actor.loss_agg_mode={mode} algorithm.adv_estimator=gae")
        assert (values["actor.loss_aggregation"], found.left_out) == (mode, [])
    found, _ = converted("x actor_rollout_ref.rollout.name=sglang algorithm.adv_estimator=gae")
    assert found.left_out == ["actor_rollout_ref.rollout.name=sglang has no equal here (expected one of vllm, hf)"]


TRL_KEYS = [
    ("beta: 0.04", {"algorithm.kl_importance_weight": True}),
    ("beta: 0.04\nuse_bias_correction_kl: false", {"algorithm.kl_importance_weight": False}),
    ("beta: 0.0", {"algorithm.kl_importance_weight": False}),
    ("", {"algorithm.kl_importance_weight": False}),
    ("use_peft: true", {"lora.rank": 16}),
    ("use_peft: true\nlora_r: 8", {"lora.rank": 8}),
    ("lora_r: 8", {"lora.rank": 0}),
    ("loss_type: cispo", {"actor.policy_loss": "cispo", "actor.loss_aggregation": "token-mean"}),
    ("loss_type: sapo", {"actor.policy_loss": "sapo", "actor.loss_aggregation": "token-mean"}),
    ("loss_type: grpo", {"actor.policy_loss": "ppo", "actor.loss_aggregation": "seq-mean-token-mean"}),
    (
        "importance_sampling_level: sequence",
        {"actor.policy_loss": "gspo", "actor.loss_aggregation": "seq-mean-token-mean"},
    ),
]


@pytest.mark.parametrize(("lines", "expected"), TRL_KEYS)
def test_keys_of_trl_with_a_meaning_of_their_own(converted, lines, expected):
    found, values = converted(f"num_generations: 4\nmodel_name_or_path: a\n{lines}\n", "config.yaml")
    assert {key: values[key] for key in expected} == expected
    assert any("lora_r=8 without use_peft" in line for line in found.left_out) == (lines == "lora_r: 8")


def test_a_loss_of_trl_without_an_equal_is_said_in_capitals(converted):
    found, _ = converted("num_generations: 4\nmodel_name_or_path: a\nloss_type: vespo\n", "config.yaml")
    assert any("THE RECIPE TRAINS WITH ANOTHER LOSS" in line for line in found.left_out)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_move_is_to_keys_that_exist(name):
    moved = {key for move in FRAMEWORKS[name].moves.values() for key in move.keys}
    assert moved <= leaf_keys().keys()
    assert not set(FRAMEWORKS[name].moves) & set(FRAMEWORKS[name].ignored)
    assert set(FRAMEWORKS[name].names.values()) <= {*FRAMEWORKS[name].moves, *FRAMEWORKS[name].ignored}


OTHER_TRAINER = r"has no key of GRPO, such as .* it belongs to another trainer of TRL"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.sh", "echo nothing", "has no key=value and no --flag"),
        ("a.sh", "x 'open", "is not a shell script"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.yaml", "a: {b: 1}", "has no key by which verl, TRL or OpenRLHF is known"),
        ("a.yaml", "num_generations: many\nmodel_name_or_path: a", "has another type than TRL documents"),
        ("a.yaml", "model_name_or_path: a\nbeta: 0.1\nloss_type: sigmoid\nmax_length: 512", OTHER_TRAINER),
        ("a.yaml", "model_name_or_path: a\npacking: true", OTHER_TRAINER),
        ("a.yaml", "model_name_or_path: a\nmax_steps: 3", OTHER_TRAINER),
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
    assert main(["convert-config", str(tmp_path / "run.sh"), "--from", "verl"]) == 2
    assert "the recipe needs changes before it runs" in capsys.readouterr().err
