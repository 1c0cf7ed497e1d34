"""The configuration: one frozen section per part of a run, one home per key.

Every key has a meaning (`hybridflow config --reference` prints them) and a default that works.
Values that need each other are checked together in `checks`. No torch here.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

AdvantageName = Literal[
    "gae",
    "grpo",
    "rloo",
    "reinforce++",
    "reinforce++-baseline",
    "remax",
    "opo",
    "gpg",
    "pass@k",
    "gdpo",
    "optimal-token-baseline",
    "distillation",
    "none",
]
PolicyLossName = Literal[
    "ppo", "decoupled-ppo", "gspo", "gmpo", "cispo", "sapo", "dppo", "reinforce", "clip-cov", "kl-cov"
]
AggregationName = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
RejectionName = Literal[
    "token_ratio",
    "token_k3",
    "sequence_ratio",
    "sequence_geometric_ratio",
    "sequence_mean_k3",
    "sequence_max_k3",
    "sequence_min_ratio",
]
KLEstimatorName = Literal["k1", "k2", "k3", "abs"]
PreferenceLossName = Literal["dpo", "ipo"]
OffloadName = Literal["idle", "host"]
ScheduleName = Literal["constant", "linear", "cosine"]
DTypeName = Literal["float32", "bfloat16", "float64"]
RoleName = Literal["actor_rollout", "rollout", "critic", "reference", "teacher", "reward", "actor"]
TeacherLossName = Literal["none", "reverse_kl", "forward_kl"]
OrderName = Literal["shuffled", "sequential", "curriculum", "weighted"]
OverlongName = Literal["drop", "error", "truncate-left", "truncate-right", "truncate-middle"]

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Parameter = bool | int | float | str
Bounds = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
NoneAsText = BeforeValidator(lambda value: None if value == "none" else value)  # TOML has no null


def _count_or_auto(value: object) -> object:
    if value != "auto" and not (isinstance(value, int) and value > 0):
        raise ValueError('needs an integer above 0, or "auto"')
    return value


CountOrAuto = BeforeValidator(_count_or_auto)


def _named_or_user(names: Any) -> BeforeValidator:
    """One of the names, or a function of the user's."""

    def valid(value: object) -> object:
        if value not in get_args(names) and not (isinstance(value, str) and ":" in value.strip(":")):
            known = ", ".join(map(repr, get_args(names)))
            raise ValueError(f"needs one of {known}, or a function of yours as 'path.py:function' or 'module:function'")
        return value

    return BeforeValidator(valid)


UserFunction = Annotated[str, Field(json_schema_extra={"shown": "'path.py:function' or 'module:function'"})]


