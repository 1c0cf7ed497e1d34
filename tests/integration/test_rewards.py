"""Tiny runs with failing reward functions, a reward journal, a judge endpoint and built-in rewards."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from hybridflow.observability import read_jsonl

REWARD = """
import os

def number(text):
    return sum(map(ord, text))

def good(data_source, solution_str, ground_truth, extra_info):
    return number(solution_str) % 5

def bad(data_source, solution_str, ground_truth, extra_info):
    if number(solution_str) % 17 == 0:
        while True:
            pass
    if number(solution_str) % 11 == 0:
        os._exit(1)
    if number(solution_str) % 7 == 0:
        raise ValueError("not this one")
    return number(solution_str) % 5
"""


@pytest.fixture
def train(task, tmp_path, hybridflow):
    (tmp_path / "mine.py").write_text(REWARD)

    def run(function, *changes, name="run"):
        return hybridflow(
            *("train", task / "rl.toml", f"trainer.run_dir={tmp_path / name}", "trainer.total_steps=1"),
            *("data.val_files=[]", "trainer.log_samples=24", f"reward.function={tmp_path / 'mine.py'}:{function}"),
            *changes,
        )

    return run


@pytest.fixture
def endpoint():
    """Yield a slow judge server that scores a response by its length; the third request gets status 503."""
    seen = SimpleNamespace(num_served=0, num_requests=0, num_concurrent=0, max_concurrent=0, lock=threading.Lock())

    class Judge(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with seen.lock:
                seen.num_requests += 1
                is_busy = seen.num_requests == 3
                seen.num_served += not is_busy
                seen.num_concurrent += 1
                seen.max_concurrent = max(seen.max_concurrent, seen.num_concurrent)
            time.sleep(0.1)
            with seen.lock:
                seen.num_concurrent -= 1
            reply = f"It is fine.\nScore: {len(request['messages'][-1]['content']) % 11}"
            body = json.dumps({"choices": [{"message": {"content": reply}, "finish_reason": "stop"}]}).encode()
            self.send_response(503 if is_busy else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    seen.url = f"http://127.0.0.1:{server.server_port}"
    yield seen
    server.shutdown()
    server.server_close()


def test_reward_errors_and_timeouts_are_counted_and_other_scores_kept(train, tmp_path):
    changes = ["reward.on_error=zero", "reward.error_score=-1.0", "reward.max_failure_rate=1.0", "reward.timeout_s=0.3"]
    assert train("good", name="good").status == 0
    outcome = train("bad", *changes, name="bad")
    assert outcome.status == 0, outcome.err
    good, bad = ([row["score"] for row in read_jsonl(tmp_path / name / "samples.jsonl")] for name in ("good", "bad"))
    assert len(good) == len(bad) == 24
    assert [b for g, b in zip(good, bad, strict=True) if b != -1.0] == [
        g for g, b in zip(good, bad, strict=True) if b != -1.0
    ]
    (row,) = read_jsonl(tmp_path / "bad" / "metrics.jsonl")
    (clean,) = read_jsonl(tmp_path / "good" / "metrics.jsonl")
    assert row["reward/error_rate"] > 0
    assert row["reward/error_rate"] + row["reward/timeout_rate"] < 0.6
    assert clean["reward/error_rate"] == clean["reward/timeout_rate"] == 0
    assert clean["reward/zero_rate"] > 0
    assert row["reward/zero_rate"] <= clean["reward/zero_rate"]


def test_reward_failure_stops_the_run_and_shows_its_sample(train):
    outcome = train("bad", "reward.timeout_s=0.3")
    assert outcome.status == 1
    assert "reward function bad" in outcome.err
    assert "The sample:" in outcome.err
    assert "ground_truth: {'target'" in outcome.err


def test_too_many_reward_failures_stop_the_run(train):
    outcome = train("bad", "reward.on_error=zero", "reward.timeout_s=0.3", "reward.max_failure_rate=0.01")
    assert outcome.status == 1
    assert "rewards failed, more than reward.max_failure_rate=0.01 allows" in outcome.err


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_scores_do_not_depend_on_the_number_of_reward_processes(train, tmp_path, processes):
    for name, number in (("some", processes), ("two", 2)):
        assert train("good", f"reward.processes={number}", name=name).status == 0
    some, two = (read_jsonl(tmp_path / name / "metrics.jsonl")[0] for name in ("some", "two"))
    assert some["critic/score/mean"] == two["critic/score/mean"]
    assert some["actor/grad_norm"] == two["actor/grad_norm"]


def test_missing_reward_function_is_rejected(train, tmp_path):
    outcome = train("nothing")
    assert outcome.status == 2
    assert "has no function 'nothing'; it has number, good, bad" in outcome.err


COUNTING_REWARD = """
import os, time

