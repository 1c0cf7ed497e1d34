"""Episodes of several turns with slow tools against the same number of tokens in one turn.

    make bench-episodes
    .venv/bin/python benchmarks/episodes.py --episodes 512 --turns 4 --tokens 64

Each turn has `--tokens` tokens, after which an environment in another process answers within `--tool-ms`. The single
turn has as many tokens as all turns together, and no answers. The model has random weights; tokens per second count
those that it makes. `reused` is the share of the tokens in prompts whose keys and values an earlier turn has left, so
that they are not computed again; `recomputed` runs the same episodes without it.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from support.arguments import parser_of, positive
from support.environments import ROOT
from support.errors import BenchmarkError
from support.program import run
from support.report import Row, print_rows, print_table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hybridflow.environments import (
    CallLimits,
    ChatRenderer,
    EnvironmentPool,
    EpisodeClient,
    EpisodeLimits,
    EpisodeStart,
    Player,
    play_episodes,
)
from hybridflow.models.kernels.library import use_kernels
from hybridflow.rollout import Completion, EmbeddedRollout, Request, SamplingParams, generate
from hybridflow.runtime.threads import count_physical_cores, set_num_threads

SMOKE = {"episodes": 4, "turns": 2, "tokens": 4, "repeats": 1, "tool_ms": 1, "width": 32}
PROMPT = "what is the way to the sea and how long does it take on foot "
ANSWER_TOKENS = 16
"""At least as many as between two turns."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    parser = parser_of(__doc__, 3, smoke=SMOKE)
    parser.add_argument("--episodes", type=positive, default=512, metavar="N", help="episodes at once (default: 512)")
    parser.add_argument("--turns", type=positive, default=4, metavar="N", help="turns of an episode (default: 4)")
    parser.add_argument("--tokens", type=positive, default=64, metavar="N", help="tokens of a turn (default: 64)")
    parser.add_argument("--tool-ms", type=positive, default=50, metavar="MS", help="time of an answer (default: 50)")
    parser.add_argument("--width", type=positive, default=256, metavar="N", help="width of the model (default: 256)")
    parser.add_argument("--layers", type=positive, default=4, metavar="N", help="layers of the model (default: 4)")
    devices = ("cpu", "cuda")
    parser.add_argument("--device", choices=devices, default="cpu", help="cuda: in bfloat16 (default: cpu)")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("--device cuda needs a GPU that PyTorch finds, and there is none; leave it out.")
    os.environ["TOOL_SECONDS"] = str(args.tool_ms / 1e3)
    set_num_threads(args.threads or count_physical_cores())
    use_kernels(True)
    tokenizer = chat_tokenizer()
    stop_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = random_model(len(tokenizer), args.width, args.layers)
    engine = EmbeddedRollout(model.to(args.device, torch.float32 if args.device == "cpu" else torch.bfloat16))
    source = f"{ROOT}/benchmarks/support/waiting_environment.py:Waiting"
    limits = CallLimits(60.0, args.episodes)
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(Path(directory))
        pool = EnvironmentPool({"waiting": source}, num_processes=2, limits=limits)
        try:
            sides: dict[str, Callable[[], dict[str, Any]]] = {
                "episodes": lambda: play(EqualTurns(engine, stop_id, reuses=True), tokenizer, pool, args),
                "single turn": lambda: single(engine, tokenizer, args),
                "recomputed": lambda: play(EqualTurns(engine, stop_id, reuses=False), tokenizer, pool, args),
            }
            results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
            for number in range(args.repeats + 1):
                for name in sides if number % 2 else reversed(sides):
                    result = sides[name]()
                    if number:
                        results[name].append(result)
        finally:
            pool.close()
    speeds = {name: median(each["tokens"] / each["seconds"] for each in rows) for name, rows in results.items()}
    reused = median(each["reused"] for each in results["episodes"])
    lines = [(name, f"{speed:,.0f}", f"{speed / speeds['single turn']:.2f}") for name, speed in speeds.items()]
    print_table(f"{args.episodes} episodes of {args.turns} turns", ("", "tokens/s", "of a single turn"), lines)
    ratio, without = (speeds["episodes"] / speeds[name] for name in ("single turn", "recomputed"))
    rows = [
        Row("episodes", "tokens/s", speeds["episodes"], speeds["single turn"], None, ratio),
        Row("reused", "share of prompt tokens", reused),
        Row("computed_of_context", "share of prompt tokens", 1 - reused),
        Row("reuse", "tokens/s", speeds["episodes"], speeds["recomputed"], None, without),
    ]
    print_rows("episodes", rows, smoke=args.smoke)


