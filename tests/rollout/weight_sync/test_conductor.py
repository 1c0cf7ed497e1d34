import os
import signal
import time
from pathlib import Path

import pytest
import torch

from hybridflow.config import load_config
from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, WorkerGroup, register
from hybridflow.errors import RolloutError, WeightSyncError, WorkerDiedError
from hybridflow.protocol import DataProto
from hybridflow.rollout.weight_sync.conductor import BetweenPools
from hybridflow.rollout.weight_sync.disk import Disk
from hybridflow.rollout.weight_sync.ipc import Ipc
from hybridflow.rollout.weight_sync.receiver import RECEIVING, ReceivesWeights
from hybridflow.rollout.weight_sync.sender import SENDING, SendsWeights
from hybridflow.runtime.observe.timing import STAGES, WEIGHT_SYNC
from hybridflow.workers import ActorWorker, InFlightRolloutWorker, RolloutWorker

LONG_S = 240


def prompts():
    columns = {"prompts": [[5, 6, 7]], "prompt_mask": [[True] * 3], "group_ids": [0]}
    tensors = {name: torch.tensor(rows) for name, rows in columns.items()}
    return DataProto.from_dict(tensors, meta_info={"noise_key": [0, 0, 0]})


@pytest.fixture
def pools(tiny_model, tmp_path, restores_the_process):
    def build(transport):
        overrides = [f"model.path={tiny_model()}", "controller.threads=1", "rollout.sync_bucket_bytes=2000"]
        overrides += ["data.max_response_length=6", "memory.max_tokens_per_micro_batch=1024"]
        overrides += [f"rollout.weight_sync={transport}", f"trainer.run_dir={tmp_path}"]
        config = load_config(None, overrides)
        learn = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(ActorWorker, config=config))
        meshes = {"rollout": {"data": 2, "tensor": 1}}
        generate = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(RolloutWorker, config=config), meshes=meshes)
        return learn, generate

    return build


@pytest.mark.parametrize("transport", ["object_store", "disk", "ipc"])
def test_a_version_is_sent_once_and_log_probs_agree(pools, transport, tmp_path):
    learn, generate = pools(transport)
    sync = BetweenPools(learn, generate)
    metrics = sync()
    assert metrics["weight_sync/bytes"] > 2 * 2000
    assert metrics["weight_sync/probe_diff_max"] < 1e-5
    assert sync() == {}
    assert not (tmp_path / "weight_sync").exists()
    rollouts = generate.generate_greedy_sequences(prompts())
    computed = learn.compute_log_probs(rollouts).batch["old_log_probs"]
    torch.testing.assert_close(computed, rollouts.batch["rollout_log_probs"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("transport", [Disk, Ipc])
def test_a_failed_sync_is_repeated(pools, monkeypatch, transport):
    def failing(self, sent):
        raise WeightSyncError("the disk is gone")

    learn, generate = pools(transport.__name__.lower())
    with pytest.raises(RolloutError, match="the rollout engine has no weights yet; sync weights before generating"):
        generate.generate_greedy_sequences(prompts())
    sync = BetweenPools(learn, generate)
    with monkeypatch.context() as patch:
        patch.setattr(transport, "receive", failing)
        with pytest.raises(WeightSyncError, match="the disk is gone"):
            sync()
    learn.abandon_step()
    assert sync()["weight_sync/bytes"] > 0


class Learner(ActorWorker):
    @register(Dispatch.ONE_TO_ALL)
    def set_version(self, version):
        with torch.no_grad():
            for parameter in self.engine.parameters.values():
                parameter += 0.01
        self.engine.num_updates = version

    @register(Dispatch.ONE_TO_ALL)
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Gated(RolloutWorker):
    """A worker whose generation waits for a file, and whose second sync receives a changed weight."""

    num_syncs = 0

    @register(Dispatch.ONE_TO_ALL)
    def wait_for(self, path):
        for _ in range(100 * LONG_S):
            if Path(path).exists():
                return
            time.sleep(0.01)
        raise TimeoutError(path)

    @register(Dispatch.ONE_TO_ALL)
    def start_receiving(self, announced):
        self.num_syncs += 1
        super().start_receiving(announced)

    @register(Dispatch.ONE_TO_ALL)
    def receive_bucket(self, sent):
        description, contents = sent
        super().receive_bucket((description, contents ^ 1 if self.num_syncs == 2 else contents))


@pytest.mark.ray
@pytest.mark.own_run("ray: workers whose sync is late or fails")
def test_training_does_not_wait_for_a_sync_whose_error_is_raised_later(tiny_model, tmp_path, ray_backend):
    overrides = [f"model.path={tiny_model()}", "controller.threads=1", f"trainer.run_dir={tmp_path}"]
    config = load_config(None, overrides)
    learn = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Learner, config=config), ray_backend, "learn")
    generate = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Gated, config=config), ray_backend, "generate")
    with learn, generate:
        sync = BetweenPools(learn, generate, num_ahead=2)
        assert sorted(sync()) == ["timing_s/weight_sync", "weight_sync/bytes"]
        generate.execute_all_async("wait_for", f"{tmp_path}/go")
        for version in (1, 2):
            learn.set_version(version)
            assert set(sync()) == {"weight_sync/bytes", "timing_s/weight_sync"}  # although the engine is busy
        (tmp_path / "go").touch()
        learn.set_version(3)
        with pytest.raises(WeightSyncError, match="changed in transit"):
            sync()  # the third call waits for the first that was not waited for
        assert sync.finish() == {}
        assert sync()["weight_sync/bytes"] > 0  # sent again
        assert sync.finish()["weight_sync/probe_diff_max"] < 1e-4


