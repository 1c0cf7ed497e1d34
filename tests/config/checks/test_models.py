"""Values of the models that another value makes wrong."""

import pytest

CONTRADICTIONS = [
    ("memory.max_tokens_per_micro_batch=1023", "data.max_response_length=512; use at least 1024"),
    ("parallel.replicas=2", "parallel.replicas=2 needs 2 processes, but controller.backend='local' has one"),
    (
        "controller.backend=ray controller.num_workers=6 parallel.sequence=2 parallel.replicas=2",
        "parallel.replicas=2 times parallel.sequence=2 does not divide controller.num_workers=6; change one of them",
    ),
    (
        "controller.backend=ray controller.num_workers=4 parallel.expert=2 parallel.replicas=2",
        "parallel.expert=2 times parallel.replicas=2: expert parallel ranks cannot be split further; set ",
    ),
    ("memory.offload={critic='idle'}", "memory.offload.critic='idle', but algorithm.advantage='grpo' has no critic"),
    ("memory.offload={reference='idle'}", "memory.offload.reference='idle', but there is no separate reference model"),
    ("memory.offload={reward='host'}", "memory.offload.reward='host', but reward.model_path is empty"),
    ("memory.offload={rollout='idle'}", "memory.offload.rollout='idle', but a rollout engine frees its memory"),
]


@pytest.mark.parametrize(("overrides", "problem"), CONTRADICTIONS)
def test_a_contradiction_of_models_shows_both_values_and_the_fix(only_problem, overrides, problem):
    assert problem in only_problem(overrides)