class EqualTurns:
    """An engine whose turns all have the same length: the last token is the one that ends a turn."""

    def __init__(self, engine: EmbeddedRollout, stop_id: int, *, reuses: bool) -> None:
        self._engine, self._stop_id, self._reuses = engine, stop_id, reuses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> None:
        """Queue a request; without reuse nothing is kept for the next turn."""
        self._engine.submit(replace(request, keep=request.keep and self._reuses))

    def finished(self) -> list[Completion]:
        """Return what the engine has finished, with the last token replaced."""
        done = self._engine.finished()
        return [replace(each, token_ids=[*each.token_ids[:-1], self._stop_id]) for each in done]


def play(engine: Any, tokenizer: PreTrainedTokenizerFast, pool: EnvironmentPool, args: Any) -> dict[str, Any]:
    """Play all episodes; return seconds, tokens and the share of prompt tokens that were reused."""
    stop_ids, renderer = [tokenizer.eos_token_id], ChatRenderer(tokenizer)
    longest = args.turns * (args.tokens + ANSWER_TOKENS)
    limits = EpisodeLimits(turns=args.turns, tokens=longest, context_tokens=2 * longest, rows=1)
    starts = [
        EpisodeStart(
            Player(EpisodeClient(pool.environment("waiting", number)), renderer, stop_ids, limits),
            {"prompt": f"{PROMPT}{number}"},
            (0, number),
        )
        for number in range(args.episodes)
    ]
    prompts, reused = engine.prompt_tokens, engine.reused_tokens
    start = time.perf_counter()
    played = play_episodes(engine, starts, SamplingParams(args.tokens), pool.loop)
    seconds = time.perf_counter() - start
    tokens = sum(row.num_sampled for each in played for row in each.rows)
    assert tokens == args.episodes * args.turns * args.tokens
    share = (engine.reused_tokens - reused) / (engine.prompt_tokens - prompts)
    return {"seconds": seconds, "tokens": tokens, "reused": share}


def single(engine: EmbeddedRollout, tokenizer: PreTrainedTokenizerFast, args: Any) -> dict[str, Any]:
    """Generate as many tokens in one turn."""
    renderer, sampling = ChatRenderer(tokenizer), SamplingParams(args.turns * args.tokens)
    prompts = [
        renderer.start([{"role": "user", "content": f"{PROMPT}{number}"}]).ids for number in range(args.episodes)
    ]
    start = time.perf_counter()
    done = generate(engine, [Request(i, ids, sampling, noise_key=(0, i)) for i, ids in enumerate(prompts)])
    return {"seconds": time.perf_counter() - start, "tokens": sum(len(each.token_ids) for each in done), "reused": 0.0}


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, trained on the texts of this program, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False, vocab_size=400
    )
    backend.train_from_iterator([f"{PROMPT}7", "user\n", "assistant\n", "7 done"], trainer)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def random_model(vocabulary: int, width: int, layers: int) -> LlamaForCausalLM:
    """Return a model with random weights, which never samples the two last tokens: those of the chat template."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(4, width // 64),
        num_key_value_heads=max(4, width // 64),
        max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 3.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[-2:, 0] = -20.0
    return model.eval()


if __name__ == "__main__":
    run(main)
