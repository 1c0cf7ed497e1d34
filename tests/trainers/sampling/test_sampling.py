"""When responses are scored: as soon as they are there if rewards have processes of their own."""

from types import SimpleNamespace

import pytest
import torch

from hybridflow.config import load_config
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.sampling.sampling import Sampling

OWN_POOL = ("controller.backend=ray", "placement.pools={main=[1],score=[1]}", "placement.roles.reward=score")


def sampling(*changes):
    """Return `Sampling` of groups that record their calls, with two responses to a prompt, and the calls."""
    calls = []

    def method(name, compute):
        def remote(batch):
            calls.append(name)
            return DataProtoFuture.of(DataProto.from_dict(compute(batch)))

        return SimpleNamespace(remote=remote)

    rollout = SimpleNamespace(
        generate_sequences=method("generate", lambda rows: {"responses": torch.arange(2 * len(rows))[:, None]}),
        generate_greedy_sequences=method("greedy", lambda rows: {"responses": 7 * torch.arange(len(rows))[:, None]}),
        begin_sequences=method("begin", lambda rows: {"group_ids": rows.batch["group_ids"]}),
        finish_sequences=method("finish", lambda rows: {"responses": torch.arange(2 * len(rows))[:, None]}),
    )
    score = method("score", lambda rows: {"scores": rows.get("responses").batch["responses"][:, 0].float()})
    config = load_config(None, ["rollout.group_size=2", *changes])
    return Sampling(config, rollout, SimpleNamespace(score=score)), calls  # pyright: ignore


def prompts():
    return DataProto.from_dict({"prompts": torch.tensor([[4], [5]])})


@pytest.mark.parametrize(
    ("changes", "at_once"), [((), []), (OWN_POOL, ["score"])], ids=["in shared processes", "in a pool of their own"]
)
def test_rewards_in_a_pool_of_their_own_score_as_soon_as_generation_ends(changes, at_once):
    sample, calls = sampling(*changes)
    begun = sample.begin(prompts(), 3)
    assert calls == ["generate", *at_once]
    for _ in range(2):  # a batch that is restored from a checkpoint is not scored again
        (part,) = sample.score(begun)
        assert part.get("scores").batch["scores"].tolist() == [0, 1, 2, 3]
    assert calls == (["generate", "score"] if at_once else ["generate", "score", "score"])


@pytest.mark.parametrize("changes", [(), OWN_POOL])
def test_each_response_is_compared_with_the_greedy_one_of_its_prompt(changes):
    sample, calls = sampling("algorithm.advantage=remax", *changes)
    (part,) = sample(prompts, 0)
    assert part.get("baseline_scores").batch["baseline_scores"].tolist() == [0, 0, 7, 7]
    assert sorted(calls) == ["generate", "greedy", "score", "score"]
