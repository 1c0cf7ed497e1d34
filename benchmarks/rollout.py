"""Generation throughput on CPU: our embedded engine against transformers and vLLM, our vLLM backend against vLLM.

workloads (exact lengths, sampled at temperature 1 from the whole vocabulary, no stop token):
  small      model of 3.4M parameters, 256 prompts of 20 tokens, 64 new tokens each
  long_tail  the same model and prompts, responses of median 32, one in ten 256
  100M       model of 100M parameters, 64 prompts of 20 tokens, 32 new tokens each

Every side computes each workload in bfloat16 and in float32; the faster dtype of each is compared. The default is
`small` with three repeats; --full, with five repeats, takes over 20 minutes, most of it transformers on the long tail.
"""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from support.arguments import names_in, parser_of, print_skipped
from support.environments import python_of
from support.limits import PEAK_SIZES, Peaks, generation_flops
from support.models import write_model
from support.program import run
from support.report import Row, figure, print_rows, print_sides, print_table
from support.rounds import Measurements, alternate
from support.side import Side
from support.workloads import MEASURED, PROMPT_LEN, WORKLOADS, Workload, build_workload

from hybridflow.models.model_sizes import decoder_shape
from hybridflow.runtime.threads import count_physical_cores, set_num_threads

OURS, BACKEND = "hybridflow", "hybridflow_vllm"
PEERS = ("transformers", "vllm")
DTYPES = ("bfloat16", "float32")
MAKE_TARGET = "bench-rollout"


def main() -> None:
    tiny = {"repeats": 1, "only": "tiny", "peers": (), "dtypes": DTYPES[:1], "peak_sizes": (64,)}
    full = {"repeats": 5, "only": None}
    parser = parser_of(__doc__, 3, smoke=tiny, full=full, skipped="the workloads long_tail and 100M, and two repeats")
    parser.add_argument("--only", choices=WORKLOADS, default="small", help="this workload alone (default: small)")
    parser.add_argument(
        "--peers", type=names_in(PEERS), default=PEERS, metavar="A,B", help=f"peers (default: {','.join(PEERS)})"
    )
    parser.add_argument("--backend-only", action="store_true", help="our vLLM backend alone, against vLLM")
    parser.set_defaults(dtypes=DTYPES, peak_sizes=PEAK_SIZES)
    args = parser.parse_args()
    print_skipped(args)
    peers = ("vllm",) if args.backend_only else args.peers
    for peer in peers:
        python_of(peer, MAKE_TARGET)  # a missing environment is reported before the measurements
    threads = set_num_threads(args.threads or count_physical_cores())
    peaks = Peaks(args.peak_sizes)
    rows: list[Row] = []
    workloads = [build_workload(name) for name in ([args.only] if args.only else MEASURED)]
    with tempfile.TemporaryDirectory() as directory:
        for model in dict.fromkeys(workload.model for workload in workloads):
            path = Path(directory) / model
            num_parameters = write_model(path, model)
            print(f"model {model}: {num_parameters:,} parameters", flush=True)
            with ExitStack() as stack:
                sides = [
                    stack.enter_context(
                        Side(
                            *(system, dtype),
                            task="rollout",
                            threads=threads,
                            directory=Path(directory),
                            make_target=MAKE_TARGET,
                            path=str(path),
                        )
                    )
                    for dtype in args.dtypes
                    for system in ((BACKEND,) if args.backend_only else (OURS, BACKEND, *peers))
                    if system != BACKEND or "vllm" in peers
                ]
                print_sides(sides, threads)
                for workload in workloads:
                    if workload.model == model:
                        engines = [side for side in sides if side.system != BACKEND]
                        if not args.backend_only:
                            rows += measure(workload, engines, path, peaks, args.repeats)
                        if backends := [side for side in sides if side.system == BACKEND]:
                            rows += measure_backend(workload, backends, args.repeats)
    print_rows("rollout", rows, smoke=args.smoke)


