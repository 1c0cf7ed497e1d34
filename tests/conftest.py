"""Fixtures for all tests: shape checks, tiny models and batches, and recorded results of TRL's GRPO.

`--shapes=on` (the default where beartype is installed) checks every jaxtyping signature of `hybridflow.algorithms` on
each call. Production runs have no such checks. `inspect.unwrap(function)` returns the unchecked function; tests of a
function's own checks use it.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, Qwen2ForCausalLM

    from fixtures.forked import ForkServer
    from fixtures.simulated_device import SimulatedDevice
    from hybridflow.controller.ray import RayBackend
    from hybridflow.protocol import DataProto

os.environ["HF_HUB_OFFLINE"] = "1"  # tests need no network; those of the hub have a stand-in on loopback

# Threads do not speed up tiny tensors, and on a busy machine their synchronization makes them ten times slower; torch
# reads this when the plugins below import it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

pytest_plugins = ["fixtures.canonical", "fixtures.lanes"]

FIXTURES = Path(__file__).parent / "fixtures"
CHECKED_PACKAGE = "hybridflow.algorithms"
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
"""The beartype decorator; accepts an int for a float, as static type checkers do."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shapes",
        choices=("on", "off"),
        default=None,
        help=f"check the tensor shapes in signatures of {CHECKED_PACKAGE} (default: on if beartype is installed)",
    )
    parser.addoption(
        "--rehearse", action="store_true", help="run tests that need a GPU on the CPU, to check the tests themselves"
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Report that shapes are not checked because beartype is missing."""
    chosen = config.getoption("--shapes")
    return [] if chosen or _has_beartype() else ["shapes are not checked: beartype is not installed"]


def _has_beartype() -> bool:
    return importlib.util.find_spec("beartype") is not None


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu" and not config.getoption("--rehearse"):
        # A GPU machine has versions of packages, and warnings of torch.compile, that no other test meets.
        config.addinivalue_line("filterwarnings", "default")
    if (config.getoption("--shapes") or ("on" if _has_beartype() else "off")) == "off":
        return
    loaded = {name for name in sys.modules if name.startswith(f"{CHECKED_PACKAGE}.")}
    if loaded - {f"{CHECKED_PACKAGE}.declarations"}:  # read by the configuration; has no tensors
        raise pytest.UsageError(
            f"--shapes=on is invalid: {CHECKED_PACKAGE} is already imported; import it in tests only."
        )
    from jaxtyping import install_import_hook

    install_import_hook(CHECKED_PACKAGE, CHECKER)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Assign tests to groups for `pytest -n 2 --dist loadgroup`: one for the Ray control plane, one per other file.

    A test with its own mark `xdist_group` stays in that group. Ray tests come first because they take longest. Module
    fixtures and `ray_backend` are created once.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)  # a stable sort
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        is_control_plane = item.get_closest_marker("ray") and "integration" not in item.path.parts
        group = "ray" if is_control_plane else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stop with one line if all chosen tests need a GPU that this machine does not have."""
    items, config = session.items, session.config
    if config.getoption("--rehearse") or config.option.collectonly or not items:
        return
    if not all(item.get_closest_marker("gpu") for item in items) or not any(
        "gpu" in getattr(item, "fixturenames", ()) for item in items
    ):
        return
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError(
            f"these {len(items)} tests need a CUDA device, and torch {torch.__version__} finds none (see nvidia-smi); "
            "--rehearse runs them on the CPU, to check the tests themselves: `make test-gpu ARGS=--rehearse`."
        )


@dataclass(frozen=True)
class RecordedGRPO:
    """A batch, weights, losses and gradients recorded and described by tests/fixtures/make_trl_grpo_fixture.py."""

    record: dict[str, Any]
    tensors: "dict[str, Tensor]"

    def build_model(self) -> "Qwen2ForCausalLM":
        """Return the model with the recorded weights, in the recorded dtype."""
        from transformers import Qwen2Config, Qwen2ForCausalLM

        model = Qwen2ForCausalLM(Qwen2Config(**self.record["model"]))
        weights = {
            name.removeprefix("model."): tensor for name, tensor in self.tensors.items() if name.startswith("model.")
        }
        if model.config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_state_dict(weights)
        if self.record["dtype"] == "float64":
            from fixtures.float64_qwen2 import use_float64_throughout

            use_float64_throughout(model)
        return model

    def grads(self, setting: str) -> "dict[str, Tensor]":
        """Return the recorded gradient of each weight."""
        prefix = f"grad.{setting}."
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}


