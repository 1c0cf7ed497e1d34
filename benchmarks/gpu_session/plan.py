"""The parts of a session in the order of their importance, their sizes, and the limit of each process.

With the limits of a first call of 8 minutes, what it does not reach is left for a second one (`--after`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_session import decoding, machine, step, suites, training
from gpu_session.runner import Case

PARTS = (
    *("probe", "decode", "shapes", "kernels", "variants", "attention", "nccl", "mfu", "lora", "top_p", "ranks"),
    *("tests", "generation", "step"),
)
LIMITS_S = {"0.5B": 40, "1.5B": 60, "7B": 130}
"""Of a process that generates with a model, which also writes it, and compiles its kernels."""

RANKS_S = (100, 260)
"""Time without which the tests with two ranks are not started, and their limit: a fixture trains all layouts, for 35 to
160 s on a CPU. So they come after the figures."""

SIZES = {
    # pages stay below a power of two while a row grows, so that steps keep their shape
    "decode": {
        "rows_and_contexts": [(256, 520), (64, 520), (64, 2560), (256, 2560)],
        "steps": (16, 144),
        "repeats": 2,
    },
    "shapes": {"rows": 256, "prompt_len": 512, "median": 700, "longest": 4096},
    "kernels": {"rows": (16, 64, 256), "lengths": (512, 2048, 8192), "calls": 20},
    "generation": {"rows": 256, "prompt_len": 128, "new_tokens": 256},
    "mfu": {"sequences": 8, "length": 4096, "prompt_len": 256, "micro_batch": 16384, "repeats": 3},
    "lora": {"sequences": 4, "length": 4096, "prompt_len": 256, "micro_batch": 8192, "repeats": 3},
    "step": {
        "prompts_per_step": 8,
        "group_size": 8,
        "prompt_len": 128,
        "new_tokens": 512,
        "accumulation": 8,
        "repeats": 3,
    },
}
SETTINGS = ["cudnn", "exact", "eager", "recomputed", "idle_offload", "host_offload", "FA3"]
"""Of updates of the smallest model, in order; only the first before adapters, top-p and the tests."""

OF_7B = {"rows_and_contexts": [(256, 520), (64, 2560), (64, 520)], "steps": (16, 144), "repeats": 1}
"""256 prompts of 2,560 tokens take 20 seconds, three times."""

TINY_SIZES = {
    "decode": {"rows_and_contexts": [(4, 40), (2, 70)], "steps": (2, 6), "repeats": 1},
    "shapes": {"rows": 4, "prompt_len": 8, "median": 8, "longest": 24},
    "kernels": {"rows": (2,), "lengths": (40, 64), "calls": 1},
    "generation": {"rows": 4, "prompt_len": 8, "new_tokens": 4},
    "mfu": {"sequences": 2, "length": 32, "prompt_len": 8, "micro_batch": 32, "repeats": 1},
    "lora": {"sequences": 2, "length": 32, "prompt_len": 8, "micro_batch": 32, "repeats": 1},
    "step": {"prompts_per_step": 2, "group_size": 2, "prompt_len": 8, "new_tokens": 4, "accumulation": 1, "repeats": 1},
}
TINY_TESTS = ["tests/runtime/test_threads_gpu.py"]


def cases(parts: Sequence[str], models: Sequence[str], *, tiny: bool, root: str, out: Path, since: str) -> list[Case]:
    """Return the processes of these parts and models, in order."""
    sizes = TINY_SIZES if tiny else SIZES
    lengths = {"4 x 4,096": [4096] * 4, "log-normal": training.log_normal_lengths(16384, 700, 4096)}
    if tiny:
        lengths = {"2 x 32": [32, 32], "log-normal": [5, 30]}
    settings = ["cudnn", "recomputed"] if tiny else SETTINGS
    small = [name for name in models if name != "7B"]  # whose update fits on one GPU
    of_root = {"root": root, "tiny": tiny}

    def generating(part: str, name: str, limit_s: float, measure: Callable[..., None], **options: Any) -> Case:
        return Case(part, name, limit_s, measure, of_root | {"model": name, "sizes": sizes.get(part)} | options)

    def decode(name: str) -> Case:
        of_model = {"sizes": OF_7B} if name == "7B" and not tiny else {}
        return generating("decode", name, LIMITS_S[name], decoding.steady, **of_model)

    def visited(name: str) -> Case:
        return generating("shapes", name, 1.5 * LIMITS_S[name], decoding.lengths)

    def varied(part: str, name: str, *variants: str) -> Case:
        return generating(part, name, 60, decoding.variants, sizes=sizes["decode"], variants=variants)

    def update(name: str, setting: str, part: str = "mfu", limit_s: float = 100) -> Case:
        options = of_root | {"model": name, "setting": setting, "sizes": sizes[part]}
        return Case(part, f"{name}, {setting}", limit_s, training.update, options)

    def suite(part: str, files: list[str], limit_s: float, processes: int = 0, least_s: float = 8) -> Case:
        options = {"rehearse": tiny, "files": files, "log": str(out / f"{part}.txt"), "processes": processes}
        return Case(part, "pytest", limit_s, suites.tests, options, least_s)

    ranks = suites.gpu_test_files(suites.TWO_RANKS)
    changed = [file for file in suites.changed_test_files(since) if file not in ranks]
    if tiny:
        ranks, changed = TINY_TESTS, []
    everything = [
        Case("probe", "machine", 30, machine.probe),
        *(decode(name) for name in models),
        *(visited(name) for name in models[:1]),
        Case("kernels", "decoding", 40, decoding.attention, {"models": models, "sizes": sizes["kernels"]}),
        varied("variants", models[0], "graphs", "no_graphs", "PyTorch_sampling", "no_Triton", "exact"),
        Case("attention", "training", 60, training.attention, {"models": models, "lengths": lengths}),
        Case("nccl", "group of one", 40, machine.nccl),
        *(update(name, "compiled") for name in small),
        *(update(name, setting) for name in small[:1] for setting in settings[:1]),
        *(update(name, "lora", "lora", 120) for name in models[-1:]),
        varied("top_p", models[0], "graphs", "top_p", "top_p_by_PyTorch"),
        suite("ranks", ranks, RANKS_S[1], least_s=RANKS_S[0]),
        suite("tests", changed, 240, processes=6),
        *(update(name, setting) for name in small[:1] for setting in settings[1:]),
        *(visited(name) for name in models[1:]),
        *(generating("generation", name, 90, decoding.peer) for name in small),
        Case("step", "0.5B", 240, step.step, {"model": "0.5B", "sizes": sizes["step"], "tiny": tiny}),
    ]
    return [case for case in everything if case.part in parts]
