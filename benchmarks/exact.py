"""What exact log-probs cost: generation, old log-probs and update of a step, with `rollout.exact` and without.

A random Qwen2 samples groups of responses with the embedded engine, and learns them in packed rows. The two settings
take turns. With exact log-probs a step needs no pass for old log-probs: those of the sampler are the same.
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
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine
from hybridflow.protocol import DataProto
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate
from hybridflow.runtime.threads import count_physical_cores, set_num_threads
from hybridflow.workers.generating import rollout_batch

GROUP = 8
DTYPES: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32")
STAGES = ("generation", "old log-probs", "update")


@dataclass(frozen=True)
class Size:
    """Sizes of the model."""

    layers: int
    width: int
    vocabulary: int


SIZES = {"small": Size(4, 128, 2000), "medium": Size(8, 512, 16000), "smoke": Size(2, 32, 100)}


def main() -> None:
    parser = parser_of(__doc__, 5, smoke={"size": "smoke", "repeats": 1, "prompts": 2, "tokens": 8})
    parser.add_argument("--size", choices=SIZES, default="medium", help="the model (default: medium)")
    parser.add_argument("--prompts", type=positive, default=8, metavar="N", help=f"groups of {GROUP} (default: 8)")
    parser.add_argument("--prompt-tokens", type=positive, default=64, metavar="N", help="of each (default: 64)")
    parser.add_argument("--tokens", type=positive, default=96, metavar="N", help="of each response (default: 96)")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the CPU, for a busy machine; one thread")
    args = parser.parse_args()
    set_num_threads(1 if args.cpu_time else args.threads or count_physical_cores())
    rows, lines = [], []
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), SIZES[args.size])
        for dtype in DTYPES:
            sides = {exact: Side(directory, dtype, exact, args) for exact in (False, True)}
            for repeat in range(1 + args.repeats):
                for side in sides.values():
                    side.step(repeat)
            plain, exact = (side.seconds() for side in sides.values())
            exact_step, plain_step = exact["generation"] + exact["update"], sum(plain.values())
            for name in STAGES:
                lines.append(
                    (dtype, name, f"{exact[name]:.3f}", f"{plain[name]:.3f}", f"{exact[name] / plain[name]:.2f}")
                )
                rows.append(Row(f"{dtype} {name}", "s", exact[name], plain[name]))
            lines.append((dtype, "step", f"{exact_step:.3f}", f"{plain_step:.3f}", f"{exact_step / plain_step:.2f}"))
            rows.append(Row(f"{dtype} step", "s", exact_step, plain_step))
            rows.append(Row(f"{dtype} largest mismatch", "nats", sides[True].mismatch, sides[False].mismatch))
            print(f"{dtype}: largest mismatch {sides[True].mismatch:g} exact, {sides[False].mismatch:.2g} otherwise")
    print_table("seconds", ("dtype", "stage", "exact", "otherwise", "ratio"), lines)
    print_rows("exact", rows, smoke=args.smoke)


def write_model(directory: Path, size: Size) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=max(2, size.width // 64),
        num_key_value_heads=max(1, size.width // 128),
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


class Side:
    """The engines of one setting, and the seconds of their stages, by step."""

    def __init__(self, directory: str, dtype: Literal["bfloat16", "float32"], exact: bool, args: Any) -> None:
        model = ModelConfig(path=directory, dtype=dtype, compile=False)
        learns = OptimizerConfig(lr=1e-5)
        self.engine = TorchEngine(
            directory, "policy", model=model, memory=MemoryConfig(), optimizer=learns, exact=exact
        )
        self.rollout = EmbeddedRollout(self.engine.rollout_model(), exact=exact)
        self.prompts = torch.randint(
            0, 100, (args.prompts, args.prompt_tokens), generator=torch.Generator().manual_seed(0)
        )
        self.tokens, self.mismatch = args.tokens, 0.0
        self.now = time.process_time if args.cpu_time else time.perf_counter
        self.times: list[dict[str, float]] = []

    def step(self, number: int) -> None:
        clock = [self.now()]
        sampling = SamplingParams(self.tokens)
        done = generate(
            self.rollout, [Request(i, p.tolist(), sampling, GROUP, (number, i)) for i, p in enumerate(self.prompts)]
        )
        clock.append(self.now())
        of_rows = self.prompts.repeat_interleave(GROUP, 0)
        columns = rollout_batch(of_rows, torch.ones_like(of_rows, dtype=torch.bool), done, 0)
        rows = DataProto.from_dict(columns)
        old = self.engine.forward(rows, with_entropy=True)["log_probs"]
        clock.append(self.now())
        self.engine.update(rows, lambda outputs, _: (-outputs["log_probs"].mean(), {}), with_entropy=True)
        clock.append(self.now())
        self.rollout.version = number + 1
        self.mismatch = max(self.mismatch, float((old - columns["rollout_log_probs"]).abs().max()))
        self.times.append({name: end - start for name, start, end in zip(STAGES, clock, clock[1:], strict=False)})

    def seconds(self) -> dict[str, float]:
        """Return the medians of the steps after the first."""
        return {name: median(times[name] for times in self.times[1:]) for name in STAGES}


if __name__ == "__main__":
    run(main)