def _recorded_grpo(stem: str) -> RecordedGRPO:
    from safetensors.torch import load_file

    return RecordedGRPO(
        record=json.loads((FIXTURES / f"{stem}.json").read_text()),
        tensors=load_file(FIXTURES / f"{stem}.safetensors"),
    )


@pytest.fixture(scope="session")
def recorded_grpo() -> RecordedGRPO:
    """Return the float64 record; results must agree to ten digits."""
    return _recorded_grpo("trl_grpo")


@pytest.fixture(scope="session")
def recorded_grpo_float32() -> RecordedGRPO:
    """Return the float32 record of a newer TRL version; results must agree up to rounding."""
    return _recorded_grpo("trl_grpo_float32")


@pytest.fixture(scope="session")
def ray_backend(fork_server: "ForkServer") -> "Iterator[RayBackend]":
    """Yield one Ray cluster on this machine, shared by the session and removed at its end.

    The fork server starts its workers, in a tenth of a second instead of five.
    """
    from fixtures.forked import forked_ray_workers
    from hybridflow.controller.ray import RayBackend, RayResourcePool

    with RayBackend(num_cpus=64, object_store_bytes=512 * 2**20, call_timeout_s=120.0) as backend:
        with forked_ray_workers(fork_server):
            backend.check_fit([RayResourcePool([1], cpus_per_process=0.01)])  # starts the cluster
        yield backend


@pytest.fixture(scope="session")
def fork_server() -> "Iterator[ForkServer]":
    """Yield a process that starts Python programs without importing torch and hybridflow again."""
    from fixtures.forked import ForkServer

    with contextlib.closing(ForkServer()) as server:
        yield server


