"""A generating worker whose running sequences go on with new weights, called from two threads as on Ray."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from hybridflow.errors import HybridFlowError, RolloutError, WeightSyncError
from hybridflow.protocol import DataProto
from hybridflow.workers import ActorWorker, InFlightRolloutWorker

LONG_S = 240
LEN, GROUP = 24, 2


def prompts_of(step: int, size: int = 2) -> DataProto:
    ids = torch.tensor([[5, 6, 7 + i] for i in range(size)])
    columns = {"prompts": ids, "prompt_mask": torch.ones_like(ids, dtype=torch.bool), "group_ids": torch.arange(size)}
    return DataProto.from_dict(columns, meta_info={"noise_key": [0, 0, step]})


def columns_of_a_dataset(prompts: DataProto) -> DataProto:
    """Return the prompts with the other columns of a dataset, which come back with parts."""
    names = ("raw_prompts", "prompt_texts", "data_sources", "ground_truths", "extra_infos")
    return prompts.union(DataProto.from_dict({}, {name: np.array(["a"] * len(prompts), object) for name in names}))


def in_thread(function, *args):
    """Call a function in another thread; return a function that waits for its result or its error."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args)
    pool.shutdown(wait=False)
    return partial(future.result, LONG_S)


class Pair:
    """A sender and a generating worker. Before the steps in `holds` the engine waits for `resume`."""

    def __init__(self, config):
        self.sender, self.worker = ActorWorker(config), InFlightRolloutWorker(config)
        self.steps, self.holds = 0, set()
        self.reached, self.go = threading.Semaphore(0), threading.Semaphore(0)
        step = self.worker.rollout.step

        def counted():
            if self.steps in self.holds:
                self.reached.release()
                assert self.go.acquire(timeout=LONG_S)
            self.steps += 1
            step()

        self.worker.rollout.step = counted

    def begin(self, prompts):
        begun = self.worker.begin_sequences(prompts)
        begun.meta_info |= prompts.meta_info
        return begun

    def generate(self, prompts):
        return self.worker.finish_sequences(self.begin(prompts))

    def between_steps(self, function, *args):
        """Call a function in another thread while the engine holds before a step; let that step run first."""
        assert self.reached.acquire(timeout=LONG_S)
        result = in_thread(function, *args)
        while not self.worker._engine_lock._num_asking:
            threading.Event().wait(0.001)
        self.go.release()
        return result

    def sync(self, version, shift=0.0, breaks=""):
        """Send the weights, all of them larger by `shift`, as a version; `breaks` names the step that fails."""
        engine = self.sender.engine
        engine.num_updates = version
        with torch.no_grad():
            for parameter in engine.parameters.values():
                parameter += shift
        sender, receiver = self.sender, self.worker
        announced = sender.announce_weights()
        receiver.start_receiving(replace(announced, specs=announced.specs[breaks == "start" :]))
        for _ in range(announced.num_buckets - (breaks == "finish")):
            sent, contents = sender.send_bucket()
            if breaks == "receive":
                contents = contents ^ 1
            receiver.receive_bucket((sent, contents))
        receiver.finish_receiving()
        probe = sender.compute_probe()
        if breaks == "check":
            probe = replace(probe, log_probs=[[value - 1 for value in row] for row in probe.log_probs])
        return receiver.check_weights(probe)


@pytest.fixture
def pair(configure):
    """Return a function that builds a pair with the weights of version 0."""

    def build(*more):
        common = ["trainer.lag=2", "algorithm.rollout_weights=token", "model.dtype=float64"]
        sizes = [f"data.max_response_length={LEN}", f"rollout.group_size={GROUP}", "rollout.sync_bucket_bytes=20000"]
        built = Pair(configure(*common, *sizes, "rollout.on_new_weights=retract", *more))
        built.sync(0)
        return built

    return build


def test_weights_are_loaded_between_two_steps_of_a_running_batch(pair):
    both = pair()
    before = both.generate(prompts_of(1)).batch
    both.steps, both.holds = 0, {0, 4}
    rows = in_thread(both.worker.finish_sequences, both.begin(prompts_of(1)))
    first = both.between_steps(both.sync, 1, 0.02)
    second = both.between_steps(both.sync, 2, 0.02)  # two syncs while one batch runs
    assert first()["weight_sync/probe_diff_max"] < 1e-9
    assert second()["weight_sync/probe_diff_max"] < 1e-9
    found = rows().batch
    for index, versions in enumerate(found["rollout_versions"].tolist()):
        length = int(found["response_mask"][index].sum())
        assert versions[:length] == ([0] + [1] * 4 + [2] * LEN)[:length]
    assert found["response_mask"].sum(1).max() > 8
    assert torch.equal(found["responses"][:, 0], before["responses"][:, 0])
    assert not torch.equal(found["rollout_log_probs"][:, 1:5], before["rollout_log_probs"][:, 1:5])
    assert both.generate(prompts_of(2)).batch["rollout_versions"].max() == 2


def test_steps_of_a_probe_compute_no_token_with_keys_of_older_weights(pair):
    both, found = pair(), []
    engine, log_probs = both.worker.rollout, both.worker.rollout.log_probs
    for advances in (False, True):  # True: as vLLM does
        engine.log_probs = lambda sequences, a=advances: (a and type(engine).step(engine), log_probs(sequences))[1]
        both.steps, both.holds = 0, {3}
        rows = in_thread(both.worker.finish_sequences, both.begin(prompts_of(1)))
        both.between_steps(both.sync, 1, 0.02)()
        found.append(rows().batch)
        engine.log_probs = log_probs
        both.sync(0, -0.02)
    assert torch.equal(found[0]["responses"], found[1]["responses"])
    torch.testing.assert_close(found[0]["rollout_log_probs"], found[1]["rollout_log_probs"])


