"""Train by reinforcement learning: GRPO, PPO with a critic, or another algorithm of the recipe.

The run directory (trainer.run_dir) holds config.toml, metrics.jsonl, samples.jsonl and checkpoints/. The same command
resumes from the newest checkpoint there. Ctrl-C or SIGTERM finishes the step, saves and exits with status 0; a second
one exits at once, with status 130. `hybridflow export` writes the result as a model directory.
"""

from functools import partial

from hybridflow.cli.training import add_arguments as add_arguments
from hybridflow.cli.training import how_to_go_on as how_to_go_on
from hybridflow.cli.training import run_trainer

KEYS = (
    *("model.path", "data.train_files", "data.val_files", "data.train_batch_size", "data.max_response_length"),
    *("reward.function", "rollout.group_size", "rollout.backend", "algorithm.advantage", "actor.optimizer.lr"),
    *("actor.mini_batch_size", "memory.max_tokens_per_micro_batch", "controller.backend", "controller.num_workers"),
    *("trainer.total_steps", "trainer.val_every", "trainer.save_every", "trainer.trackers", "trainer.run_dir"),
)

run = partial(run_trainer, build="build_trainer")
