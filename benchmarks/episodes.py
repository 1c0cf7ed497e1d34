"""Episodes of several turns with slow tools against the same number of tokens in one turn, and as agents.

    make bench-episodes
    .venv/bin/python benchmarks/episodes.py --episodes 512 --turns 4 --tokens 64

Each turn has `--tokens` tokens, after which an environment in another process answers within `--tool-ms`. The single
turn has as many tokens as all turns together, and no answers. The model has random weights; tokens per second count
those that it makes. `reused` is the share of the tokens in prompts whose keys and values an earlier turn has left, so
that they are not computed again; `recomputed` runs the same episodes without it. In `agents` OpenAI's client asks for
the same turns at the endpoint, in the processes of the environments: with one client in a process, or one for each
episode.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
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
from hybridflow.environments.agents.agent_player import AgentPlayer
from hybridflow.environments.agents.endpoint import Endpoint
from hybridflow.environments.agents.session import Session
from hybridflow.environments.agents.turn_tree import Renderers, TurnTree
from hybridflow.models.kernels.library import use_kernels
from hybridflow.rollout import Completion, EmbeddedRollout, Request, SamplingParams, generate
from hybridflow.runtime.threads import count_physical_cores, set_num_threads

SMOKE = {"episodes": 4, "turns": 2, "tokens": 4, "repeats": 1, "tool_ms": 1, "width": 32}
PROMPT = "what is the way to the sea and how long does it take on foot "
OWN = "agents with a client each"
PARTS = ("user processes", "event loop", "engine")
"""What takes CPU time: environments or agents, the loop that plays episodes with the endpoint, and all else."""
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
    parser.add_argument("--only-agents", action="store_true", help="only episodes and agents: the cost of the endpoint")
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
    source = f"{ROOT}/benchmarks/support/waiting_environment.py"
    classes = {name: f"{source}:{name}" for name in ("Waiting", "waiting", "waiting_alone")}
    limits = CallLimits(60.0, args.episodes)
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(Path(directory))
        pool = EnvironmentPool(classes, num_processes=2, limits=limits)
        try:
            players = Players(tokenizer, pool, args)
            reusing, forgetting = (EqualTurns(engine, stop_id, reuses=reuses) for reuses in (True, False))
            sides: dict[str, Callable[[], dict[str, Any]]] = {
                "episodes": lambda: play(reusing, players.of_environment, pool, args),
                "agents": lambda: play(reusing, lambda number: players.of_agent("waiting", number), pool, args),
                OWN: lambda: play(reusing, lambda number: players.of_agent("waiting_alone", number), pool, args),
                "single turn": lambda: single(engine, tokenizer, args),
                "recomputed": lambda: play(forgetting, players.of_environment, pool, args),
            }
            if args.only_agents:
                sides = {name: sides[name] for name in ("episodes", "agents", OWN)}
            results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
            for number in range(args.repeats + 1):
                for name in sides if number % 2 else reversed(sides):
                    result = sides[name]()
                    if number:
                        results[name].append(result)
        finally:
            pool.close()
    speeds = {name: median(each["tokens"] / each["seconds"] for each in rows) for name, rows in results.items()}
    lines = [(name, f"{speed:,.0f}", f"{speed / speeds['episodes']:.2f}") for name, speed in speeds.items()]
    print_table(f"{args.episodes} episodes of {args.turns} turns", ("", "tokens/s", "of episodes"), lines)
    shares = {
        name: [median(each[part] for each in results[name]) for part in ("seconds", *PARTS)]
        for name in ("episodes", "agents", OWN)
    }
    lines = [(name, *(f"{seconds:.2f}" for seconds in parts)) for name, parts in shares.items()]
    print_table("the cost of the endpoint", ("", "seconds", *(f"CPU s of {part}" for part in PARTS)), lines)
    rows = []
    for name in ("agents", OWN):
        pairs = zip(results[name], results["episodes"], strict=True)
        cost = median(agent["seconds"] / episode["seconds"] for agent, episode in pairs)
        rows.append(Row(f"time of {name}", "of episodes", cost, None, 1.15))
    if not args.only_agents:
        reused = median(each["reused"] for each in results["episodes"])
        ratio, without = (speeds["episodes"] / speeds[name] for name in ("single turn", "recomputed"))
        rows += [
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


class Players:
    """Makes what plays the episodes of environments, and those of agents at an endpoint."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, pool: EnvironmentPool, args: Any) -> None:
        longest = args.turns * (args.tokens + ANSWER_TOKENS)
        self._limits = EpisodeLimits(turns=args.turns, tokens=longest, context_tokens=2 * longest, rows=1)
        self._pool, self._renderer, self._renderers = pool, ChatRenderer(tokenizer), Renderers(tokenizer)
        self._stop_ids, self._endpoint = [tokenizer.eos_token_id], Endpoint()
        asyncio.run_coroutine_threadsafe(self._endpoint.start(), pool.loop).result()

    def of_environment(self, number: int) -> Player:
        """Return what plays an environment."""
        client = EpisodeClient(self._pool.environment("Waiting", number))
        return Player(client, self._renderer, self._stop_ids, self._limits)

    def of_agent(self, name: str, number: int) -> AgentPlayer:
        """Return what plays an agent."""

        def session() -> Session:
            return Session(TurnTree(self._renderers, self._stop_ids, self._limits), None)

        return AgentPlayer(self._pool.agent(name, number), session, self._endpoint)


def play(engine: Any, player: Callable[[int], Any], pool: EnvironmentPool, args: Any) -> dict[str, Any]:
    """Play all episodes; return seconds, those of the CPU, tokens and the share of prompt tokens that were reused."""
    starts = [
        EpisodeStart(
            player(number), {"prompt": f"{PROMPT}{number}", "turns": args.turns, "tokens": args.tokens}, (0, number)
        )
        for number in range(args.episodes)
    ]
    prompts, reused = engine.prompt_tokens, engine.reused_tokens
    start, used = time.perf_counter(), cpu_seconds(pool)
    played = play_episodes(engine, starts, SamplingParams(args.tokens), pool.loop)
    seconds = time.perf_counter() - start
    parts = [after - before for after, before in zip(cpu_seconds(pool), used, strict=True)]
    tokens = sum(row.num_sampled for each in played for row in each.rows)
    assert tokens == args.episodes * args.turns * args.tokens
    share = (engine.reused_tokens - reused) / (engine.prompt_tokens - prompts)
    return {"seconds": seconds, "tokens": tokens, "reused": share, **dict(zip(PARTS, parts, strict=True))}


def cpu_seconds(pool: EnvironmentPool) -> tuple[float, float, float]:
    """Return the CPU seconds of each of `PARTS`."""

    async def of_loop() -> float:
        return time.thread_time()

    user = sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))
    loop = asyncio.run_coroutine_threadsafe(of_loop(), pool.loop).result()
    return user, loop, time.process_time() - loop


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