@pytest.fixture(scope="session")
def run_world(fork_server: "ForkServer", tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Return `run_world`, which runs one process per rank.

    `run_world(program, 2, *arguments)` starts `program RANK WORLD_SIZE STORE *arguments` for 2 ranks and waits for
    both. STORE is the path of a FileStore. Each must exit with one of `returncodes`.
    """
    return partial(_run_world, fork_server.start, tmp_path_factory)


def _run_world(
    start: Callable[..., Any],
    directories: pytest.TempPathFactory,
    program: Path,
    world_size: int,
    *arguments: Any,
    returncodes: Sequence[int] = (0,),
) -> None:
    store = directories.mktemp("world") / "store"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        start([program, rank, world_size, store, *arguments], environment=environment) for rank in range(world_size)
    ]
    try:
        errors = [process.communicate()[1] for process in ranks]
    finally:
        for process in ranks:
            process.discard()
    assert all(process.returncode in returncodes for process in ranks), "\n".join(errors)[-3000:]


@pytest.fixture(scope="session")
def run_jobs_on_gpu(
    gpu: "torch.device", request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Return `run_jobs(directory, jobs)` of `fixtures.layout_program` for ranks that share one GPU.

    Collectives go through the host (`fixtures.staged_collectives`). In a rehearsal the device is a simulated one.
    """
    from fixtures.forked import Program
    from fixtures.layout_program import run_jobs

    if gpu.type == "cpu":
        return partial(run_jobs, request.getfixturevalue("run_world"), device="simulated")
    return partial(run_jobs, partial(_run_world, Program, tmp_path_factory), device="cuda")


@pytest.fixture(scope="session")
def gpu(pytestconfig: pytest.Config) -> "torch.device":
    """Return the device of a test that needs a GPU: the current CUDA device, or the CPU in a rehearsal."""
    import torch

    from hybridflow.runtime.device import own_device

    if pytestconfig.getoption("--rehearse"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.fail("this test needs a CUDA device; pytest -m gpu --rehearse runs it on the CPU.")
    return own_device()


@pytest.fixture
def gpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> "torch.device":
    """Return a CUDA device, for which PyTorch gives the answers of a V100."""
    import torch

    answers = {"is_bf16_supported": False, "get_device_capability": (7, 0), "get_device_name": "V100"}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    return torch.device("cuda", 0)


@pytest.fixture
def simulated_device() -> "Iterator[SimulatedDevice]":
    """Yield a simulated device, which the engines of the test compute on."""
    from fixtures.simulated_device import simulated_engines

    with simulated_engines() as simulated:
        yield simulated


@pytest.fixture
def restores_the_process() -> Iterator[None]:
    """Restore the threads, the determinism and the random state, which a run in this process sets."""
    import torch

    from hybridflow.runtime.random_state import capture_random_state, restore_random_state

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    state = capture_random_state()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    restore_random_state(state)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory on a separate file system of 1 MiB."""
    directory = tmp_path / "small_disk"
    directory.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory], capture_output=True, text=True
    )
    if mount.returncode != 0:
        pytest.skip(f"mounting a tmpfs of 1 MiB failed: {mount.stderr.strip()}")
    yield directory
    subprocess.run(["umount", directory], check=True)


TINY_VOCABULARY = ("<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, 40)))
TINY_CONFIG = {
    "vocab_size": len(TINY_VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return `tiny_model`, which builds a model directory with random float32 weights.

    Example: `tiny_model("qwen3", seed=1, tie_word_embeddings=True)`. Families: llama, qwen2, qwen3, mistral, qwen2_moe;
    others are keys of the family's configuration. Equal calls return the same directory, so tests must not write
    to it. A llama directory has a tokenizer with one token per word: "w3" is token 3.
    """
    directories: dict[str, Path] = {}

    def build(family: str = "llama", *, seed: int = 0, **config: Any) -> Path:
        key = repr((family, seed, sorted(config.items())))
        if key not in directories:
            directories[key] = _write_tiny_model(tmp_path_factory.mktemp(family), family, seed, TINY_CONFIG | config)
        return directories[key]

    return build


def _write_tiny_model(directory: Path, family: str, seed: int, config: dict[str, Any]) -> Path:
    import torch
    import transformers

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "qwen2_moe": "Qwen2Moe"}
    if family == "qwen2_moe":
        config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **config}
        config = {"shared_expert_intermediate_size": 16, **config}
    if family == "qwen3":
        config = {"head_dim": 8, **config}
    config_class = getattr(transformers, f"{names[family]}Config")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{names[family]}ForCausalLM")(config_class(**config))
        with torch.no_grad():  # biases and norms start at 0 and 1, which would hide errors
            for name, weight in model.named_parameters():
                if "bias" in name or "norm" in name:
                    weight.add_(0.2 * torch.randn(weight.shape))
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory)
    if family == "llama":  # in a qwen2 directory, transformers turns this into an empty tokenizer
        _write_word_tokenizer(directory)
    return directory


def _write_word_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(TINY_VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)


@pytest.fixture(scope="session")
def use_float64_throughout() -> "Callable[[PreTrainedModel], PreTrainedModel]":
    """Return a function that converts a Qwen2 to float64 in place, norms and rotary angles included."""
    from fixtures.float64_qwen2 import use_float64_throughout

    return use_float64_throughout


@pytest.fixture(scope="session")
def rollout_rows() -> "Callable[..., DataProto]":
    """Return `rollout_rows`, which builds rows of random tokens in the layout of rollouts.

    Example: `rollout_rows([2, 1], [3, 0])` has these prompt and response lengths: prompts are padded on the left,
    responses on the right. Columns: prompts, responses, input_ids, attention_mask, position_ids, response_mask,
    row_ids.
    """

    def build(prompt_lens: Sequence[int], response_lens: Sequence[int], *, seed: int = 0) -> "DataProto":
        import torch

        from hybridflow.protocol import DataProto

        generator = torch.Generator().manual_seed(seed)
        prompt_mask = torch.arange(max(prompt_lens)).flip(0) < torch.tensor(prompt_lens)[:, None]
        response_mask = torch.arange(max(response_lens)) < torch.tensor(response_lens)[:, None]
        attention_mask = torch.cat([prompt_mask, response_mask], dim=1).long()
        tokens = torch.randint(3, len(TINY_VOCABULARY), attention_mask.shape, generator=generator) * attention_mask
        return DataProto.from_dict(
            {
                "prompts": tokens[:, : max(prompt_lens)],
                "responses": tokens[:, max(prompt_lens) :],
                "input_ids": tokens,
                "attention_mask": attention_mask,
                "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
                "response_mask": response_mask,
                "row_ids": torch.arange(len(prompt_lens)),
            }
        )

    return build
