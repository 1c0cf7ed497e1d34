"""Values of generation and of environments that another value makes wrong."""

import pytest

VLLM = "rollout.backend=vllm"
RAY = "controller.backend=ray"
EPISODES = "environment.classes={a='a.py:A'} environment.max_rows=2"
CONTRADICTIONS = [
    (f"{EPISODES} environment.weights={{a=1,walk=1}}", "environment.weights.walk weighs no environment"),
    (f"{EPISODES} environment.weights={{a=0}}", "environment.weights are all 0"),
    ("environment.classes={a='a.py'}", "environment.classes.a='a.py' is invalid: expected 'path.py:Class'"),
    ("environment.classes={a='gymnasium:'}", "environment.classes.a='gymnasium:' is invalid"),
    ("environment.classes={a='gym:A-v1'}", "with a scheme of command, gymnasium"),
    (
        f"{EPISODES} data.chat_template=false",
        "what separates the turns of environment.classes; use true",
    ),
    ("model.chat_template=chatml data.chat_template=false", "has no effect with data.chat_template=false"),
    ("rollout.temperature=0", "rollout.temperature=0 gives the same response 8 times (rollout.group_size=8)"),
    ("rollout.max_running_sequences=7", "rollout.group_size=8 exceeds rollout.max_running_sequences=7"),
    ("validation.group_size=2000 validation.temperature=1", "exceeds rollout.max_running_sequences=1024"),
    ("validation.group_size=4", "validation.temperature=0 gives the same response 4 times"),
    (
        "rollout.on_new_weights=retract",
        "='retract' is for sequences that run while the policy learns, but trainer.lag=0",
    ),
    ("rollout.stop_strings=['a','']", "rollout.stop_strings=['a', ''] has an empty string, which ends every"),
    (
        "rollout.merge_adapters=false lora.rank=4",
        "needs rollout.backend = 'vllm' and adapters, but rollout.backend='embedded'",
    ),
    (f"{VLLM} rollout.merge_adapters=false", "but rollout.backend='vllm' and lora.rank=0; set both"),
    ("rollout.quantization=fp8 algorithm.rollout_weights=token", "rollout.quantization='fp8' needs rollout.backend"),
    (f"{VLLM} rollout.speculative={{num_speculative_tokens=3}}", "names no source of drafts, or two; set method = 'ng"),
    (
        f"{VLLM} rollout.speculative={{method='eagle',model='draft',num_speculative_tokens=3}}",
        "names no source of drafts",
    ),
    (
        f"{VLLM} rollout.speculative={{method='ngram',num_speculative_tokens=3,prompt_lookup_min=4,"
        "prompt_lookup_max=2}",
        "rollout.speculative.prompt_lookup_min=4 exceeds prompt_lookup_max=2",
    ),
    (f"{VLLM} rollout.speculative={{method='ngram'}}", "rollout.speculative needs num_speculative_tokens"),
    (
        f"{VLLM} rollout.speculative={{method='ngram',num_speculative_tokens=0}}",
        "rollout.speculative.num_speculative_tokens=0 is invalid: expected a positive integer",
    ),
    (
        f"{VLLM} rollout.speculative={{model='draft',num_speculative_tokens=3,prompt_lookup_max=2}}",
        "rollout.speculative.prompt_lookup_max=2 has no effect with a draft model; remove it",
    ),
    (f"{VLLM} rollout.max_model_len=100", "rollout.max_model_len=100 cannot hold data.max_prompt_length=512"),
    (f"{VLLM} rollout.tensor=2", "rollout.tensor=2 needs several processes, but controller.backend='local'"),
    (f"{VLLM} {RAY} controller.num_workers=4 rollout.tensor=3", "=3 does not divide controller.num_workers=4"),
    (
        f"{VLLM} {RAY} placement.pools={{a=[2],b=[3]}} placement.roles.rollout=b rollout.tensor=2",
        "rollout.tensor=2 does not divide placement.pools.b=3",
    ),
]


@pytest.mark.parametrize(("overrides", "problem"), CONTRADICTIONS)
def test_a_contradiction_of_generation_shows_both_values_and_the_fix(only_problem, overrides, problem):
    assert problem in only_problem(overrides)
