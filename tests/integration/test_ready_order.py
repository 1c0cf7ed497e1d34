"""Runs with `rollout.order = "ready"`: a batch has the groups that finish next."""

import json
import os

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
import hybridflow.trainers.program as program
from hybridflow.cli.main import main
from hybridflow.controller.ray.local_cluster import LocalCluster

class OneLongPrompt(program.InFlightRolloutWorker):
    # The responses to the first prompt of batch 0 have 40 tokens, all others at most 6. They wait for the weights of
    # the third step, as if a step of the engine were slow.
    def requests_of(self, prompts, settings):
        def limited(request):
            *_, stream, step, group = request.noise_key
            if (stream, step, group) == (0, 0, 0):
                return replace(request, sampling=replace(request.sampling, stop_token_ids=()))
            return replace(request, sampling=replace(request.sampling, max_new_tokens=6))

        return [limited(request) for request in super().requests_of(prompts, settings)]

    def between_steps(self):
        deadline = time.time() + 120
        while not self.config.rollout.replay and self.runs_alone() and time.time() < deadline:
            if self._turn._num_asking:
                break
            time.sleep(0.005)
        super().between_steps()

    def runs_alone(self):
        return self.rollout.version < 4 and list(self._begun._groups._running) == [0]

program.InFlightRolloutWorker = OneLongPrompt
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

    return run


@pytest.mark.ray
@pytest.mark.slow
def test_a_long_prompt_delays_no_batch_and_a_replay_gives_the_same_bits(tiny, task, run_with_a_long_prompt, tmp_path):
    command = ["train", task / "rl.toml", *READY]
    recorded = [*command, *ON_RAY, f"trainer.run_dir={tmp_path}/run"]
    replayed = [*command, f"trainer.run_dir={tmp_path}/replay", f"rollout.replay={tmp_path}/run"]
    run_with_a_long_prompt([*recorded, "--stop-after", "5"], recorded, replayed)  # the recorded run is resumed once
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]
    print(
        [{k: v for k, v in row.items() if k.startswith(("ready/", "staleness/m", "response_length"))} for row in rows]
    )
    run, replay = (tiny.results_of(tmp_path / name, 6) for name in ("run", "replay"))
    assert replay["actor.safetensors"] == run["actor.safetensors"]
    assert replay["samples"] == run["samples"]
