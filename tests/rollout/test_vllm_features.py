"""vLLM with fp8 weights and with speculative decoding: log-probs, seeds, syncs, and what a build cannot do."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fixtures.families import write_family
from fixtures.quantized import FP8, MXFP4, quantize
from fixtures.rollouts import EOS, Letters, require_as_computed, require_equal, stock_model
from hybridflow.config import LoRAConfig
from hybridflow.errors import RolloutConfigError
from hybridflow.models.loading import load_causal_lm
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.rollout.vllm.arguments import EngineOptions, engine_arguments

pytestmark = pytest.mark.vllm

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
WITH_MODEL = {"num_speculative_tokens": 3}
REPEATED = [5, 6, 7, 5, 6, 7, 5, 6]


def build(path, **options):
    from fixtures.vllm_engines import lend_engine

    return lend_engine(path, **options)


def mend():
    """Mend vLLM's build for CPUs, which does not repeat temperatures of requests for their drafts."""
    from vllm.v1.sample import rejection_sampler

    def expand(output, values, ends, replaced, by):
        repeats = torch.diff(ends.long(), prepend=torch.zeros(1, dtype=torch.long))
        output.copy_(torch.where(values == replaced, by, values).repeat_interleave(repeats))

    expand.register_warmup = lambda: None
    rejection_sampler._expand = expand


def check_drafts(path):
    from hybridflow.rollout.vllm.process import require_right_temperatures

    plain, stock = build(path, tokenizer=Letters()), stock_model(path)
    with pytest.raises(RolloutConfigError, match=r"rollout\.speculative is not supported by this build of vLLM for C"):
        require_right_temperatures()
    mend()
    for speculative in (WITH_MODEL | {"model": str(path)}, NGRAM):  # with NGRAM last: no engine can be built afterwards
        engine = build(path, speculative=speculative, tokenizer=Letters())
        require_right_samples(engine, plain, stock)
        stops = SamplingParams(40, temperature=0, stop_strings=("a", "cb"), stop_token_ids=(EOS,))
        wanted = [Request(i, [*REPEATED, 8 + i], stops) for i in range(8)]
        expected = generate(plain, wanted)
        require_equal(generate(engine, wanted), expected, 1e-4)
        assert {c.finish_reason for c in expected} == {"stop"}


def require_right_samples(engine, plain, stock):
    """Require log-probs of the model, samples by seeds alone, greedy tokens as without drafts, and fewer steps."""
    ways = (
        SamplingParams(30),
        SamplingParams(30, temperature=0.7, top_k=12, top_p=0.9),
        SamplingParams(30, temperature=0),
    )
    wanted = [Request(i, REPEATED, sampling, 3, (7, i)) for i, sampling in enumerate(ways)]
    done = generate(engine, wanted)
    for completion in done:
        request = wanted[completion.request_id]
        require_as_computed(lambda version: stock, request, completion, noise=False, tolerance=1e-4)
    require_equal(generate(engine, wanted), done, 1e-4)
    require_equal(generate(engine, wanted[1:2]), [c for c in done if c.request_id == 1], 1e-4)
    require_equal(generate(plain, wanted[2:]), [c for c in done if c.request_id == 2], 1e-4)
    engine.submit(wanted[2])
    steps = 0
    while engine.has_unfinished():
        engine.step()
        steps += 1
    engine.finished()
    assert steps < 29


@pytest.mark.exhaustive
def test_drafts_change_neither_the_distribution_nor_the_log_probs(tiny_model):
    # in a process of its own: once n-gram drafts have loaded numba, vLLM's build for CPUs starts no further engine
    program = "import sys; sys.path.append(sys.argv[1])\nfrom rollout.test_vllm_features import check_drafts\n"
    program += "from pathlib import Path; check_drafts(Path(sys.argv[2]))"
    command = [sys.executable, "-c", program, str(Path(__file__).parents[1]), str(tiny_model("qwen2"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_fp8_weights_are_quantized_again_at_each_load(tiny_model):
    sequences = [[3, 9, 12, 7, 38, 22, 4], [8, 1, 30]]
    models = [load_causal_lm(tiny_model("qwen2", seed=seed), torch.bfloat16) for seed in (0, 1)]
    engine = build(tiny_model("qwen2"), dtype="bfloat16", quantization="fp8", weights=False)
    found = []
    for version, model in enumerate((*models, models[0])):
        load_weights(engine, model.named_parameters(), version)
        engine.boxes_to_load()
        found.append(engine.log_probs(sequences))
        exact = EmbeddedRollout(model).log_probs(sequences)
        assert found[-1] != exact
        for ours, theirs in zip(found[-1], exact, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.2, atol=0.5)
    assert found[0] == found[2] != found[1]


def test_an_engine_has_the_dequantized_weights_of_a_quantized_directory(tiny_model, tmp_path):
    path = quantize(shutil.copytree(tiny_model("qwen3"), tmp_path / "model"), FP8)
    sequences = [[3, 9, 12, 7, 38, 22, 4], [8, 1, 30]]
    ours = EmbeddedRollout(load_causal_lm(path)).log_probs(sequences)
    for of_engine, expected in zip(build(path).log_probs(sequences), ours, strict=True):
        torch.testing.assert_close(of_engine, expected, rtol=1e-4, atol=1e-4)
    for options, feature in (
        ({"adapters": LoRAConfig(rank=8)}, "merge_adapters=false"),
        ({"speculative": WITH_MODEL | {"model": str(path)}}, "speculative.model"),
    ):
        with pytest.raises(RolloutConfigError, match=rf"rollout\.{feature} is not supported with quantized weights"):
            build(path, **options)
    from vllm import EngineArgs

    path = quantize(write_family(tmp_path / "mxfp4", "gpt_oss", intermediate_size=64, head_dim=32), MXFP4)
    config = EngineArgs(**engine_arguments(EngineOptions(str(path), max_model_len=64), on_gpu=False))
    assert config.create_engine_config().quant_config is None  # vLLM's build for CPUs does not compute this family
