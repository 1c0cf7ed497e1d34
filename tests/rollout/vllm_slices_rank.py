"""One rank of a trainer whose ranks share vLLM engines, and sync weights as slices.

Usage: `vllm_slices_rank.py RANK WORLD_SIZE STORE MODEL TRAINER_TENSOR ROLLOUT_TENSOR DTYPE OUTPUT [UNSEEDED]`.
Writes to `OUTPUT/<rank>.json`: the boxes that vLLM loads, bytes, names of tensors of vLLM that differ from those after
a sync of whole weights, the errors of planted bugs, and what the engine generates with and without seeds.
"""

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

rank, world_size = map(int, sys.argv[1:3])
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._C._distributed_c10d import FileStore  # noqa: E402

from hybridflow.config import ParallelConfig, load_config  # noqa: E402
from hybridflow.engines import TorchEngine, join_process_group  # noqa: E402
from hybridflow.errors import HybridFlowError  # noqa: E402
from hybridflow.models.loading import load_causal_lm  # noqa: E402
from hybridflow.rollout import Request, SamplingParams, generate, load_weights  # noqa: E402
from hybridflow.rollout.vllm import VLLMRollout, process  # noqa: E402
from hybridflow.rollout.weight_sync.in_process import InProcess, hand_over  # noqa: E402
from hybridflow.rollout.weight_sync.receiver import WeightReceiver  # noqa: E402
from hybridflow.rollout.weight_sync.sender import WeightSender  # noqa: E402
from hybridflow.runtime.boxes import Box  # noqa: E402

SHARED_MEMORY = Path("/dev/shm")
OWN = f"slices-{hashlib.blake2b(sys.argv[3].encode(), digest_size=6).hexdigest()}-"
"""Begins the names that the ranks of this run give to shared memory, after "hybridflow-"; other tests have others."""
numbers = itertools.count()
process.uuid = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{OWN}{next(numbers)}"))  # pyright: ignore
packed: dict[int, Tensor] = {}
"""Copies of the weights of linear layers by id, which on a CPU vLLM packs and drops when a layer is loaded."""


def record_packed_weights() -> None:
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm

    def recorded(layer: Any, **kwargs: Any) -> None:
        packed[id(layer)] = layer.weight.detach().clone()
        dispatch(layer, **kwargs)

    utils.dispatch_cpu_unquantized_gemm = recorded


def tensors_of(engine: VLLMRollout) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers of this rank's model in vLLM, and of what it packed."""
    copies: dict[str, Tensor] = {}

    def copy(model: Any, config: Any) -> None:
        named = [*model.named_parameters(), *model.named_buffers()]
        copies.update({name: tensor.detach().clone() for name, tensor in named if tensor.numel()})
        layers = {name: packed[id(layer)] for name, layer in model.named_modules() if id(layer) in packed}
        copies.update({f"packed {name}": weight for name, weight in layers.items()})

    engine._engine._on_model(copy)
    return copies


def build(model: str, dtype: str, tensor_parallel: int, **options: Any) -> VLLMRollout:
    """Start an engine that ranks share."""
    options |= {"enforce_eager": True, "kv_cache_bytes": 2**26, "max_model_len": 64}
    return VLLMRollout(model, dtype=dtype, tensor_parallel=tensor_parallel, in_group=True, **options)


def generated(engine: VLLMRollout, model: str) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probs of a few requests with whole weights."""
    load_weights(engine, load_causal_lm(model).named_parameters(), 1)
    wanted = [Request(i, [5 + i, 6, 7], SamplingParams(8, temperature=i / 2), 2, (0, i)) for i in range(3)]
    return [(c.token_ids, c.log_probs) for c in generate(engine, wanted)]


def main() -> None:
    model, dtype, output = sys.argv[4], sys.argv[7], Path(sys.argv[8])
    trainer_tensor, rollout_tensor = int(sys.argv[5]), int(sys.argv[6])
    join_process_group(rank, world_size, FileStore(sys.argv[3], world_size), timeout_s=240)
    settings = load_config(
        None,
        [f"model.path={model}", f"model.dtype={dtype}", "rollout.sync_bucket_bytes=20000", "actor.optimizer.lr=0.01"],
    )
    trainer = TorchEngine(
        model,
        "policy",
        model=settings.model,
        memory=settings.memory,
        optimizer=settings.actor.optimizer,
        parallel=ParallelConfig(tensor=trainer_tensor),
    )
    before = set(SHARED_MEMORY.iterdir())
    torch.manual_seed(rank), np.random.seed(rank)  # the ranks of a run may have used their generators differently
    rollout = build(model, dtype, rollout_tensor)
    dist.barrier()
    left = {path.name for path in set(SHARED_MEMORY.iterdir()) - before}
    record_packed_weights()
    boxes = rollout.boxes_to_load()

    def sync(boxes: Mapping[str, Box] | None) -> int:
        sender = WeightSender(trainer, settings, InProcess, boxes)
        receiver = WeightReceiver(rollout, dtype, InProcess())
        num_bytes = hand_over(sender, receiver)
        receiver.check(sender.compute_probe())
        return num_bytes

    result: dict[str, Any] = {"boxes": boxes}
    result["left in shared memory"] = [name for name in left if name.startswith((f"hybridflow-{OWN}", "psm_"))]
    num_bytes, result["whole"] = sync(None), trainer.bytes_received
    expected = tensors_of(rollout)
    packed.clear()
    request = [Request(0, [5, 6, 7], SamplingParams(8, temperature=1.0), 2, (0, 0))]
    tokens = [completion.token_ids for completion in generate(rollout, request)]
    rollout.abandon_loading()
    assert sync(boxes) == num_bytes
    result["sliced"] = trainer.bytes_received
    found = tensors_of(rollout)
    result["names"] = list(found)
    result["different"] = [name for name in expected if not torch.equal(expected[name], found[name])]
    result["same tokens"] = [completion.token_ids for completion in generate(rollout, request)] == tokens
    result["errors"] = {}
    wrong = "model.layers.1.mlp.down_proj.weight"
    of_ranks: list[dict[str, Box]] = [{}] * world_size
    dist.all_gather_object(of_ranks, boxes)
    neighbor = of_ranks[rank // rollout_tensor * rollout_tensor + (rank + 1) % rollout_tensor]
    for bug, planted in {
        "another rank's slice": boxes | {wrong: neighbor[wrong]},
        "the slice of one rank twice": boxes | {wrong: of_ranks[rank // 2 * 2][wrong]},
    }.items():
        try:
            sync(planted)
        except HybridFlowError as error:
            result["errors"][bug] = f"{type(error).__name__}: {error}"
        dist.barrier()
    sync(boxes)
    result["different after errors"] = [n for n, t in tensors_of(rollout).items() if not torch.equal(expected[n], t)]
    result["seeds True"] = generated(rollout, model)
    rollout.close()
    if len(sys.argv) > 9:
        result["seeds False"] = generated(build(model, dtype, rollout_tensor, seed_requests=False), model)
    (output / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a process whose peer is gone may abort in PyTorch's destructors


main()