def test_batches_begin_while_others_run_and_get_the_tokens_of_batches_alone(pair):
    both = pair()
    alone = [both.generate(prompts_of(step, size)) for step, size in ((1, 2), (2, 3))]
    both.steps, both.holds = 0, {3}
    first = in_thread(both.worker.finish_sequences, both.begin(prompts_of(1)))
    begun = both.between_steps(both.begin, prompts_of(2, 3))()
    beside = [first(), both.worker.finish_sequences(begun)]
    for rows, expected in zip(beside, alone, strict=True):
        assert torch.equal(rows.batch["responses"], expected.batch["responses"])
        assert torch.equal(
            rows.batch["prompts"] if "prompts" in rows.batch else rows.batch["input_ids"][:, :3],
            expected.batch["input_ids"][:, :3],
        )


def test_parts_of_a_running_batch_get_the_weights_that_come_before_them(pair):
    both = pair("trainer.stream=true")
    whole = both.generate(columns_of_a_dataset(prompts_of(1, 3)))
    both.steps, both.holds = 0, {4}
    begun = both.begin(columns_of_a_dataset(prompts_of(1, 3)))
    first = in_thread(both.worker.next_sequences, begun.slice(0, 1))
    both.between_steps(both.sync, 1, 0.02)()
    parts = [first(), both.worker.next_sequences(begun.slice(0, 2))]
    rows = {int(group): part for part in parts for group in part.batch["group_ids"].unique()}
    assert sorted(rows) == [0, 1, 2]
    for group in range(3):
        part = rows[group].select_idxs((rows[group].batch["group_ids"] == group).nonzero().flatten().tolist())
        expected = whole.select_idxs(list(range(GROUP * group, GROUP * group + GROUP)))
        assert torch.equal(part.batch["responses"][:, :5], expected.batch["responses"][:, :5])
        for versions, mask in zip(part.batch["rollout_versions"], part.batch["response_mask"], strict=True):
            assert versions[mask.bool()].tolist() == ([0] * 5 + [1] * LEN)[: int(mask.sum())]


def without_tokens(step):
    prompts = prompts_of(step)
    prompts.batch["prompt_mask"][1] = False
    return prompts


@pytest.mark.parametrize(
    ("breaks", "message", "goes_on"),
    [
        ("receive", "changed in transit", False),
        ("finish", "announced weights were not received", False),
        ("check", "log-probs of the probe differ", False),
        ("start", "weights", True),
        ("begin", "empty prompt", True),
    ],
)
def test_a_failed_sync_ends_the_running_batch_if_it_has_changed_weights(pair, breaks, message, goes_on):
    both = pair()
    alone = both.generate(prompts_of(1))
    both.steps, both.holds = 0, {2}
    rows = in_thread(both.worker.finish_sequences, both.begin(prompts_of(1)))
    call = (both.begin, without_tokens(2)) if breaks == "begin" else (both.sync, 1, 0.0 if goes_on else 0.02, breaks)
    failed = both.between_steps(*call)
    with pytest.raises(HybridFlowError if goes_on else WeightSyncError, match=message):
        failed()
    if goes_on:
        assert torch.equal(rows().batch["responses"], alone.batch["responses"])
    else:
        with pytest.raises(RolloutError, match="no weights to generate with"):
            rows()
    assert both.sync(2)["weight_sync/probe_diff_max"] < 1e-9  # the turn was given back
    assert both.generate(prompts_of(3)).batch["rollout_versions"].max() == 2


def test_an_error_after_the_load_reaches_its_caller_and_generation_goes_on(pair, monkeypatch):
    both = pair()
    both.holds = {2}
    rows = in_thread(both.worker.finish_sequences, both.begin(prompts_of(1)))
    monkeypatch.setattr(both.worker.rollout, "retract", lambda: (_ for _ in ()).throw(RolloutError("out of memory")))
    failed = both.between_steps(both.sync, 1, 0.02)
    with pytest.raises(RolloutError, match="out of memory"):
        failed()
    assert rows().batch["rollout_versions"].max() == 1


def test_two_loads_before_the_same_step_give_tokens_of_the_second(pair):
    both = pair()
    both.holds = {2}
    rows = in_thread(both.worker.finish_sequences, both.begin(prompts_of(1)))

    turn = both.worker._engine_lock

    def sync_twice():
        turn._num_asking += 1  # the second sync asks before the first one ends
        both.sync(1, 0.02)
        both.sync(2, 0.02)
        with turn._condition:
            turn._num_asking -= 1
            turn._condition.notify_all()

    both.between_steps(sync_twice)()
    for versions, mask in zip(*(rows().batch[name] for name in ("rollout_versions", "response_mask")), strict=True):
        assert versions[mask.bool()].tolist() == ([0] * 3 + [2] * LEN)[: int(mask.sum())]
    assert [row["engine_steps"] for row in both.worker.take_schedule()] == [None, None, 3, 0]


def test_no_step_runs_while_a_sync_is_not_complete(pair):
    both = pair()
    both.holds = {2}
    rows = in_thread(both.worker.finish_sequences, both.begin(prompts_of(1)))
    announced = both.sender.announce_weights()
    both.between_steps(both.worker.start_receiving, announced)()
    steps = both.steps
    threading.Event().wait(0.1)
    assert both.steps == steps == 3
    both.sync(0)
    assert rows().batch["rollout_versions"].max() == 0
