"""Train a reward model on preferences: files with `prompt`, `chosen` and `rejected`.

The run directory (trainer.run_dir) holds config.toml, metrics.jsonl and checkpoints/. The same command resumes from the
newest checkpoint there. Ctrl-C or SIGTERM finishes the step, saves and exits with status 0; a second one exits at once,
with status 130. `hybridflow export` writes the result as a directory for reward.model_path.
"""

from functools import partial

from hybridflow.cli.training import add_arguments as add_arguments
from hybridflow.cli.training import how_to_go_on as how_to_go_on
from hybridflow.cli.training import run_trainer

KEYS = (
    *("model.path", "data.train_files", "data.val_files", "offline.batch_size", "offline.optimizer.lr"),
    *("memory.max_tokens_per_micro_batch", "controller.num_workers", "trainer.epochs", "trainer.val_every"),
    *("trainer.save_every", "trainer.run_dir"),
)

run = partial(run_trainer, build="build_reward_model_trainer")
