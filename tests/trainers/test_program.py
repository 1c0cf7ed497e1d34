from hybridflow.config import AlgorithmConfig, Config
from hybridflow.trainers import run_on_placeholders

USER = """
def my_advantages(*, scores, baseline_scores):
    advantages = (scores - baseline_scores)[:, None]
    return advantages, advantages
"""


def test_greedy_responses_are_made_for_a_users_function_that_reads_their_scores(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(USER)
    for advantage, is_greedy in ((f"{file}:my_advantages", True), ("remax", True), ("grpo", False)):
        trace = run_on_placeholders(Config(algorithm=AlgorithmConfig(advantage=advantage)))
        methods = {event.where for event in trace if event.kind == "call"}
        assert ("ActorRolloutWorker.generate_greedy_sequences" in methods) is is_greedy
