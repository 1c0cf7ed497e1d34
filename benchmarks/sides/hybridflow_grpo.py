"""hybridflow's GRPO run: a request is one training step of the trainer that `hybridflow train` builds.

The reply has the seconds of the step, of generation and of the update, and the peak memory so far.
"""

import time
from typing import Any

import torch
from support.serve import Channel, peak_resident_bytes

import hybridflow
from hybridflow.config import load_config
from hybridflow.trainers import PPOTrainer, build_trainer
from hybridflow.trainers.build import preconditions


def main() -> None:
    channel = Channel()
    # No response may end early, so the EOS of these models is outside of their vocabulary (support/models.py).
    preconditions.require_known_tokens = lambda *_: None
    config = load_config(channel.options["recipe"], [f"model.dtype={channel.options['dtype']}"])
    trainer = build_trainer(config)
    channel.ready(torch.get_num_threads(), hybridflow=hybridflow.__version__, torch=torch.__version__)
    for _ in channel.requests():
        channel.reply(**measure(trainer), peak_resident_bytes=peak_resident_bytes())


def measure(trainer: PPOTrainer) -> dict[str, Any]:
    """Return the seconds of one step and of its parts. Raises RuntimeError unless each response has the full length."""
    start = time.perf_counter()
    trainer.train_step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    metrics, wanted = trainer.metrics, trainer.config.data.max_response_length
    if not metrics["response_length/min"] == metrics["response_length/max"] == wanted:
        raise RuntimeError(
            f"responses have {metrics['response_length/min']} to {metrics['response_length/max']} tokens instead of "
            f"{wanted}. Times would not be comparable: find out what stops them."
        )
    return {
        "seconds": seconds,
        "generation_s": metrics["timing_s/gen"],
        "training_s": metrics["timing_s/update_actor"],
        "num_tokens": metrics["perf/num_tokens"],
    }


if __name__ == "__main__":
    main()
