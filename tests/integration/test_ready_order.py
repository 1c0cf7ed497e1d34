"""Runs with `rollout.order = "ready"`: a batch has the groups that finish next."""

import json
import os
from collections import Counter

import pytest

from hybridflow.observability import read_jsonl

READY = (
    *("trainer.lag=2", "rollout.on_new_weights=retract", "rollout.order=ready", "trainer.deterministic=false"),
    *("algorithm.rollout_weights=token", "trainer.log_samples=100", "data.max_response_length=40"),
    *("placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate", "actor.mini_batch_size=4"),
)
ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.5")

PROGRAM = """
import json, sys, time
from dataclasses import replace
import hybridflow.trainers.role_classes as role_classes
from hybridflow.cli.main import main
from hybridflow.controller.ray.local_cluster import LocalCluster

class OneLongPrompt(role_classes.InFlightRolloutWorker):
    # The responses to the first prompt of batch 0 have 40 tokens, all others 6. The long ones wait for other sequences
    # until the last batch has begun, as if each step of the engine were slow.
    def requests_of(self, prompts, settings):
        def limited(request):
            *_, stream, step, group = request.noise_key
            length = 40 if (stream, step, group) == (0, 0, 0) else 6
            return replace(request, sampling=replace(request.sampling, stop_token_ids=(), max_new_tokens=length))

        return [limited(request) for request in super().requests_of(prompts, settings)]

    def between_steps(self):
        super().between_steps()
        deadline = time.time() + 240
        while self.must_wait() and time.time() < deadline:
            time.sleep(0.005)
            self._turn.hand_over()

    def must_wait(self):
        newest = max([step for *_, step in self._begun._prompts], default=0)
        if self.config.rollout.replay or newest == 5 or list(self._begun._groups._running) != [0]:
            return False
        # not if a batch is complete: the call that holds the turn returns it
        return sum(len(batch.finished) for batch in self._begun._groups._batches.values()) < 8

role_classes.InFlightRolloutWorker = OneLongPrompt
with LocalCluster(4, object_store_bytes=512 * 2**20):
    sys.exit(max(main(arguments) for arguments in json.loads(sys.argv[1])))
"""


@pytest.fixture
def run_with_a_long_prompt(fork_server):
    """Return a function that runs commands in which the responses to one prompt are long."""

    def run(*commands):
        argument_lists = [[str(part) for part in command] for command in commands]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = fork_server.start(["-c", PROGRAM, json.dumps(argument_lists)], environment=environment)
        try:
            out, err = process.communicate()
        finally:
            process.discard()
        assert process.returncode == 0, out[-2000:] + err[-4000:]
        return out + err

    return run


@pytest.mark.ray
@pytest.mark.slow
def test_a_long_prompt_delays_no_batch_and_a_replay_gives_the_same_bits(tiny, task, run_with_a_long_prompt, tmp_path):
    command = ["train", task / "rl.toml", *READY]
    recorded = [*command, *ON_RAY, f"trainer.run_dir={tmp_path}/run"]
    replayed = [*command, f"trainer.run_dir={tmp_path}/replay", f"rollout.replay={tmp_path}/run"]
    log = run_with_a_long_prompt(
        [*recorded, "--stop-after", "4"], recorded, replayed
    )  # the recorded run is resumed once
    assert "sampled with weights at most (late groups: more than) 4 optimizer steps old" in log
    rows, samples = (read_jsonl(tmp_path / "run" / f"{name}.jsonl") for name in ("metrics", "samples"))
    *before, last = rows[1:]
    assert [row["response_length/max"] for row in before] == [6] * 5
    assert [row["ready/late_share"] for row in before] == [0] * 5
    assert max(row["staleness/max"] for row in before) <= 4  # two updates with each step
    assert (last["response_length/max"], last["ready/late_share"], last["staleness/max"]) == (40, 1 / 8, 10)
    compared = {name: value for name, value in last.items() if name.startswith("ready/")}
    assert compared == {
        "ready/late_share": 1 / 8,
        "ready/compared_batches": 1,
        "ready/length_trained": 6,
        "ready/length_begun": (40 + 7 * 6) / 8,
        "ready/tokens_behind": 3 * 34,
    }
    times_used = Counter(sample["rendered_prompt"] for sample in samples)
    assert list(times_used.values()) == [2 * 3] * 24  # three responses in two epochs
    run, replay = (tiny.results_of(tmp_path / name, 6) for name in ("run", "replay"))
    assert replay["actor.safetensors"] == run["actor.safetensors"]
    assert replay["samples"] == run["samples"]
    for name in ("staleness/mean", "ready/late_share", "response_length/mean"):
        values = [[row[name] for row in read_jsonl(tmp_path / n / "metrics.jsonl")[1:]] for n in ("run", "replay")]
        assert values[0] == values[1]
