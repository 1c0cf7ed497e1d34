import functools
import linecache
import threading

import pytest

from hybridflow.environments.processes import closure
from hybridflow.environments.processes.closure import Closure, closure_of, offer, source_hash
from hybridflow.environments.rewards import RewardRunner, RewardScorer
from hybridflow.errors import RewardConfigError


def score(completion, **_):
    return len(completion)


def of_texts(function, texts, **settings):
    found = Closure.of(function)
    runner = RewardRunner(found.name, num_processes=2, timeout_s=30, memory_bytes=0, closure=found, **settings)
    try:
        scorer = RewardScorer(found.name, runner=runner)
        return scorer.score(texts, ["rows"] * len(texts), [""] * len(texts)).scores.tolist(), runner
    finally:
        runner.close()


@pytest.mark.runs
@pytest.mark.own_run("python: calls functions of many kinds")
def test_functions_and_objects_are_called_with_what_they_hold():
    scale = 3

    def scaled(completion, **_):
        return scale * len(completion)

    class Judge:
        def __call__(self, completions, **_):
            return [len(text) / 2 for text in completions]

    scores, runner = of_texts(scaled, ["a", "bcd", ""])
    assert scores == [3, 9, 0]
    assert (runner.kind.takes_names, runner.kind.source) == (True, "")
    assert of_texts(functools.partial(lambda weight, completion: weight * len(completion), 4), ["ab"])[0] == [8]
    assert of_texts(Judge(), ["ab", "abcd"])[0] == [1, 2]
    with pytest.raises(Exception, match="'answers_of_row' names nothing"):
        of_texts(lambda completion, answers_of_row: 1, ["a"])


def test_the_name_has_the_digest_of_the_source():
    assert Closure.of(score).name == f"closure:score-{source_hash(score)}"
    first, second, third = (
        eval(text) for text in ("lambda completion: 1", "lambda completion: 1", "lambda completion: 2")
    )
    assert source_hash(first) == source_hash(second) != source_hash(third)
    assert source_hash(functools.partial(score, x=1)) == source_hash(score)


def test_the_digest_stays_when_a_notebook_loses_its_source():
    text, names = "class Guess:\n    def play(self):\n        return 1\n", {"__name__": "__main__"}
    linecache.cache["<cell>"] = (len(text), None, text.splitlines(True), "<cell>")
    exec(compile(text, "<cell>", "exec"), names)
    digest = source_hash(names["Guess"])
    del linecache.cache["<cell>"]
    assert source_hash(names["Guess"]) == digest


def test_what_cannot_travel_is_named(tmp_path):
    lock = threading.Lock()

    def with_lock(completion):
        with lock:
            return 1

    with pytest.raises(RewardConfigError, match=r"'with_lock' cannot travel to its processes: .* it holds lock\. Make"):
        Closure.of(with_lock)
    with open(tmp_path / "log", "w") as log, pytest.raises(RewardConfigError, match="it holds log"):
        Closure.of(lambda completion: log.write(completion))
    with pytest.raises(RewardConfigError, match="it holds weight"):
        Closure.of(functools.partial(score, weight=lock))


def test_a_tensor_on_a_gpu_and_too_much_data_are_errors(monkeypatch):
    class OnGPU:
        is_cuda = True

    table = OnGPU()
    with pytest.raises(RewardConfigError, match="holds the tensor 'table' on a GPU"):
        Closure.of(lambda completion: table)
    monkeypatch.setattr(closure, "MAX_BYTES", 1000)
    data = bytes(2000)
    with pytest.raises(RewardConfigError, match=r"holds 2,\d\d\d bytes"):
        Closure.of(lambda completion: len(data))


def test_a_function_that_was_not_given_is_an_error(monkeypatch):
    monkeypatch.setattr(closure, "_offered", {})
    found = Closure.of(score)
    with pytest.raises(RewardConfigError, match=r"add reward\.function=path.py:function .* hybridflow\.open_run"):
        closure_of(found.name)
    offer(found)
    assert closure_of(found.name) is found
    assert closure_of("") is closure_of("a.py:score") is None
