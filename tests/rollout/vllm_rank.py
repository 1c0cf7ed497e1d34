"""One rank of two that share a vLLM engine: `vllm_rank.py RANK WORLD_SIZE STORE MODEL TENSOR OUTPUT SEED_REQUESTS`."""

import json
import os
import sys
from pathlib import Path

rank, world_size = map(int, sys.argv[1:3])
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import FileStore  # noqa: E402

from hybridflow.engines import join_process_group  # noqa: E402
from hybridflow.models import load_causal_lm  # noqa: E402
from hybridflow.rollout import Request, SamplingParams, generate, load_weights  # noqa: E402
from hybridflow.rollout.vllm import VLLMRollout  # noqa: E402

SHARED_MEMORY = Path("/dev/shm")


def main() -> None:
    model, tensor, output = sys.argv[4], int(sys.argv[5]), Path(sys.argv[6])
    join_process_group(rank, world_size, FileStore(sys.argv[3], world_size), timeout_s=120)
    before = set(SHARED_MEMORY.iterdir())
    torch.manual_seed(rank), np.random.seed(rank)  # the ranks of a run may have used their generators differently
    engine = VLLMRollout(
        model,
        enforce_eager=True,
        kv_cache_bytes=2**26,
        tensor_parallel=tensor,
        in_group=True,
        max_model_len=64,
        seed_requests=bool(int(sys.argv[7])),
    )
    dist.barrier()
    left = [path.name for path in set(SHARED_MEMORY.iterdir()) - before if path.name.startswith(("hybridflow", "psm_"))]
    weights = dict(load_causal_lm(model).named_parameters())
    result = {"left in shared memory": left, "completions": []}
    for version in range(2):
        load_weights(engine, weights.items(), version)
        wanted = [Request(i, [5 + i, 6, 7], SamplingParams(8, temperature=version), 2, (0, i)) for i in range(3)]
        result["completions"] += [[c.token_ids, c.log_probs] for c in generate(engine, wanted)]
    (output / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a process whose peer is gone may abort in PyTorch's destructors


main()
