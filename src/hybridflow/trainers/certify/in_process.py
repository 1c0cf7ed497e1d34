"""What a certificate computes inside a trainer: `python -m hybridflow.trainers.certify.in_process WHAT RUN RESULT`.

`replay` learns the last step of a run again. `probe` samples rows with the weights of the run's first checkpoint, and
compares their log-probs, and the weights themselves, in the rollout engine and in the trainer.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from hybridflow.checkpoint import CheckpointStore
from hybridflow.config import load_config
from hybridflow.config.run_paths import absolute_paths
from hybridflow.protocol import DataProto
from hybridflow.runtime.observe import read_jsonl
from hybridflow.trainers.balance import balanced
from hybridflow.trainers.build.build import build_trainer
from hybridflow.trainers.certify.equality import Equality, counted, difference_within
from hybridflow.trainers.read_columns import read
from hybridflow.trainers.run.ppo_trainer import PPOTrainer
from hybridflow.trainers.run.replay import replay_step
from hybridflow.trainers.run.run_states import LEARNS_ONLY, comparable
from hybridflow.trainers.sampling.sampled import joined
from hybridflow.trainers.sampling.sampling import Sampling
from hybridflow.trainers.stages import with_row_ids


def replay(run: Path, scratch: Path) -> dict[str, Equality]:
    """Compare the metrics of the last steps of a run with those of the same steps learned again."""
    last = max(row["step"] for row in read_jsonl(run / "metrics.jsonl"))
    replayed = replay_step(run, last, scratch=scratch)
    num_metrics = len(comparable(replayed.learned.metrics))
    compared = f"{counted(last - replayed.first_step, 'step')}, {counted(num_metrics, 'metric')}"
    if not replayed.differs:
        return {"replayed": Equality(compared)}
    step, metrics = min(replayed.differs.items())
    name, pair = next(iter(metrics.items()))
    return {"replayed": Equality(compared, f"step {step}: {difference_within(name, *pair)}")}


def probe(run: Path, scratch: Path) -> dict[str, Equality]:
    """Compare log-probs at the oldest checkpoint of a run, and weights, but not those of vLLM, in its own layout."""
    file, store = run / "config.toml", CheckpointStore(run / "checkpoints")
    config = load_config(
        file, [*absolute_paths(file), *LEARNS_ONLY, "data.val_files=[]", f"trainer.run_dir={scratch / 'probe'}"]
    )
    with build_trainer(config) as trainer:
        trainer.restore(store.open(store.list()[0]))
        trainer.weight_sync()
        trainer.weight_sync.finish()
        rows = _sampled(trainer)
        columns = [rows.batch[name] for name in ("rollout_log_probs", "old_log_probs", "response_mask")]
        trained, generating = trainer.actor.trained_weights()[0], trainer.rollout.generating_weights()
    found = {"sampler": compare_log_probs(*columns)}
    if None not in generating:
        found["delivered"] = compare_weights(trained, generating, in_one_process=not config.has_rollout_pool)
    return found


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


def compare_log_probs(sampled: Tensor, trained: Tensor, response_mask: Tensor) -> Equality:
    """Compare log-probs (rows, response_len) of sampled tokens, bit for bit."""
    mask = response_mask.bool()
    compared = f"{counted(len(mask), 'row')}, {counted(int(mask.sum()), 'token')}"
    places = (mask & (sampled != trained)).nonzero().tolist()
    if not places:
        return Equality(compared)
    row, token = places[0]
    distances = (sampled.double() - trained.double()).abs()[mask]
    one, other = (float(log_probs[row, token]) for log_probs in (sampled, trained))
    return Equality(
        compared,
        f"{counted(len(places), 'token')} differ, by {float(distances.mean()):.2g} nats in the mean and "
        f"{float(distances.max()):.2g} at most; the first is row {row}, token {token}: {one:.9g} when sampled, "
        f"{other:.9g} in training",
    )


Weights = Mapping[str, tuple[int, int]]
"""Fingerprint and address of each weight by name."""


def compare_weights(trained: Weights, generating: Sequence[Weights], *, in_one_process: bool) -> Equality:
    """Compare the weights of the trainer with those of each rank that generates."""
    shared = in_one_process and all(trained == of_rank for of_rank in generating)
    how = "which are the same memory" if shared else f"by fingerprint, on {counted(len(generating), 'rank')}"
    compared = f"{counted(len(trained), 'tensor')}, {how}"
    for rank, weights in enumerate(generating):
        names = sorted({*trained, *weights})
        if wrong := [name for name in names if trained.get(name, ())[:1] != weights.get(name, ())[:1]]:
            return Equality(
                compared, f"rank {rank}: {len(wrong)} of {len(names)} tensors differ, the first is {wrong[0]}"
            )
    return Equality(compared)


def main(what: str, run: Path, result: Path) -> None:
    """Write what a function of this module returns for a run as JSON."""
    with TemporaryDirectory(prefix=f"{what}-", dir=result.parent) as scratch:
        found = {"replay": replay, "probe": probe}[what](run, Path(scratch))
    result.write_text(json.dumps({name: asdict(each) for name, each in found.items()}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
