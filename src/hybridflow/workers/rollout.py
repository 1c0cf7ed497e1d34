"""Generation in a separate resource pool: the rollout engine receives its weights from the training pool."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridflow.config import Config
from hybridflow.data.tokenizer import stop_token_ids, tokenizer_of
from hybridflow.environments.processes.closure import Closure
from hybridflow.errors import RolloutError
from hybridflow.models.loading import DTYPES, build_with_placeholders, model_config
from hybridflow.models.support import num_positions
from hybridflow.rollout import EmbeddedRollout, RolloutEngine
from hybridflow.rollout.weight_sync.receiver import ReceivesWeights, WeightReceiver
from hybridflow.rollout.weight_sync.transports import build_transport
from hybridflow.runtime.device import own_device, require_dtype
from hybridflow.workers.episodes import episode_worker
from hybridflow.workers.generating import GeneratingWorker
from hybridflow.workers.worker_process import prepare_worker_process


class RolloutWorker(ReceivesWeights, GeneratingWorker):
    """A worker that generates with the weights of the last weight sync."""

    def __init__(self, config: Config, environments: Sequence[Closure] = ()) -> None:
        config = prepare_worker_process(self, config)
        self.config = config
        self.tokenizer = tokenizer_of(config)
        self.stop_ids = stop_token_ids(self.tokenizer, config.model.path, config.data.chat_template)
        self.episodes = episode_worker(config, self.tokenizer, self.stop_ids, self.rank, environments)
        model = None
        if config.rollout.backend == "embedded":
            dtype, device = DTYPES[config.model.dtype], own_device()
            require_dtype(dtype, device)
            model = build_with_placeholders(config.model.path, "policy", dtype, device)
        in_group = self.has_collectives and self.world_size > 1
        self.rollout = build_rollout_engine(config, self.tokenizer, model, in_group=in_group)
        self.weight_receiver = WeightReceiver(
            self.rollout, generation_dtype(config), build_transport(config), self.rank, self.world_size
        )

    @contextmanager
    def ready_to_generate(self) -> Iterator[None]:
        """Raise RolloutError if the engine has no weights yet."""
        if self.rollout.version is None:
            raise RolloutError("the rollout engine has no weights yet; sync weights before generating.")
        yield


def generation_dtype(config: Config) -> str:
    """Return the name of the number format that a rollout engine computes in, by which its log-probs differ."""
    return config.rollout.quantization or config.model.dtype


def build_rollout_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel | None = None,
    *,
    shares_model: bool = False,
    in_group: bool = False,
    beside_trainer: bool = False,
) -> RolloutEngine:
    """Build the rollout engine; an engine with a separate copy of the weights starts without weights.

    `model`: the model of the embedded engine, the trainer's own if `shares_model`. `in_group`: the process has joined
    the process group of its worker group. `beside_trainer`: the process also trains, while a vLLM engine sleeps.
    """
    rollout = config.rollout
    if rollout.backend == "embedded":
        assert model is not None, "the embedded engine requires a model"
        return EmbeddedRollout(
            model,
            max_running_sequences=rollout.max_running_sequences,
            pack_weights=rollout.pack_weights,
            shares_model=shares_model,
            tokenizer=tokenizer,
            kv_cache_bytes=rollout.kv_cache_bytes,
            memory_share=rollout.gpu_memory_utilization,
            records_routes=config.replays_routes,
            exact=rollout.exact,
        )
    from hybridflow.rollout.vllm import VLLMRollout

    return VLLMRollout(
        config.model.path,
        dtype=config.model.dtype,
        tokenizer=tokenizer,
        max_running_sequences=rollout.max_running_sequences,
        max_model_len=rollout.max_model_len or _max_model_len(config),
        tensor_parallel=rollout.tensor,
        in_group=in_group,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_bytes=rollout.kv_cache_bytes,
        enforce_eager=rollout.enforce_eager,
        seed_requests=config.trainer.deterministic,
        can_sleep=beside_trainer,
        adapters=None if rollout.merge_adapters else config.lora,
        quantization=rollout.quantization,
        speculative=rollout.speculative,
        records_routes=config.replays_routes,
    )


def _max_model_len(config: Config) -> int:
    """Return the length of the longest prompt and response allowed by the data, at most the model's positions."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    return min(longest, num_positions(model_config(config.model.path)) or longest)
