"""Steps with failing reward functions, a reward journal, a judge endpoint and built-in rewards."""

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
OWN = pytest.mark.own_run("grpo: its rewards fail")


@pytest.fixture
def train(run, tmp_path):
    """Return a function that trains for a step with a function of REWARD."""
    (tmp_path / "mine.py").write_text(REWARD)

    def train(function, *changes, **given):
        function = f"reward.function={tmp_path / 'mine.py'}:{function}"
        return run("trainer.log_samples=24", function, *changes, **given)

    return train


def scores_of(run):
    return [row["score"] for row in read_jsonl(run / "samples.jsonl")]


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


@pytest.mark.runs
@OWN
def test_reward_errors_and_timeouts_are_counted_and_other_scores_kept(train):
    changes = ["reward.on_error=zero", "reward.error_score=-1.0", "reward.timeout_s=0.3", "reward.processes=2"]
    good = train("good", name="good")
    bad = train("bad", *changes, "reward.max_failure_rate=1.0", name="bad")
    pairs = list(zip(scores_of(good), scores_of(bad), strict=True))
    assert len(pairs) == 24
    assert all(b in (g, -1.0) for g, b in pairs)
    (row,), (clean,) = (read_jsonl(directory / "metrics.jsonl") for directory in (bad, good))
    assert row["reward/error_rate"] > 0
    failed = row["reward/error_rate"] + row["reward/timeout_rate"]
    assert failed == pytest.approx(sum(b == -1.0 for _, b in pairs) / 24)
    assert clean["reward/error_rate"] == clean["reward/timeout_rate"] == 0
    assert clean["reward/zero_rate"] == pytest.approx(sum(g == 0 for g, _ in pairs) / 24)
    assert row["reward/zero_rate"] <= clean["reward/zero_rate"]


@pytest.mark.runs
@OWN
def test_reward_failures_stop_the_run_and_show_a_sample(train):
    failing = ("reward.timeout_s=0.3", "reward.processes=2")
    train("bad", *failing, status=1, problem="The sample:")
    problem = "rewards failed, more than reward.max_failure_rate=0.01 allows"
    train("bad", *failing, "reward.on_error=zero", "reward.max_failure_rate=0.01", status=1, problem=problem)
    train("nothing", status=2, problem="has no function 'nothing'; it has number, good, bad", name="absent")


@pytest.mark.runs
@OWN
@pytest.mark.parametrize("processes", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_scores_do_not_depend_on_the_number_of_reward_processes(train, processes):
    none, some = train("good", name="none"), train("good", f"reward.processes={processes}", name="some")
    assert scores_of(none) == scores_of(some)


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
        time.sleep(600)
    return num_calls
"""


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: it is killed")
def test_killed_run_reuses_the_rewards_in_its_journal(task, tmp_path, start, hybridflow):
    (tmp_path / "mine.py").write_text(COUNTING_REWARD)
    changes = ["trainer.total_steps=3", "data.val_files=[]", "trainer.log_samples=24", "reward.processes=1"]
    command = ["train", task / "rl.toml", f"trainer.run_dir={tmp_path}/run", *changes]
    command += [f"reward.function={tmp_path}/mine.py:score"]
    killed = start(*command)
    while not (tmp_path / "waiting").exists():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    killed.kill()  # in the second step, without a checkpoint
    killed.wait()
    (tmp_path / "go_on").touch()
    first = [row["score"] for row in read_jsonl(tmp_path / "run" / "samples.jsonl") if row["step"] == 1]
    outcome = hybridflow(*command)
    assert outcome.status == 0, outcome.err
    assert scores_of(tmp_path / "run")[: len(first)] == first  # from the journal: a new call returns another score
    assert (tmp_path / "calls").stat().st_size == 3 * 24 + 1  # one call was killed before it returned


@pytest.mark.runs
@pytest.mark.own_run("grpo: it keeps two checkpoints")
def test_reward_journal_is_kept_while_a_checkpoint_needs_it(train):
    changes = ("trainer.total_steps=4", "trainer.save_every=1", "trainer.keep_checkpoints=2", "reward.processes=1")
    left = sorted(path.name for path in (train("good", *changes) / "rewards").iterdir())
    assert left == [f"step_{step:06d}_rank_0.jsonl" for step in (2, 3)]


@pytest.mark.runs
@pytest.mark.own_run("grpo: a judge scores it")
def test_judge_model_behind_an_endpoint_scores_a_run(run, endpoint):
    judge = f'reward.kwargs={{url = "{endpoint.url}/v1", model = "judge", retries = 2}}'
    scores = scores_of(run("reward.function=hybridflow.rewards:judge_reward", "trainer.log_samples=24", judge))
    assert {round(score, 6) for score in scores} <= {number / 10 for number in range(11)}
    assert len(set(scores)) > 1
    assert endpoint.num_served == 24
    assert endpoint.max_concurrent > 4  # samples are scored concurrently


@pytest.mark.runs
@pytest.mark.own_run("grpo: it runs code")
def test_data_source_selects_code_and_math_rewards(run, tmp_path):
    from hybridflow.data import prompt_row, write_prompt_file

    rows = [
        prompt_row(data_source="code", prompt="1 2 =>", ground_truth='{"tests": ["assert x"]}', split="train", index=0),
        prompt_row(data_source="math", prompt="1 3 =>", ground_truth="3", split="train", index=1),
    ]
    write_prompt_file(tmp_path / "mixed.parquet", rows)
    files = (f"data.train_files=['{tmp_path}/mixed.parquet']", "data.train_batch_size=2")
    directory = run("reward.function=", *files, "reward.processes=1")
    (row,) = read_jsonl(directory / "metrics.jsonl")
    assert row["reward/error_rate"] == 0
    assert row["reward/passed/mean"] == 0
    assert len(list((directory / "rewards").iterdir())) == 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (("reward.function=", 'reward.kwargs={url = "x"}'), "needs reward.function, which is empty"),
        (('reward.kwargs={solution_str = "x"}',), "reward.kwargs.solution_str is reserved for the sample"),
        (("reward.function=hybridflow.rewards:judge_reward",), "missing a required argument: 'url'"),
    ],
)
def test_invalid_reward_kwargs_are_rejected(refuse, changes, problem):
    assert problem in refuse(*changes, "reward.processes=0")
