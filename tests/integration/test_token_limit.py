"""Prompts whose responses always reach the token limit, in runs that sample ahead of training or learn in parts."""

import pytest

from hybridflow.observability import read_jsonl
from hybridflow.trainers.ppo_trainer import PPOTrainer

LAG = ("trainer.lag=2", "rollout.on_new_weights=wait", "algorithm.rollout_weights=token")
RUNS = {"lag": LAG, "stream": ("trainer.stream=true",), "streamed_lag": (*LAG, "trainer.stream=true")}
SOME_AT_THE_LIMIT = (  # at this temperature the responses to a prompt are alike, and those to some are all long
    *("data.max_response_length=48", "memory.max_tokens_per_micro_batch=400", "data.val_files=[]"),
    *("rollout.temperature=0.15", "rollout.stop_strings=['no','yes']"),
)


@pytest.mark.parametrize("how", RUNS)
def test_prompts_always_at_the_token_limit_are_used_once_and_in_order(how, run, finished_run, monkeypatch):
    samples = read_jsonl(finished_run("train", "trainer.log_samples=24") / "samples.jsonl")
    step, used, finish_reasons = PPOTrainer.step, [], {}

    def recorded_step(self, next_prompts):
        batch = step(self, next_prompts)
        columns = batch.get(("prompt_texts", "finish_reasons")).non_tensor_batch
        for prompt, reason in zip(columns["prompt_texts"], columns["finish_reasons"], strict=True):
            used.append((self.global_step + 1, prompt))
            finish_reasons.setdefault(prompt, []).append(reason)
        return batch

    monkeypatch.setattr(PPOTrainer, "step", recorded_step)
    run("run", *RUNS[how], *SOME_AT_THE_LIMIT)
    assert used == [(row["step"], row["rendered_prompt"]) for row in samples]
    assert [len(reasons) for reasons in finish_reasons.values()] == [2 * 3] * 24  # once in each epoch
    always_at_the_limit = [prompt for prompt, reasons in finish_reasons.items() if set(reasons) == {"length"}]
    assert 0 < len(always_at_the_limit) < 24
