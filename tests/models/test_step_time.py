from dataclasses import replace

import pytest

from hybridflow.models.model_sizes import DecoderShape, ModelSizes, forward_flops
from hybridflow.models.step_time import LINK_BANDWIDTH, READ_BANDWIDTH, UPDATE_FLOPS, StepSizes, step_seconds

SHAPE = DecoderShape(2, 8, 16, 2, 1, 100)
MODEL = ModelSizes(SHAPE, layer=500, embedding=800, head=800)
ONE = StepSizes(4, 2, 10, 20, trainers=1, engines=1, micro_batch=64)


def test_a_step_on_one_gpu_is_its_flops_and_the_bytes_that_decoding_reads():
    found = step_seconds(MODEL, ONE)
    weights, cache = 2 * MODEL.parameters, 8 * 20 * 2 * 2 * 2 * 4
    prompts = 4 * forward_flops(SHAPE, [10]) / UPDATE_FLOPS
    assert found.generation == pytest.approx(20 * (weights + cache) / (0.15 * READ_BANDWIDTH) + prompts)
    assert found.update == pytest.approx(3 * 8 * forward_flops(SHAPE, [30]) / UPDATE_FLOPS)
    assert (found.log_probs, found.sync) == (0, 0)
    again = step_seconds(MODEL, replace(ONE, forwards=1, epochs=2, recomputes=True, running=4))
    assert again.log_probs == pytest.approx(found.update / 3)
    assert again.update == pytest.approx(2 * 4 / 3 * found.update)
    assert again.generation > found.generation  # the weights are read twice as often


def test_ranks_share_the_work_and_weights_pass_their_links():
    found = step_seconds(MODEL, replace(ONE, trainers=8, engines=2, backend="vllm", engine_ranks=4))
    of_link = 2 * MODEL.parameters / LINK_BANDWIDTH
    assert found.update == pytest.approx(3 * of_link)  # one micro-batch, whose products take less time
    assert found.sync == pytest.approx(of_link / 4)
    slow = step_seconds(replace(MODEL, shape=replace(SHAPE, intermediate_size=2**30)), replace(ONE, trainers=8))
    whole = step_seconds(replace(MODEL, shape=replace(SHAPE, intermediate_size=2**30)), ONE)
    assert slow.update == pytest.approx(whole.update / 8)