class Section(BaseModel):
    """A frozen group of keys; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class ModelConfig(Section):
    path: str = Field(
        default="", description="Hugging Face directory of the policy: config.json, safetensors, tokenizer."
    )
    dtype: DTypeName = Field(
        default="float32",
        description="Compute dtype. Parameters and optimizer state stay float32 (float64 with float64).",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, more time."
    )
    compile: bool = Field(
        default=False,
        description="Learn with layers compiled by torch.compile, which takes up to a minute at the first step, in "
        "place of controller.compiled_kernels, which generation keeps. Rounding depends on it.",
    )


class LoRAConfig(Section):
    rank: NonNegative = Field(
        default=0,
        description="Rank of the actor's adapters, which learn in place of its weights; 0 is none: all weights learn. "
        "The reference is the actor with its adapters off, unless reference.model_path names another.",
    )
    alpha: Annotated[float, Field(gt=0)] = Field(
        default=32.0, description="The adapters' products are scaled by alpha / rank."
    )
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="Names of the linear layers that get adapters.",
    )

    @property
    def scaling(self) -> float:
        """What the product of an adapter is multiplied with."""
        return self.alpha / max(self.rank, 1)


class DataConfig(Section):
    train_files: tuple[str, ...] = Field(
        default=(),
        description="Parquet files of training prompts (sft: with responses; dpo and reward-model: with preferences).",
    )
    val_files: tuple[str, ...] = Field(default=(), description="Parquet files of validation prompts.")
    train_batch_size: Positive = Field(default=64, description="Prompts in one training step.")
    max_prompt_length: Positive = Field(default=512, description="Longest prompt, in tokens.")
    max_response_length: Positive = Field(default=512, description="Longest response, in tokens.")
    overlong_prompts: OverlongName = Field(
        default="drop", description="What happens to a prompt longer than max_prompt_length."
    )
    order: Annotated[OrderName | UserFunction, _named_or_user(OrderName)] = Field(
        default="shuffled",
        description="How an epoch visits the training rows: shuffled anew, as they are, ascending by data.order_by "
        "(curriculum), or drawn with weights of data.order_by; or a function of yours (docs/data.md).",
    )
    order_by: str = Field(
        default="", description="The column, or name in extra_info, of the numbers that data.order reads."
    )
    chat_template: bool = Field(
        default=True,
        description="Apply the tokenizer's chat template where it has one; otherwise messages are joined by newlines.",
    )


class RolloutConfig(Section):
    backend: Literal["embedded", "vllm"] = Field(
        default="embedded",
        description="The engine that generates: the trainer's own model, or vLLM. In the processes that learn, or in a "
        "pool of its own (placement.roles.rollout).",
    )
    group_size: Positive = Field(
        default=8, description="Responses sampled for each prompt; grpo compares them with each other."
    )
    temperature: Annotated[float, Field(ge=0)] = Field(default=1.0, description="Softmax temperature; 0 is greedy.")
    top_k: NonNegative = Field(default=0, description="Sample among the k most likely tokens; 0 is all of them.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Sample among the fewest tokens whose probability reaches top_p."
    )
    max_running_sequences: Positive = Field(
        default=1024, description="Sequences decoded together; more wait for a place."
    )
    pack_weights: bool = Field(
        default=True,
        description="On a CPU, decode in one compiled call from a copy of the weights in the order it reads: faster, "
        "with the weights twice in memory while generating.",
    )
    stop_strings: tuple[str, ...] = Field(
        default=(), description="Texts that end a response, besides the model's stop tokens; they are part of it."
    )
    tensor: Positive = Field(default=1, description="vllm: ranks that share an engine and each of its layers.")
    max_model_len: NonNegative = Field(
        default=0, description="vllm: longest prompt and response together; 0 is what data allows."
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5, description="vllm: share of a GPU's memory that it uses, weights included, while generating."
    )
    kv_cache_bytes: NonNegative = Field(
        default=0,
        description="vllm: memory of keys and values on each rank; 0 is what gpu_memory_utilization leaves, on a CPU "
        "1 GiB.",
    )
    enforce_eager: bool = Field(
        default=False, description="vllm: start in seconds, without compiled graphs, and generate slower."
    )
    weight_sync: Literal["object_store", "broadcast", "disk"] = Field(
        default="object_store",
        description="How weights go to rollout engines in a pool of their own: shared memory (between nodes Ray's "
        "transfer), a collective (gloo, NCCL on GPUs), or files in trainer.run_dir. In one process nothing is sent.",
    )
    sync_bucket_bytes: Positive = Field(
        default=256 * 2**20, description="Weights are gathered and sent so many bytes at a time."
    )


class ValidationConfig(Section):
    temperature: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Temperature of validation samples; 0 is greedy."
    )
    group_size: Positive = Field(
        default=1, description="Samples for each validation prompt; pass@k is reported for the powers of two up to it."
    )
    batch_size: Positive = Field(default=512, description="Validation prompts generated in one call.")
    max_samples: NonNegative = Field(default=0, description="Use only the first rows of the validation data; 0 is all.")


class OptimizerConfig(Section):
    lr: Annotated[float, Field(ge=0)] = Field(default=1e-6, description="Peak learning rate.")
    betas: tuple[DecayRate, DecayRate] = Field(
        default=(0.9, 0.999), description="AdamW's decay rates of the two moments."
    )
    epsilon: Annotated[float, Field(gt=0)] = Field(default=1e-8, description="AdamW's epsilon.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.01, description="Decoupled decay of matrices; norms and biases are not decayed."
    )
    clip_grad_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="The global gradient norm is clipped to this."
    )
    schedule: ScheduleName = Field(
        default="constant", description="Learning rate after the warm-up, until trainer.total_steps."
    )
    warmup_steps: NonNegative = Field(
        default=0, description="Optimizer steps over which the learning rate rises linearly from 0."
    )
    min_lr_ratio: Fraction = Field(default=0.0, description="Where linear and cosine schedules end, as a share of lr.")


class MemoryConfig(Section):
    max_tokens_per_micro_batch: Annotated[Positive | Literal["auto"], CountOrAuto] = Field(
        default=16384,
        description="Tokens in one forward and backward per rank: the memory knob, which changes no result but "
        "rounding. 'auto' finds for each role what fits at the first start, and the run keeps it.",
    )
    packing: bool = Field(
        default=True,
        description="Concatenate sequences without padding; false pads each micro-batch: slower, equal results.",
    )
    share_prompts: bool = Field(
        default=True,
        description="When packing, compute a prompt once for its responses in a micro-batch: faster, equal results.",
    )
    offload: dict[RoleName, OffloadName] = Field(
        default={},
        description="Roles whose memory moves to the host, as in {critic = 'idle'}: 'idle' is weights and optimizer "
        "state between calls, 'host' is always, the optimizer steps there too. On a CPU 'idle' moves nothing.",
    )


class ParallelConfig(Section):
    tensor: Positive = Field(
        default=1,
        description="Ranks that share each layer: heads, MLP columns and vocabulary. Llama, Qwen2 and Qwen3 only.",
    )
    sequence: Positive = Field(
        default=1,
        description="Ranks that share the tokens of each micro-batch (Ulysses). Llama, Qwen2 and Qwen3 only.",
    )


class ActorConfig(Section):
    mini_batch_size: NonNegative = Field(
        default=0, description="Prompts in one optimizer step; must divide data.train_batch_size. 0 is all of them."
    )
    epochs: Positive = Field(default=1, description="Passes over each batch of rollouts.")
    policy_loss: Annotated[PolicyLossName | UserFunction, _named_or_user(PolicyLossName)] = Field(
        default="ppo", description="The policy objective, or a function of yours (docs/algorithms.md)."
    )
    policy_loss_kwargs: dict[str, Parameter] = Field(
        default={}, description="Parameters of the policy loss that are no keys here, as in {tau_neg = 1.1}."
    )
    old_log_probs_from: Literal["trainer", "rollout"] = Field(
        default="trainer",
        description="Whose log-probs the ratio compares with: the trainer's, from before the update, or the sampler's.",
    )
    clip_ratio_low: Fraction = Field(default=0.2, description="The ratio is clipped from below at 1 - this.")
    clip_ratio_high: Annotated[float, Field(ge=0)] = Field(
        default=0.2, description="The ratio is clipped from above at 1 + this."
    )
    clip_ratio_dual: Annotated[Annotated[float, Field(gt=1)] | None, NoneAsText] = Field(
        default=3.0,
        description="Dual clip: a negative advantage costs at most this times its size; 'none' turns it off.",
    )
    loss_aggregation: AggregationName = Field(
        default="token-mean", description="How token losses become one number; always against the global count."
    )
    entropy_coef: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Weight of the entropy bonus in the loss."
    )
    optimizer: OptimizerConfig = OptimizerConfig()


class CriticConfig(Section):
    model_path: str = Field(
        default="", description="Directory the critic starts from; empty is model.path. Its value head starts at zero."
    )
    mini_batch_size: NonNegative = Field(
        default=0, description="Prompts in one optimizer step of the critic; 0 is all of them."
    )
    epochs: Positive = Field(default=1, description="Passes over each batch of rollouts.")
    value_clip: Annotated[float, Field(gt=0)] = Field(
        default=0.5, description="New values are clipped to the old ones plus or minus this."
    )
    loss_aggregation: AggregationName = Field(default="token-mean", description="How token losses become one number.")
    warmup_steps: NonNegative = Field(default=0, description="Steps in which only the critic is trained.")
    always: bool = Field(
        default=False,
        description="Train a critic whatever algorithm.advantage is: for a function of yours that reads `values`.",
    )
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)


class ReferenceConfig(Section):
    model_path: str = Field(default="", description="Directory of the reference policy; empty is model.path.")


class TeacherConfig(Section):
    model_path: str = Field(
        default="", description="Directory of a teacher, with the policy's tokenizer: on-policy distillation."
    )
    loss: TeacherLossName = Field(
        default="none",
        description="Add coef * KL between policy and teacher to the policy loss, of the policy from the teacher "
        "(reverse_kl) or of the teacher from the policy (forward_kl). Without: algorithm.advantage = 'distillation'.",
    )
    coef: Annotated[float, Field(ge=0)] = Field(default=1.0, description="Weight of that KL.")
    top_k: Positive = Field(
        default=64,
        description="It is taken over the teacher's k most likely tokens and all others as one: never above the whole "
        "KL, and equal to it for the whole vocabulary.",
    )


class AlgorithmConfig(Section):
    advantage: Annotated[AdvantageName | UserFunction, _named_or_user(AdvantageName)] = Field(
        default="grpo",
        description="The advantage estimator, or a function of yours (docs/algorithms.md); gae adds a critic, "
        "distillation needs a teacher, with none only the other parts of the loss teach.",
    )
    advantage_kwargs: dict[str, Parameter] = Field(
        default={}, description="Parameters of the estimator that are no keys here, as in {k = 8}."
    )
    gamma: Fraction = Field(default=1.0, description="Discount factor.")
    lam: Fraction = Field(default=1.0, description="GAE's lambda.")
    norm_by_std: bool = Field(default=True, description="grpo, gpg: divide by the group's standard deviation.")
    whiten_advantages: bool = Field(
        default=True, description="GAE: shift and scale advantages to mean 0, variance 1 over the batch."
    )
    kl_in_reward: bool = Field(
        default=False, description="Subtract kl_coef * KL from each token's reward (adds a reference)."
    )
    kl_in_loss: bool = Field(default=False, description="Add kl_coef * KL to the policy loss (adds a reference).")
    kl_coef: Annotated[float, Field(ge=0)] = Field(
        default=0.001, description="Weight of the KL term; the start value when the controller is adaptive."
    )
    kl_estimator: KLEstimatorName = Field(
        default="k3", description="Estimator of the KL from log-probs of sampled tokens."
    )
    kl_controller: Literal["fixed", "adaptive"] = Field(
        default="fixed", description="adaptive steers kl_coef towards kl_target (in reward only)."
    )
    kl_target: Annotated[float, Field(gt=0)] = Field(default=0.1, description="KL the adaptive controller aims for.")
    kl_horizon: Positive = Field(default=10000, description="Samples over which the adaptive controller acts.")
    filter_groups: bool = Field(
        default=False,
        description="Dynamic sampling: leave out groups whose scores are all equal and sample more prompts in their "
        "place, until there are data.train_batch_size groups.",
    )
    max_sampling_rounds: Positive = Field(
        default=8,
        description="filter_groups: batches of prompts that a step samples at most; then groups without a difference "
        "fill what is left.",
    )
    rollout_weights: Literal["none", "token", "sequence"] = Field(
        default="none",
        description="Weigh each token's policy loss with the probability ratio of the trainer's policy before the "
        "update to the one that sampled, of the token or of its whole response.",
    )
    rollout_weight_bounds: Bounds = Field(default=(0.0, 2.0), description="Smallest and largest of these weights.")
    rollout_weight_outside: Literal["truncate", "mask"] = Field(
        default="truncate", description="A weight outside of its bounds becomes the nearest bound, or 0."
    )
    rollout_reject: dict[RejectionName, Bounds] = Field(
        default={},
        description="Bounds of statistics of the same ratio outside of which a token, or a whole response, is not "
        "learned from, as in {sequence_mean_k3 = [0.0, 0.01]} (docs/algorithms.md).",
    )


class RewardConfig(Section):
    function: str = Field(
        default="", description="'path.py:function' scoring a response; empty chooses by each row's data_source."
    )
    kwargs: dict[str, Parameter] = Field(
        default={}, description="Further arguments of reward.function, as in {url = 'http://127.0.0.1:8000/score'}."
    )
    model_path: str = Field(
        default="",
        description="Directory of a reward model that scores in place of a function: a sequence classifier with one "
        "label, with its own tokenizer and chat template.",
    )
    weights: dict[str, float] = Field(
        default={},
        description="Names of numbers that the function returns and their weights: the score is the weighted sum, as "
        "in {correct = 1.0, format = 0.2}; empty: the score it returns.",
    )
    overlong_buffer: NonNegative = Field(
        default=0,
        description="Tokens before data.max_response_length in which a response loses up to overlong_penalty of its "
        "score, in proportion; 0 is none. Validation scores stay as they are.",
    )
    overlong_penalty: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="What a response of data.max_response_length tokens loses."
    )
    on_error: Literal["stop", "zero"] = Field(
        default="stop",
        description="An exception in the function, a crash or a time-out stops the run, or scores error_score (see "
        "reward/error_rate and reward/timeout_rate).",
    )
    error_score: float = Field(default=0.0, description="Score of a sample whose reward failed when on_error = 'zero'.")
    max_failure_rate: Fraction = Field(
        default=0.1,
        description="on_error = 'zero': share of a rank's samples whose reward may fail; above it the run stops and "
        "shows some of them.",
    )
    processes: NonNegative = Field(
        default=2,
        description="Processes of each rank that run reward.function, apart from the run; 0 calls it in the rank "
        "itself, where a debugger finds it and a crash ends the run.",
    )
    concurrency: Positive = Field(
        default=32, description="Samples that each of these processes has in hand where reward.function is async."
    )
    timeout_s: Annotated[Annotated[float, Field(gt=0)] | None, NoneAsText] = Field(
        default=60.0,
        description="Seconds that reward.function may take for a sample in its process before it is killed and the "
        "sample has failed; 'none' is no limit.",
    )
    memory_bytes: NonNegative = Field(
        default=4 * 2**30, description="Memory that such a process may allocate; 0 is no limit."
    )


class TrainerConfig(Section):
    run_dir: str = Field(
        default="runs/default", description="Directory of the run: configuration, metrics, samples, checkpoints."
    )
    seed: NonNegative = Field(default=0, description="Seed of everything random in the run.")
    total_steps: NonNegative = Field(default=0, description="Training steps; 0 is epochs * steps per epoch.")
    epochs: Positive = Field(default=1, description="Passes over the training data, where total_steps is 0.")
    val_before_train: bool = Field(
        default=True, description="Validate once before the first step (if there is validation data)."
    )
    val_every: NonNegative = Field(
        default=0, description="Validate every so many steps and after the last; 0 is only after the last."
    )
    save_every: NonNegative = Field(
        default=0, description="Checkpoint every so many steps and after the last; 0 is only after the last."
    )
    save_in_background: bool = Field(
        default=False,
        description="Write a checkpoint while the next step runs, from a copy of the state: faster, with the state "
        "twice in memory until it is written. A crash meanwhile loses that checkpoint.",
    )
    keep_checkpoints: Positive = Field(default=2, description="The newest checkpoints that are kept.")
    resume: Literal["auto", "never"] = Field(
        default="auto",
        description="auto continues from the newest checkpoint in run_dir; never wants an empty run_dir.",
    )
    trackers: tuple[Literal["tensorboard"], ...] = Field(default=(), description="Trackers besides metrics.jsonl.")
    log_samples: NonNegative = Field(
        default=4, description="Samples of each step written to samples.jsonl and shown on the console; 0 is none."
    )
    deterministic: bool = Field(default=True, description="Use deterministic kernels only.")


class ControllerConfig(Section):
    backend: Literal["local", "ray"] = Field(
        default="local", description="Where workers run: local is this process, ray a process for each rank."
    )
    num_workers: Positive = Field(
        default=1,
        description="Ranks of every role, on one node; placement.pools says it for several pools or nodes. More than "
        "one trains on ray only; generating and evaluating take turns on local.",
    )
    address: str = Field(
        default="",
        description="ray: 'auto' or HOST:PORT of a running cluster; empty is one on this machine during the run.",
    )
    cpus_per_worker: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="ray: logical CPUs that a worker process reserves; a share is fine."
    )
    call_timeout_s: Annotated[Annotated[float, Field(gt=0)] | None, NoneAsText] = Field(
        default=3600.0, description="ray: the deadline of each call on a worker, in seconds; 'none' is no deadline."
    )
    object_store_bytes: NonNegative = Field(
        default=0, description="ray: shared memory of a cluster that the run starts; 0 is Ray's choice."
    )
    compress_transfers: bool = Field(
        default=False, description="ray: zstd on batches that are sent; for slow networks between nodes."
    )
    parts: Literal["equal", "measured"] = Field(
        default="equal",
        description="How many rows each rank gets of generation, log-probs, values and scores: as many, or fewer where "
        "it was slower in the last calls. 'measured' needs trainer.deterministic = false.",
    )
    balance: Literal["rows", "groups", "none"] = Field(
        default="rows",
        description="Which rows each rank gets after generation: those that make the ranks take equally long, by the "
        "model's cost of each length; 'groups' keeps the responses to a prompt on one rank; 'none' is as they come.",
    )
    threads: NonNegative = Field(
        default=0,
        description="Threads per rank; 0 is the number of physical cores. Rounding depends on it.",
    )
    compiled_kernels: bool = Field(
        default=True,
        description="On a CPU, compute with kernels that the machine's C compiler makes at the first start. "
        "false, or no compiler: PyTorch's own, slower. Rounding depends on it.",
    )


class PlacementConfig(Section):
    pools: dict[str, tuple[Positive, ...]] = Field(
        default={},
        description="Name of each pool and its processes on each node, as in {main = [4, 4]}; "
        "empty is one pool of controller.num_workers.",
    )
    roles: dict[RoleName, str] = Field(
        default={},
        description="The pool of a role, as in {critic = 'second'}; others are on the first one. Roles of one "
        "pool share its processes and take turns.",
    )


class OfflineConfig(Section):
    batch_size: Positive = Field(default=64, description="Examples, or pairs, in one optimizer step.")
    preference_loss: PreferenceLossName = Field(
        default="dpo", description="hybridflow dpo: the loss of a pair, -log sigmoid(margin) or IPO's square."
    )
    beta: Annotated[float, Field(gt=0)] = Field(
        default=0.1, description="hybridflow dpo: how closely the policy is kept to the reference."
    )
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)


class Config(Section):
    """A whole run."""

    model: ModelConfig = ModelConfig()
    lora: LoRAConfig = LoRAConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    validation: ValidationConfig = ValidationConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig = TeacherConfig()
    memory: MemoryConfig = MemoryConfig()
    parallel: ParallelConfig = ParallelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()
    controller: ControllerConfig = ControllerConfig()
    placement: PlacementConfig = PlacementConfig()
    offline: OfflineConfig = OfflineConfig()

    @property
    def uses_critic(self) -> bool:
        return self.algorithm.advantage == "gae" or self.critic.always

    @property
    def is_on_policy(self) -> bool:
        """Whether each batch gives exactly one optimizer step, so that the ratio is 1 by definition."""
        one_step = self.actor.epochs == 1 and self.actor.mini_batch_size in (0, self.data.train_batch_size)
        return one_step and self.actor.old_log_probs_from == "trainer"

    @property
    def corrects_rollouts(self) -> bool:
        """Whether samples are weighed or rejected for the policy that made them."""
        return self.algorithm.rollout_weights != "none" or bool(self.algorithm.rollout_reject)

    @property
    def uses_reference(self) -> bool:
        return self.algorithm.kl_in_reward or self.algorithm.kl_in_loss

    @property
    def uses_teacher(self) -> bool:
        return bool(self.teacher.model_path)

    @property
    def has_rollout_pool(self) -> bool:
        """Whether others than the ranks that learn generate."""
        roles, first = self.placement.roles, next(iter(self.placement.pools), None)
        return "rollout" in roles and roles["rollout"] != roles.get("actor_rollout", first)

    @property
    def actor_is_reference(self) -> bool:
        """Whether the actor without its adapters is the reference, so that no other model is needed."""
        return self.lora.rank > 0 and not self.reference.model_path
