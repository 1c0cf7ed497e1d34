"""Metrics of validation and of offline training: SFT, DPO, reward model."""

from hybridflow.observability.glossary.metric import MUCH_PADDING, Metric

_ACCURACY = (
    "Near 0.5 after 100 steps: no learning. Near 1 at once: the responses differ by a trait such as their length."
)
_VAL_ACCURACY = "Falls while training accuracy rises: overfitting."
_VAL_LOSS = "Rises while the training loss falls: overfitting; stop, or use more data."


def _optimizer(program: str) -> dict[str, Metric]:
    return {
        f"{program}/grad_norm": Metric(
            "Gradient norm before clipping.",
            "1",
            "max",
            "10 times its median, or null (NaN): a bad batch or too large a learning rate.",
        ),
        f"{program}/lr": Metric(
            "Learning rate of the step.", "1", "last", "0 after the warm-up: the weights do not change."
        ),
        f"{program}/padding_computed": Metric(
            "Share of the tokens computed in the update that are padding.",
            "1",
            worry=f"Above {MUCH_PADDING}: computing is wasted; pack rows (memory.packing).",
        ),
    }


OFFLINE = {
    "val/score/mean": Metric(
        "Score of a validation sample: mean.",
        "score",
        worry="Falls while critic/score/mean rises: overfitting to the training prompts.",
    ),
    "val/accuracy": Metric(
        "Share of validation samples with a score of at least 1.",
        "1",
        worry="Below its value at step 0 by more than its ci95: training does harm.",
    ),
    "val/<data_source>/score/mean": Metric("val/score/mean for one data source.", "score"),
    "val/<data_source>/accuracy": Metric(
        "val/accuracy for one data source.", "1", worry="Falls while others rise: this source is forgotten."
    ),
    "val/pass@<k>": Metric(
        "Share of prompts solved by at least one of k samples.",
        "1",
        worry="Falls while val/accuracy rises: responses lose variety; see actor/entropy.",
    ),
    "val/maj@<k>": Metric("Share of prompts whose most frequent answer among k samples is correct.", "1"),
    "val/<share>/ci95": Metric(
        "Half-width of the 95% confidence interval of a share (accuracy, pass@k, maj@k, for all data or one source), "
        "from its standard error over prompts.",
        "1",
        worry="Larger than the difference of two runs: they cannot be compared; validate on more prompts.",
    ),
    "val/<data_source>/pass@<k>": Metric("val/pass@<k> for one data source.", "1"),
    "val/<data_source>/maj@<k>": Metric("val/maj@<k> for one data source.", "1"),
    "val/response_length/mean": Metric(
        "Length of a validation response: mean.",
        "tokens",
        worry="Near the longest allowed: answers are cut, and the accuracy is too low.",
    ),
    "sft/loss": Metric(
        "Cross-entropy per response token.",
        "nats",
        "sum",
        "Above 3 after 100 steps: a wrong chat template or tokenizer. Near 0: the data is memorized.",
    ),
    **_optimizer("sft"),
    "sft/val_loss": Metric("Cross-entropy per response token of the validation data.", "nats", "sum", _VAL_LOSS),
    "dpo/loss": Metric("Loss of a pair: mean.", "nats", worry="Stays at its value of step 1: no learning."),
    "dpo/accuracy": Metric(
        "Share of pairs whose chosen response has the higher reward.",
        "1",
        worry=_ACCURACY,
    ),
    "dpo/margin": Metric(
        "Reward of the chosen response minus that of the rejected one: mean over pairs.",
        "nats",
        worry="Below 0: chosen and rejected may be swapped.",
    ),
    "dpo/chosen_reward": Metric(
        "beta * log(policy / reference) of the chosen responses: mean.",
        "nats",
        worry="Below 0 and falling: chosen responses become less likely too; lower the learning rate.",
    ),
    "dpo/rejected_reward": Metric("beta * log(policy / reference) of the rejected responses: mean.", "nats"),
    **_optimizer("dpo"),
    "dpo/val_loss": Metric("Loss of a validation pair: mean.", "nats", worry=_VAL_LOSS),
    "dpo/val_accuracy": Metric(
        "Share of validation pairs whose chosen response has the higher reward.", "1", worry=_VAL_ACCURACY
    ),
    "reward_model/loss": Metric(
        "Loss of a pair: mean.", "nats", worry="Not below 0.69 (log 2) after 100 steps: no learning."
    ),
    "reward_model/accuracy": Metric(
        "Share of pairs whose chosen response has the higher score.",
        "1",
        worry=_ACCURACY,
    ),
    "reward_model/margin": Metric(
        "Score of the chosen response minus that of the rejected one: mean over pairs.",
        "score",
        worry="Below 0: chosen and rejected may be swapped.",
    ),
    "reward_model/chosen_score": Metric("Score of the chosen responses: mean.", "score"),
    "reward_model/rejected_score": Metric("Score of the rejected responses: mean.", "score"),
    **_optimizer("reward_model"),
    "reward_model/val_loss": Metric("Loss of a validation pair: mean.", "nats", worry=_VAL_LOSS),
    "reward_model/val_accuracy": Metric(
        "Share of validation pairs whose chosen response has the higher score.", "1", worry=_VAL_ACCURACY
    ),
}
