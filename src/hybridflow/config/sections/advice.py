"""Keys of the advice: what a run's metrics and samples must show for a finding, on the console and in `diagnose`."""

from typing import Annotated

from pydantic import Field

from hybridflow.config.sections.base import Fraction, Positive, Section

Amount = Annotated[float, Field(ge=0)]


class AdviceConfig(Section):
    """Thresholds of the findings; docs/diagnose.md lists them, and those that are fixed."""

    enabled: bool = Field(default=True, description="Log findings as warnings during the run.")
    window: Positive = Field(
        default=20,
        description="Number of newest steps whose mean is compared; a run logs a finding at most once in N steps.",
    )
    score_std: Amount = Field(
        default=0.01, description="Equal rewards: standard deviation of a step's scores below which they are equal."
    )
    zero_variance_groups: Fraction = Field(
        default=0.8,
        description="Groups without variance: share of groups with equal scores above which the finding is reported.",
    )
    solved: Fraction = Field(
        default=0.98,
        description="Task solved: position of the mean score between the lowest and the highest score of the run "
        "(which must be at least 1) above which the task is solved; 1: off.",
    )
    format: Fraction = Field(
        default=0.01,
        description="Format never right: mean of a reward number whose name has 'format' below which the format is "
        "never right; 0: off.",
    )
    reward_errors: Fraction = Field(default=0.05, description="Share of samples with a failed reward function.")
    reward_timeouts: Fraction = Field(default=0.01, description="Share of samples whose reward function timed out.")
    kl: Amount = Field(
        default=0.1, description="KL of the policy from the reference, in nats per token, above which it is too far."
    )
    policy_change: Amount = Field(
        default=0.1,
        description="KL of the policy after a step's updates from the policy before them, in nats per token, above "
        "which the updates are too large.",
    )
    entropy: Fraction = Field(
        default=0.1, description="Entropy as a share of its first value, below which the entropy has collapsed; 0: off."
    )
    clip_fraction: Fraction = Field(default=0.3, description="Share of tokens whose probability ratio is clipped.")
    log_prob_mismatch: Amount = Field(
        default=0.05,
        description="Mean absolute difference between the log-probs of trainer and rollout engine, in nats per token.",
    )
    truncation: Fraction = Field(
        default=0.5, description="Share of responses that reach data.max_response_length; 1: off."
    )
    idle: Fraction = Field(default=0.5, description="Share of a step's time in which the processes of a role wait.")