def measure(workload: Workload, sides: list[Side], path: Path, peaks: Peaks, repeats: int) -> list[Row]:
    """Run one workload on all sides, print its table, return its rows."""

    def ask(side: Side, number: int) -> dict[str, float]:
        return side.ask(prompts=workload.prompts, new_tokens=workload.new_tokens, number=number)

    dtypes = list(dict.fromkeys(side.dtype for side in sides))
    peaks.measure(dtypes)
    measurements = alternate(sides, ask, repeats, workload.name)
    peaks.measure(dtypes)
    shape = decoder_shape(path)
    assert shape is not None, "models.py writes models whose shape is known"
    flops = generation_flops(shape, PROMPT_LEN, workload.new_tokens)
    num_tokens = sum(workload.new_tokens)
    limits = {dtype: num_tokens / (flops / peaks.flops_per_s[dtype]) for dtype in dtypes}
    rates = {
        (side.system, side.dtype): num_tokens / median(result["seconds"] for result in results)
        for side, results in measurements.items()
    }
    _print_sides(workload, measurements, rates, limits)
    return _rows(workload, rates, limits)


def measure_backend(workload: Workload, sides: list[Side], repeats: int) -> list[Row]:
    """Compare our vLLM backend with vLLM called directly for the same: tokens, log-probs, a seed per response."""

    def ask(side: Side, number: int) -> dict[str, float]:
        return side.ask(prompts=workload.prompts, new_tokens=workload.new_tokens, number=number)

    suffix = "" if workload.name == "small" else f"_{workload.name}"
    rows = []
    for side, results in alternate(sides, ask, repeats, f"{workload.name}, vLLM").items():
        ours, direct = (
            sum(workload.new_tokens) / median(result[key] for result in results) for key in ("seconds", "direct")
        )
        ratio = median(result["direct"] / result["seconds"] for result in results)  # of the two in the same round
        rows.append(Row(f"vllm_backend{suffix}_{side.dtype}", "tokens/s", ours, direct, None, ratio))
    return rows


def _rows(workload: Workload, rates: dict[tuple[str, str], float], limits: dict[str, float]) -> list[Row]:
    """Return the rows of each peer's faster dtype against ours, then dtype by dtype; without peers ours alone."""
    suffix = "" if workload.name == "small" else f"_{workload.name}"
    if len({system for system, _ in rates}) == 1:
        return [
            Row(f"{OURS}{suffix}_{dtype}", "tokens/s", rate, None, limits[dtype]) for (_, dtype), rate in rates.items()
        ]
    best = {system: max(DTYPES, key=lambda dtype: rates[system, dtype]) for system in {system for system, _ in rates}}
    rows = []
    for peer in (peer for peer in PEERS if peer in best):
        pairs = [("", best[OURS], best[peer]), *((f"_{dtype}", dtype, dtype) for dtype in DTYPES)]
        for name, our_dtype, peer_dtype in pairs:
            ours, theirs = rates[OURS, our_dtype], rates[peer, peer_dtype]
            rows.append(Row(f"{peer}{suffix}{name}", "tokens/s", ours, theirs, limits[our_dtype], ours / theirs))
    return rows


def _print_sides(
    workload: Workload,
    measurements: Measurements,
    rates: dict[tuple[str, str], float],
    limits: dict[str, float],
) -> None:
    lines = []
    for side, results in measurements.items():
        seconds, rate = [result["seconds"] for result in results], rates[side.system, side.dtype]
        spread = f"{median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"
        lines.append((side.name, spread, figure(rate), f"{rate / limits[side.dtype]:.1%}"))
    lengths = workload.new_tokens
    print_table(
        f"{workload.name}: {len(lengths)} prompts of {PROMPT_LEN} tokens, responses of median {median(lengths):g}, at "
        f"most {max(lengths)} tokens, {sum(lengths):,} in all",
        ("side", "seconds, median", "tokens/s", "share of the limit"),
        lines,
    )


if __name__ == "__main__":
    run(main)