class FailsOnce(RolloutWorker):
    """A worker that raises an error at its second bucket."""

    num_buckets = 0

    @register(Dispatch.ONE_TO_ALL)
    def receive_bucket(self, sent):
        self.num_buckets += 1
        if self.num_buckets == 2:
            raise WeightSyncError("planted")
        super().receive_bucket(sent)


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("ray: a worker that fails in a broadcast")
def test_the_same_processes_connect_anew_after_a_failed_broadcast(tiny_model, tmp_path, ray_backend):
    overrides = [f"model.path={tiny_model()}", "controller.threads=1", f"trainer.run_dir={tmp_path}"]
    config = load_config(None, [*overrides, "rollout.weight_sync=broadcast", "rollout.sync_bucket_bytes=20000"])
    learn = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(ActorWorker, config=config), ray_backend, "learn")
    classes, meshes = ClassWithInitArgs(FailsOnce, config=config), {"rollout": {"data": 2, "tensor": 1}}
    generate = WorkerGroup(ResourcePool([2]), classes, ray_backend, "generate", meshes)
    with learn, generate:
        sync = BetweenPools(learn, generate)
        with pytest.raises(WeightSyncError, match="planted"):
            sync()
        for group in (learn, generate):
            group.abandon_step()
        assert sync()["weight_sync/probe_diff_max"] < 1e-5


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.own_run("ray: a worker that dies in a sync")
@pytest.mark.parametrize("dying", ["learn", "generate"])
def test_a_process_that_dies_in_a_sync_in_flight_ends_the_run_with_its_error(tiny_model, tmp_path, ray_backend, dying):
    overrides = [f"model.path={tiny_model()}", "controller.threads=1", f"trainer.run_dir={tmp_path}", "trainer.lag=1"]
    overrides += ["algorithm.rollout_weights=token", "rollout.on_new_weights=retract", "data.max_response_length=6"]
    config = load_config(None, overrides)
    learn = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Learner, config=config), ray_backend, "learn")
    classes, mesh = ClassWithInitArgs(MortalInFlight, config=config), {"rollout": {"data": 1, "tensor": 1}}
    generate = WorkerGroup(ResourcePool([1]), classes, ray_backend, "generate", mesh)
    with learn, generate:
        BetweenPools(learn, generate)()
        announced = learn.announce_weights()[0]
        generate.start_receiving(announced)  # the engine takes no step from here on
        waiting = generate.execute_all_async("begin_sequences", prompts())
        {"learn": learn, "generate": generate}[dying].execute_all_async("die")

        def send_all():
            for _ in range(announced.num_buckets):
                (sent,) = learn.send_bucket()
                generate.receive_bucket(sent)
            ray_backend.wait(waiting)

        with pytest.raises(WorkerDiedError, match=f"worker {dying}/0 .*died before"):
            send_all()


class MortalInFlight(InFlightRolloutWorker):
    @register(Dispatch.ONE_TO_ALL)
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_stages_name_the_calls_of_a_sync():
    assert {method for method, stage in STAGES.items() if stage in WEIGHT_SYNC} == {
        *SENDING,
        *RECEIVING,
        "sync_weights",
    }
    assert InFlightRolloutWorker.second_thread_methods > RECEIVING
    assert all(hasattr(SendsWeights, name) for name in SENDING)
    assert all(hasattr(ReceivesWeights, name) for name in RECEIVING)
