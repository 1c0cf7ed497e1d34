"""The gap between trainer and sampler of a mixture of experts, with routes of the sampler and without; and its cost.

A random Qwen3-MoE samples responses with the embedded engine, one token at a time. The training engine computes their
log-probs with the same weights in packed rows. In bfloat16 the two passes round differently, so that routers choose
other experts for some tokens.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from support.arguments import parser_of, positive
from support.program import run
from support.report import Row, print_rows, print_table
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hybridflow.config import MemoryConfig, ModelConfig
from hybridflow.engines import TorchEngine
from hybridflow.protocol import DataProto
from hybridflow.rollout import Completion, EmbeddedRollout, Request, SamplingParams, generate
from hybridflow.runtime.threads import count_physical_cores, set_num_threads
from hybridflow.workers.episode_batch import routes_column
from hybridflow.workers.generating import rollout_batch

PROMPT, GROUP = 32, 4
DTYPES: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32")


@dataclass(frozen=True)
class Size:
    """Sizes of the model."""

    layers: int
    width: int
    experts: int
    top_k: int


SIZES = {"small": Size(6, 128, 32, 4), "smoke": Size(2, 32, 4, 2)}


def main() -> None:
    parser = parser_of(__doc__, 1, smoke={"size": "smoke", "repeats": 1, "prompts": 2, "tokens": 8})
    parser.add_argument("--size", choices=SIZES, default="small", help="the model (default: small)")
    parser.add_argument("--prompts", type=positive, default=8, metavar="N", help=f"groups of {GROUP} (default: 8)")
    parser.add_argument("--tokens", type=positive, default=64, metavar="N", help="new tokens of each (default: 64)")
    args = parser.parse_args()
    set_num_threads(args.threads or count_physical_cores())
    rows, lines = [], []
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), SIZES[args.size])
        for dtype in DTYPES:
            found = measure(directory, dtype, args)
            for name in ("replayed", "own"):
                gap = found[name]
                lines.append(
                    (dtype, name, *(f"{gap[each]:.2g}" for each in ("mean", "max", "above")), f"{gap['s']:.2f}")
                )
                rows += [Row(f"{dtype} mismatch, {name} routes", "nats", gap["mean"])]
            rows += [Row(f"{dtype} routes changed", "share", found["changed"])]
            rows += [Row(f"{dtype} generation with routes", "CPU s", found["with"], found["without"])]
            seconds = f"{found['with']:.2f} s and {found['without']:.2f} s of a CPU"
            print(f"{dtype}: {found['changed']:.2%} of routes differ; generation with routes and without: {seconds}")
    print_table("log-prob mismatch", ("dtype", "routes", "mean", "max", "share above 0.1", "forward, CPU s"), lines)
    print_rows("route_replay", rows, smoke=args.smoke)


def write_model(directory: Path, size: Size) -> None:
    """Write a random model in which tokens differ in their experts."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=1000,
            hidden_size=size.width,
            intermediate_size=size.width,
            moe_intermediate_size=size.width // 2,
            num_hidden_layers=size.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=size.width // 4,
            num_experts=size.experts,
            num_experts_per_tok=size.top_k,
            norm_topk_prob=True,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(3)
    model.save_pretrained(directory)


def measure(directory: str, dtype: Literal["bfloat16", "float32"], args: Any) -> dict[str, Any]:
    """Return the gap with replayed and with own routes, the share of routes that differ, and seconds."""
    model, memory = ModelConfig(path=directory, dtype=dtype, compile=False), MemoryConfig()
    engine = TorchEngine(directory, "policy", model=model, memory=memory)
    prompts = torch.randint(0, 1000, (args.prompts, PROMPT))
    completions: list[Completion] = []
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for records in (False, True) * (1 + args.repeats):
        rollout = EmbeddedRollout(engine.rollout_model(), records_routes=records, pack_weights=False)
        sampling = SamplingParams(args.tokens)
        start = time.process_time()
        done = generate(rollout, [Request(i, p.tolist(), sampling, GROUP, (i,)) for i, p in enumerate(prompts)])
        seconds[records].append(time.process_time() - start)
        completions = done if records else completions
    of_rows, shape = prompts.repeat_interleave(GROUP, 0), (SIZES[args.size].layers, SIZES[args.size].top_k)
    mask = torch.ones_like(of_rows, dtype=torch.bool)
    columns = rollout_batch(of_rows, mask, completions, 0)
    own = DataProto.from_dict(columns)
    routes = routes_column([done.routes for done in completions], mask, args.tokens, shape)
    replayed = DataProto.from_dict({**columns, "routes": routes})
    found: dict[str, Any] = {}
    for name, batch in (("replayed", replayed), ("own", own)):
        times = []
        for _ in range(1 + args.repeats):
            start = time.process_time()
            outputs = engine.forward(batch)
            times.append(time.process_time() - start)
        gap = (outputs["log_probs"] - columns["rollout_log_probs"]).abs()
        above = float((gap > 0.1).float().mean())
        found[name] = {"mean": float(gap.mean()), "max": float(gap.max()), "above": above, "s": median(times[1:])}
        if name == "replayed":
            found["changed"] = float(outputs["routes_changed"].mean())
    return {**found, "with": median(seconds[True][1:]), "without": median(seconds[False][1:])}


if __name__ == "__main__":
    run(main)
