import json
import os
from pathlib import Path

import numpy as np
import pytest

from hybridflow.environments.processes.arguments import LoadedReward
from hybridflow.environments.rewards import Outcome, RewardRunner, RewardScorer, in_rank, load_reward_function
from hybridflow.environments.rewards.journal import RewardJournal
from hybridflow.errors import RewardError

FUNCTION = """
from pathlib import Path
ASKED = Path(__file__).with_name("asked")
def score(data_source, solution_str, ground_truth, extra_info):
    ASKED.write_text((ASKED.read_text() if ASKED.exists() else "") + solution_str + " ")
    if solution_str == "bad":
        raise ValueError("no")
    asked = ASKED.read_text().split()
    return {"score": len(asked), "answer": solution_str}

def all_at_once(data_sources, solution_strs, ground_truths, extra_infos):
    return [score(None, text, None, None) for text in solution_strs]
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    return tmp_path


class _Caller:
    """A stand-in for a RewardRunner, which calls the function of a file in this process."""

    def __init__(self, name):
        self.name = name
        self._reward = LoadedReward(load_reward_function(name), {}, source=Path(name.rpartition(":")[0]).read_text())
        self.kind = self._reward.kind

    def start(self):
        pass

    def submit(self, samples, on_outcome):
        outcomes = in_rank._call_each(self._reward, [sample for _, sample in samples], 1)
        for number, outcome in enumerate(outcomes):
            on_outcome(number, outcome)
        return outcomes

    def wait(self, submitted):
        return submitted


@pytest.fixture
def scorer(place):
    """Return a builder of scorers with a new journal in `place`, as at the start of a run; `asked` lists all calls."""

    def build(function="score", *, rank=0, **settings):
        runner = _Caller(f"{place}/mine.py:{function}")
        failures = settings.get("on_error") == "zero"
        journal = RewardJournal(place / "rewards", rank, [runner.name, runner.kind.source], failures=failures)
        return RewardScorer(runner=runner, journal=journal, max_failure_rate=1.0, **settings)

    return build


def test_outcomes_are_known_wherever_files_are_named_from(tmp_path):
    def known(*identity):
        journal = RewardJournal(tmp_path, 0, [*identity, "source"], failures=False)
        journal.open(1)
        call = journal.call({"answer": 1}, None)
        journal.write(call, Outcome(1.0), is_answer=True)
        return call.known is not None

    assert not known("mine.py:score", {"prompt_file": "judge.txt"})
    assert known("/a/b/mine.py:score", {"prompt_file": "/a/b/judge.txt"})
    assert not known("mine.py:other", {"prompt_file": "judge.txt"})
    assert not known("harbor:tasks?sandbox=mine.py:Box", {"path": "a/x"})
    assert known("harbor:/a/tasks?sandbox=/a/mine.py:Box", {"path": "a/x"})
    assert not known("harbor:tasks?sandbox=mine.py:Box", {"path": "b/x"})


def asked(place):
    file = place / "asked"
    return file.read_text().split() if file.exists() else []


def score(scorer, texts, step=0):
    return scorer.score(texts, ["d"] * len(texts), [None] * len(texts), step=step)


def test_outcomes_are_written_for_the_step_in_which_their_rows_began(place, scorer):
    scores = scorer()
    begun = [scores.begin([text], ["d"], [None], None, None, step=step) for step, text in enumerate(["one", "two"])]
    results = [wait() for wait in begun]
    rows = [(place / f"rewards/step_{step:06d}_rank_0.jsonl").read_text() for step in range(2)]
    assert [row.count("key") for row in rows] == [1, 1]
    again = scorer()
    for step, text in enumerate(["one", "two"]):
        assert score(again, [text], step).scores.tolist() == results[step].scores.tolist()
    assert asked(place) == ["one", "two"]


def test_another_step_and_a_changed_function_are_called_again(place, scorer):
    one = scorer()
    assert score(one, ["a"], step=0).scores.tolist() == [1]
    assert score(one, ["a"], step=1).scores.tolist() == [2]
    assert score(scorer(), ["a"], step=1).scores.tolist() == [2]
    assert asked(place) == ["a", "a"]
    (place / "mine.py").write_text(FUNCTION + "\n# fixed\n")
    score(scorer(), ["a"], step=1)
    assert asked(place) == ["a", "a", "a"]


def test_outcomes_written_before_a_kill_are_reused(place, scorer):
    score(scorer(), ["a", "b", "c"])
    file = next((place / "rewards").iterdir())
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1] + lines[2][:20])  # the third is incomplete
    assert score(scorer(), ["a", "b", "c"]).scores.tolist() == [1, 2, 4]
    assert score(scorer(), ["a", "b", "c"]).scores.tolist() == [1, 2, 4]
    assert asked(place) == ["a", "b", "c", "c"]


@pytest.mark.parametrize("function", ["score", "all_at_once"])
def test_failures_are_kept_only_with_on_error_zero(place, scorer, function):
    for _ in range(2):
        assert score(scorer(function, on_error="zero"), ["bad"]).failed.tolist() == [True]
    assert asked(place) == ["bad"]
    for step in (0, 1, 1):
        with pytest.raises(RewardError, match="ValueError: no"):
            score(scorer(function), ["bad"], step=step)
    assert asked(place) == ["bad"] * 4


def test_a_batch_is_journaled_and_called_as_a_whole(place, scorer):
    assert score(scorer("all_at_once"), ["a", "b"]).scores.tolist() == [1, 2]
    assert score(scorer("all_at_once"), ["a", "b"]).scores.tolist() == [1, 2]
    assert score(scorer("all_at_once"), ["a", "b", "c"]).scores.tolist() == [3, 4, 5]  # another batch
    file = next((place / "rewards").iterdir())
    file.write_bytes(file.read_bytes()[:-9])  # incomplete
    assert score(scorer("all_at_once"), ["a", "b", "c"]).scores.tolist() == [6, 7, 8]
    assert score(scorer("all_at_once"), ["a", "b"]).scores.tolist() == [1, 2]


def test_ranks_use_their_own_outcomes_first_then_those_of_others(place, scorer):
    zero, one = scorer(rank=0), scorer(rank=1)
    assert score(zero, ["a", "b"]).scores.tolist() == [1, 2]
    assert score(one, ["a", "c"]).scores.tolist() == [3, 4]  # not the rows that rank 0 has written meanwhile
    assert score(scorer(rank=1), ["a", "c"]).scores.tolist() == [3, 4]
    assert score(scorer(rank=0), ["b", "c", "a"]).scores.tolist() == [2, 4, 1]
    assert len(asked(place)) == 4


def test_files_before_the_oldest_checkpoint_are_removed(place, scorer):
    one = scorer()
    for step in range(4):
        score(one, ["a"], step=step)
    RewardJournal(place / "rewards", 0, None, failures=False).forget_before(2)
    assert sorted(os.listdir(place / "rewards")) == ["step_000002_rank_0.jsonl", "step_000003_rank_0.jsonl"]


def test_damaged_rows_are_named_in_the_error(tmp_path):
    outcomes = ("[]", '{"mapping": [1]}')
    rows = [json.dumps({"key": "a", "number": 0, "outcome": outcome}) for outcome in outcomes]
    for row in ('{"key": 3}', "[]", "garbage", *rows):
        (tmp_path / "step_000000_rank_0.jsonl").write_text(row + "\n")
        with pytest.raises(RewardError, match=r"step_000000_rank_0.jsonl, line 1, is damaged"):
            RewardJournal(tmp_path, 0, None, failures=False).open(0)


def test_outcomes_of_equal_calls_survive_serialization_in_call_order(tmp_path):
    texts = {"score": float("nan"), "answer": "x \ud800"}
    outcomes = [Outcome(1.5), Outcome("text"), Outcome(texts), Outcome(None, "timeout", "late")]
    asked = {"solution_str": "\ud800", "ground_truth": {1: object, "a": np.arange(3)}}, [{"role": "user"}]
    journal = RewardJournal(tmp_path, 0, None, failures=True)
    journal.open(0)
    calls = [journal.call(*asked) for _ in outcomes]
    for call, outcome in list(zip(calls, outcomes, strict=True))[::-1]:
        journal.write(call, outcome, is_answer=False)
    again = RewardJournal(tmp_path, 0, None, failures=True)
    again.open(0)
    found = [again.call(*asked).known for _ in range(5)]
    assert [json.dumps(each.to_message()) for each in found if each] == [json.dumps(o.to_message()) for o in outcomes]
    assert found[-1] is None


def test_an_invalid_result_that_stopped_the_run_is_called_again(place, scorer):
    (place / "mine.py").write_text(FUNCTION.replace('"score": len(asked)', '"score": 1.0 if len(asked) > 1 else None'))
    with pytest.raises(RewardError, match="missing or not a finite number"):
        score(scorer(), ["a"])
    assert score(scorer(), ["a"]).scores.tolist() == [1.0]


@pytest.mark.runs
@pytest.mark.own_run("grpo: its reward function takes no batches")
def test_a_runner_not_yet_started_journals_a_batch_as_a_whole(place):
    runner = RewardRunner(f"{place}/mine.py:all_at_once", num_processes=1, timeout_s=100.0, memory_bytes=2**29)
    try:
        for _ in range(2):
            journal = RewardJournal(place / "rewards", 0, None, failures=False)
            assert score(RewardScorer(runner=runner, journal=journal), ["a", "b"]).scores.tolist() == [1, 2]
    finally:
        runner.close()
    assert asked(place) == ["a", "b"]


@pytest.mark.parametrize("kind", ["a symbolic link", "a FIFO"])
def test_journal_that_is_not_a_regular_file_is_an_error_at_the_start(tmp_path, kind):
    path = tmp_path / "step_000003_rank_0.jsonl"
    os.mkfifo(path) if kind == "a FIFO" else path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RewardError, match=rf"step_000003_rank_0\.jsonl' is {kind}, not a regular file; remove it"):
        RewardJournal(tmp_path, 0, "identity", failures=False)
    assert not (tmp_path / "elsewhere").exists()


def test_journal_that_cannot_be_written_is_an_error_with_its_file(tmp_path):
    (tmp_path / "rewards").write_text("a file for the directory")
    with pytest.raises(RewardError, match=r"the journal of rewards cannot be written: .*rewards'; remove the file"):
        RewardJournal(tmp_path / "rewards", 0, "identity", failures=False).open(1)
