"""The estimated seconds of a step of a run on GPUs, from its configuration and the sizes of the policy."""

from hybridflow.config import Config
from hybridflow.config.roles import ranks_of
from hybridflow.models.model_sizes import model_sizes
from hybridflow.models.step_time import LINK_BANDWIDTH, READ_BANDWIDTH, READ_SHARES, UPDATE_FLOPS, StepSizes
from hybridflow.models.step_time import step_seconds as seconds_of
from hybridflow.trainers.stages import needs_old_log_probs


def step_estimate(config: Config) -> list[str]:
    """Return the lines of an estimate for the policy alone, with what it assumes; none without its sizes."""
    model = model_sizes(config.model.path)
    if model is None:
        return []
    data, tensor = config.data, config.rollout.tensor if config.rollout.backend == "vllm" else 1
    trainers = ranks_of(config, "actor_rollout")
    generating = ranks_of(config, "rollout") if config.has_rollout_pool else trainers
    budget, length = config.memory.max_tokens_per_micro_batch, data.max_prompt_length + data.max_response_length
    step = StepSizes(
        prompts=data.train_batch_size,
        group_size=config.rollout.group_size,
        prompt_len=data.max_prompt_length,
        response_len=data.max_response_length,
        trainers=trainers,
        engines=max(1, generating // tensor),
        micro_batch=max(length, 0 if budget == "auto" else budget),
        backend=config.rollout.backend,
        engine_ranks=tensor,
        running=config.rollout.max_running_sequences,
        forwards=int(config.actor.old_log_probs_from == "trainer" and needs_old_log_probs(config)),
        epochs=config.actor.epochs,
        recomputes=config.model.gradient_checkpointing,
    )
    seconds = {name.replace("_", "-"): value for name, value in vars(seconds_of(model, step)).items() if value}
    phases = ", ".join(f"{name} {value:.{0 if value >= 10 else 2}f} s" for name, value in seconds.items())
    return [
        f"estimate of a step of the policy, not measured: {phases}; {step.responses:,} responses of "
        f"{step.response_len:,} tokens",
        f"assumed: {UPDATE_FLOPS / 1e12:.0f} TFLOP/s of a GPU, {READ_SHARES[step.backend]:.0%} of "
        f"{READ_BANDWIDTH / 1e12:g} TB/s in generation, {LINK_BANDWIDTH / 1e9:.0f} GB/s between GPUs",
    ]
