"""Routes that the embedded engine records: those of one pass over each sequence, with the weights of each token."""

import pytest
import torch

from fixtures.families import write_family
from hybridflow.models.attention import PackedPlan
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.routes import RecordingForward
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate, load_weights

LENGTHS = [1, 2, 31, 32, 33, 50]
PROMPTS = {i: [1 + (7 * i + 3 * j * j) % 39 for j in range(length)] for i, length in enumerate(LENGTHS)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("moe"), "qwen3_moe", max_position_embeddings=256)


@pytest.fixture(params=[False, True], ids=["batches", "paged"])
def engine(request, directory):
    return EmbeddedRollout(load_causal_lm(directory), paged=request.param, records_routes=True, max_running_sequences=5)


def requests(prompts, new=12, **options):
    return [
        Request(i, prompt, SamplingParams(new + i, stop_token_ids=(3,)), noise_key=(5, i), **options)
        for i, prompt in prompts.items()
    ]


def sorted_routes(routes):
    return routes.sort(-1).values


@torch.no_grad()
def routes_of(model, tokens):
    """Return the routes of tokens by one pass."""
    forward, count = RecordingForward(model), len(tokens)
    positions, plan = torch.arange(count)[None], PackedPlan.from_lengths([count])
    forward(torch.tensor(tokens)[None], position_ids=positions, attention_plan=plan)
    return sorted_routes(forward.routes)


def require_own(engine, completions, prompts):
    for done in completions:
        tokens = [*prompts[done.request_id], *done.token_ids][:-1]
        assert torch.equal(sorted_routes(done.routes), routes_of(engine.model, tokens)), done.request_id


def test_routes_of_groups_are_those_of_one_pass(engine):
    completions = generate(engine, requests(PROMPTS, group_size=2))
    assert {done.finish_reason for done in completions} == {"stop", "length"}
    require_own(engine, completions, PROMPTS)


def test_routes_of_a_turn_include_those_of_the_kept_turn_before(engine):
    first = requests(PROMPTS, new=5, keep=True, total_tokens=120)
    for request in first[:5]:
        engine.submit(request)
    while engine.has_unfinished():
        engine.step()
    prompts = {done.request_id: [*PROMPTS[done.request_id], *done.token_ids, 7, 11] for done in engine.finished()}
    for i, request in enumerate(requests(prompts)):  # half of them groups, which copy what is kept
        engine.submit(Request(request.request_id, request.prompt_ids, request.sampling, 1 + i % 2, (6, i)))
    while engine.has_unfinished():
        engine.step()
    assert engine.reused_tokens > 50
    require_own(engine, engine.finished(), prompts)


@pytest.mark.parametrize("retracts", [False, True])
def test_routes_are_those_with_which_each_token_was_sampled(engine, directory, retracts):
    old = load_causal_lm(directory)
    new = {name: tensor + torch.randn(tensor.shape).mul(0.2) for name, tensor in old.named_parameters()}
    for request in requests(PROMPTS, new=20)[:5]:
        engine.submit(request)
    for _ in range(8):
        engine.step()
    load_weights(engine, new.items(), version=1)
    if retracts:
        engine.retract()
    while engine.has_unfinished():
        engine.step()
    completions, num_mixed = engine.finished(), 0
    for done in completions:
        tokens = [*PROMPTS[done.request_id], *done.token_ids][:-1]
        num_old = len(PROMPTS[done.request_id]) + done.versions.count(0) - 1
        assert torch.equal(sorted_routes(done.routes)[:num_old], routes_of(old, tokens)[:num_old])
        recomputed = routes_of(engine.model, tokens)
        num_mixed += not torch.equal(recomputed[:num_old], sorted_routes(done.routes)[:num_old])
        if retracts:
            assert torch.equal(sorted_routes(done.routes)[num_old:], recomputed[num_old:])
    assert {0, 1} <= {version for done in completions for version in done.versions}
    assert num_mixed
