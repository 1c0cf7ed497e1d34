"""What a certificate computes inside a trainer: `python -m hybridflow.trainers.certify.in_process WHAT RUN RESULT`.

`replay` learns the last step of a run again. `probe` samples rows with the weights of the run's first checkpoint, and
compares their log-probs, and the weights themselves, in the rollout engine and in the trainer.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from hybridflow.checkpoint import CheckpointStore
from hybridflow.config import load_config
from hybridflow.config.run_paths import absolute_paths
from hybridflow.protocol import DataProto
from hybridflow.runtime.observe import read_jsonl
from hybridflow.trainers.balance import balanced
from hybridflow.trainers.build.build import build_trainer
from hybridflow.trainers.read_columns import read
from hybridflow.trainers.run.ppo_trainer import PPOTrainer
from hybridflow.trainers.run.replay import NOT_IN_REPLAYS, replay_step
from hybridflow.trainers.sampling.sampled import joined
from hybridflow.trainers.sampling.sampling import Sampling
from hybridflow.trainers.stages import with_row_ids


def replay(run: Path, scratch: Path) -> dict[str, Any]:
    """Return `compared` and `difference` of the last step of a run and the same step learned again."""
    paths = absolute_paths(run / "config.toml")
    last = max(row["step"] for row in read_jsonl(run / "metrics.jsonl"))
    replayed = replay_step(run, last, scratch=scratch, paths=paths)
    compared = f"steps {replayed.first_step + 1} to {last}, {len(replayed.learned.metrics)} metrics of the last"
    if not replayed.differs:
        return {"compared": compared, "difference": ""}
    step, names = min(replayed.differs.items())
    name, (one, other) = next(iter(names.items()))
    more = f", and {len(names) - 1} more metrics" if names[1:] else ""
    return {"compared": compared, "difference": f"step {step}, {name} is {other!r}, not {one!r}{more}"}


def probe(run: Path, scratch: Path) -> dict[str, Any]:
    """Return `compared` and `difference` of the log-probs and of the weights, at the oldest checkpoint of a run."""
    file, store = run / "config.toml", CheckpointStore(run / "checkpoints")
    config = load_config(file, [*absolute_paths(file), *NOT_IN_REPLAYS, f"trainer.run_dir={scratch / 'probe'}"])
    with build_trainer(config) as trainer:
        trainer.restore(store.open(store.list()[0]))
        trainer.weight_sync()
        trainer.weight_sync.finish()
        rows = _sampled(trainer)
        columns = [rows.batch[name] for name in ("rollout_log_probs", "old_log_probs", "response_mask")]
        trained, generating = trainer.actor.trained_weights()[0], trainer.rollout.generating_weights()
    in_one_process = not config.has_rollout_pool
    return {
        "sampler": compare_log_probs(*columns),
        "delivered": compare_weights(trained, generating, in_one_process=in_one_process),
    }


def _sampled(trainer: PPOTrainer) -> DataProto:
    """Return the next rows with the log-probs of the rollout engine and of the trainer, in the order of generation."""
    config, step = trainer.config, trainer.global_step
    sampling = Sampling(config, trainer.rollout, trainer.rewards)
    parts = sampling.begin(trainer.loader.next_batch(), step).parts
    batch = with_row_ids(joined(parts), first=0)
    seed_keys = (config.trainer.seed, step)
    batch, order, _ = balanced(batch, trainer.actor, trainer.groups.values(), config, seed_keys, trainer.costs_of)
    batch = batch.union(trainer.actor.compute_log_probs.remote(batch)).select_rows(order)
    return read(batch, ("rollout_log_probs", "old_log_probs", "response_mask"))


def compare_log_probs(sampled: Tensor, trained: Tensor, response_mask: Tensor) -> dict[str, Any]:
    """Compare log-probs (rows, response_len) of sampled tokens, bit for bit."""
    mask = response_mask.bool()
    different = mask & (sampled != trained)
    count, total = int(different.sum()), int(mask.sum())
    result = {"compared": f"{len(mask):,} rows, {total:,} tokens", "difference": ""}
    if count:
        row, token = different.nonzero()[0].tolist()
        distances, values = (
            (sampled.double() - trained.double()).abs()[mask],
            (sampled[row, token], trained[row, token]),
        )
        result["difference"] = (
            f"{count:,} tokens differ, by {float(distances.mean()):.2g} nats in the mean and "
            f"{float(distances.max()):.2g} at most; the first is row {row}, token {token}: "
            f"{float(values[0]):.9g} when sampled, {float(values[1]):.9g} in training"
        )
    return result


Weights = dict[str, tuple[int, int]]
"""Fingerprint and address of each weight by name."""


def compare_weights(trained: Weights, generating: list[Weights | None], *, in_one_process: bool) -> dict[str, Any]:
    """Compare the weights of the trainer with those of each rank that generates; None: they cannot be read there."""
    if None in generating:
        return {
            "compared": "",
            "difference": "",
            "reason": "the engine keeps its weights in a layout of its own; each "
            "sync compares the fingerprints of what arrives, and log-probs of fixed tokens",
        }
    shared = in_one_process and all(trained == of_rank for of_rank in generating)
    how = "the same memory" if shared else f"fingerprints on {len(generating)} ranks that generate"
    result = {"compared": f"{len(trained):,} tensors, {how}", "difference": ""}
    for rank, weights in enumerate(generating):
        names = sorted({*trained, *weights})
        if wrong := [name for name in names if trained.get(name, ())[:1] != weights.get(name, ())[:1]]:
            result["difference"] = f"rank {rank}: {len(wrong)} of {len(names)} tensors differ, the first is {wrong[0]}"
            break
    return result


if __name__ == "__main__":
    function = {"replay": replay, "probe": probe}[sys.argv[1]]
    with TemporaryDirectory(prefix="certify-", dir=Path(sys.argv[3]).parent) as directory:
        Path(sys.argv[3]).write_text(json.dumps(function(Path(sys.argv[2]), Path(directory))), encoding="utf-8")
