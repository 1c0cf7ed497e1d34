"""One rank of a process group that trains the same model in several layouts; `test_layouts` starts it.

`layout_program.py RANK WORLD_SIZE PORT CASES_JSON OUT_DIR`. A case is a dictionary, see `Case`; rank 0 writes losses
and norms to `OUT_DIR/<name>.json`, and the weights after the last step to `OUT_DIR/<name>.safetensors`.
"""

import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hybridflow.config import Config, LoRAConfig, MemoryConfig, ModelConfig, OptimizerConfig, ParallelConfig
from hybridflow.engines import TorchEngine, join_process_group
from hybridflow.protocol import DataProto
from hybridflow.workers.losses import actor_loss, critic_loss

STEPS, KL_COEF, TEMPERATURE = 5, 0.05, 0.7
OPTIMIZER = {"lr": 0.01, "weight_decay": 0.1, "epsilon": 1e-6, "clip_grad_norm": 0.5}
ROWS_OF_REPLICAS = {1: (0, 10), 2: (0, 3, 10), 4: (0, 2, 9, 10, 10)}
"""First row of each data-parallel replica: the split is uneven, and the last of four replicas has no rows."""


@dataclass(frozen=True)
class Case:
    """A training run in one layout.

    `bug`: "", "local count" (losses are divided by the counts of each part) or "dropped rank" (the gradient of the
    second rank is missing, or of a row with one process).
    """

    name: str
    model: str
    rows: str
    head: str = "policy"
    tensor: int = 1
    sequence: int = 1
    max_tokens: int = 24
    packing: bool = True
    checkpointing: bool = False
    offload: str | None = None
    lora: int = 0
    bug: str = ""
    dtype: str = "float64"
    max_logits: int = 0


def config_of(aggregation: str = "token-mean") -> Config:
    return Config(
        actor={"loss_aggregation": aggregation, "entropy_coef": 0.01, "epochs": 2},
        critic={"loss_aggregation": aggregation},
        algorithm={"kl_in_loss": True},
        rollout={"temperature": TEMPERATURE},
    )


def loss_of(head: str, counted: DataProto) -> Any:
    """Build the worker's loss with the token and sequence counts of `counted`."""
    mask = counted.batch["response_mask"]
    counts = int(mask.sum()), int(mask.any(1).sum())
    return actor_loss(config_of(), KL_COEF, *counts) if head == "policy" else critic_loss(config_of(), *counts)


class Float64Angles(nn.Module):
    """Rotary angles in float64, for all families."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        theta = config.rope_parameters["rope_theta"]
        self.frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def build(case: Case) -> TorchEngine:
    engine = TorchEngine(
        case.model,
        case.head,
        model=ModelConfig(path=case.model, dtype=case.dtype, gradient_checkpointing=case.checkpointing),
        memory=MemoryConfig(max_tokens_per_micro_batch=case.max_tokens, packing=case.packing),
        optimizer=OptimizerConfig(**OPTIMIZER),
        total_updates=STEPS,
        parallel=ParallelConfig(tensor=case.tensor, sequence=case.sequence),
        offload=case.offload,
        lora=LoRAConfig(rank=case.lora, alpha=2.0 * case.lora + 1),
    )
    if case.max_logits:
        engine.model_forward.max_logits = case.max_logits
    if case.dtype == "float64":
        engine.model.model.rotary_emb = Float64Angles(engine.model.config)
    if case.head == "value":  # a zero head gives the body no gradient
        weight = engine.parameters["score.weight"]
        whole = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype)[None]
        with torch.no_grad():
            if isinstance(weight, DTensor):
                shared = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
                weight.to_local().copy_(shared.to_local())
            else:
                weight.copy_(whole)
    return engine


def rows_of(engine: TorchEngine, rows: DataProto) -> DataProto:
    """Select the rows of this rank's replica."""
    starts, replica = ROWS_OF_REPLICAS[engine.ranks.data], engine.ranks.place("data")
    return rows.slice(starts[replica], starts[replica + 1])


def train(case: Case) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """Train; return losses, gradient norms and sums of the final outputs, and the final weights."""
    engine, rows = build(case), DataProto.load_from_disk(case.rows)
    whole, drops = loss_of(case.head, rows), case.bug == "dropped rank" and engine.ranks.place_in_world == 1

    def loss(outputs, part):
        total, metrics = (loss_of(case.head, part) if case.bug == "local count" else whole)(outputs, part)
        return total * (0.0 if drops else 1.0), metrics

    mine, with_entropy = rows_of(engine, rows), case.head == "policy"
    if case.bug == "dropped rank" and engine.ranks.world_size == 1:
        mine = mine.slice(0, len(mine) - 1)
    numbers: dict[str, list[float]] = {"losses": [], "grad_norms": []}
    for _ in range(STEPS):
        result = engine.update(mine, loss, with_entropy=with_entropy, temperature=TEMPERATURE)
        numbers["losses"] += engine.ranks.sum_floats([result.loss])
        numbers["grad_norms"].append(result.grad_norm)
    outputs = engine.forward(mine, with_entropy=with_entropy, temperature=TEMPERATURE)
    numbers["output_sums"] = engine.ranks.sum_floats(
        [float(outputs[name].sum()) if name in outputs else 0.0 for name in ("log_probs", "entropies", "values")]
    )
    return numbers, {name: weight.detach().clone() for name, weight in engine.weights()}


def main() -> None:
    rank, world_size, port = map(int, sys.argv[1:4])
    out = Path(sys.argv[5])
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="FSDP2-wrapped module .* returned a view tensor")
    join_process_group(rank, world_size, "127.0.0.1", port, timeout_s=120)
    for case in (Case(**entry) for entry in json.loads(Path(sys.argv[4]).read_text())):
        numbers, weights = train(case)
        if rank == 0:
            save_file(weights, out / f"{case.name}.safetensors")
            (out / f"{case.name}.json").write_text(json.dumps(numbers))
    if world_size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