HERE = os.path.dirname(__file__)

def score(data_source, solution_str, ground_truth, extra_info):
    '''Return the number of calls so far, a different score each time.'''
    file = os.open(os.path.join(HERE, "calls"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(file, b".")
    num_calls = os.fstat(file).st_size
    os.close(file)
    if num_calls == 40 and not os.path.exists(os.path.join(HERE, "go_on")):
        open(os.path.join(HERE, "waiting"), "w").close()
        time.sleep(60)
    return num_calls
"""


def test_killed_run_reuses_the_rewards_in_its_journal(task, tmp_path, start, hybridflow):
    (tmp_path / "mine.py").write_text(COUNTING_REWARD)
    changes = ["trainer.total_steps=3", "data.val_files=[]", "trainer.log_samples=24", "reward.processes=1"]
    command = ["train", task / "rl.toml", f"trainer.run_dir={tmp_path}/run", *changes]
    command += [f"reward.function={tmp_path}/mine.py:score"]
    killed = start(*command)
    deadline = time.monotonic() + 120
    while not (tmp_path / "waiting").exists():
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.kill()  # in the second step, without a checkpoint
    killed.wait()
    (tmp_path / "go_on").touch()
    first = [row["score"] for row in read_jsonl(tmp_path / "run" / "samples.jsonl") if row["step"] == 1]
    outcome = hybridflow(*command)
    assert outcome.status == 0, outcome.err
    scores = [row["score"] for row in read_jsonl(tmp_path / "run" / "samples.jsonl")]
    assert scores[: len(first)] == first  # of step 1: from the journal, since a new call returns another score
    assert (tmp_path / "calls").stat().st_size == 3 * 24 + 1  # one call was killed before it returned


def test_reward_journal_is_kept_while_a_checkpoint_needs_it(train, tmp_path):
    assert train("good", "trainer.total_steps=6", "trainer.save_every=1", "trainer.keep_checkpoints=2").status == 0
    left = sorted(path.name for path in (tmp_path / "run" / "rewards").iterdir())
    assert left == [f"step_{step:06d}_rank_0.jsonl" for step in (4, 5)]


def test_judge_model_behind_an_endpoint_scores_a_run(task, tmp_path, hybridflow, endpoint):
    outcome = hybridflow(
        *("train", task / "rl.toml", f"trainer.run_dir={tmp_path}/run", "trainer.total_steps=1", "data.val_files=[]"),
        *("reward.function=hybridflow.rewards:judge_reward", "trainer.log_samples=24"),
        f'reward.kwargs={{url = "{endpoint.url}/v1", model = "judge", retries = 2}}',
    )
    assert outcome.status == 0, outcome.err
    scores = {round(row["score"], 6) for row in read_jsonl(tmp_path / "run" / "samples.jsonl")}
    assert scores <= {number / 10 for number in range(11)}
    assert len(scores) > 1
    assert endpoint.num_served == 24
    assert endpoint.max_concurrent > 4  # samples are scored concurrently


def test_data_source_selects_code_and_math_rewards(task, tmp_path, hybridflow):
    from hybridflow.data import prompt_row, write_prompt_file

    rows = [
        prompt_row(data_source="code", prompt="1 2 =>", ground_truth='{"tests": ["assert x"]}', split="train", index=0),
        prompt_row(data_source="math", prompt="1 3 =>", ground_truth="3", split="train", index=1),
        prompt_row(data_source="countdown", prompt="1 => 1", ground_truth="1", split="train", index=2),
    ]
    write_prompt_file(tmp_path / "mixed.parquet", rows[:2])
    outcome = hybridflow(
        *("train", task / "rl.toml", f"trainer.run_dir={tmp_path}/run", "trainer.total_steps=1", "data.val_files=[]"),
        *("reward.function=", f"data.train_files=['{tmp_path}/mixed.parquet']", "data.train_batch_size=2"),
    )
    assert outcome.status == 0, outcome.err
    (row,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert row["reward/error_rate"] == 0
    assert row["reward/passed/mean"] == 0
    assert len(list((tmp_path / "run" / "rewards").iterdir())) == 1


def test_invalid_reward_kwargs_are_rejected(task, hybridflow):
    outcome = hybridflow("train", task / "rl.toml", "reward.function=", 'reward.kwargs={url = "x"}')
    assert "needs reward.function, which is empty" in outcome.err
    outcome = hybridflow("train", task / "rl.toml", 'reward.kwargs={solution_str = "x"}')
    assert "reward.kwargs.solution_str is reserved for the sample" in outcome.err
    outcome = hybridflow("train", task / "rl.toml", "reward.function=hybridflow.rewards:judge_reward")
    assert "missing a required argument: 'url'" in outcome.err
