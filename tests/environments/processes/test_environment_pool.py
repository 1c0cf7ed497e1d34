"""Environments in processes: whatever the user's code does to its process, other episodes go on."""

import asyncio
import time

import pytest

from hybridflow.environments import Answer, AssistantTurn, CallLimits, EnvironmentPool, EpisodeClient, ToolCall
from hybridflow.environments.episodes.answers import Begin, Finish, ScoreGroup, TakeTurn
from hybridflow.environments.episodes.environment import Episode
from hybridflow.environments.rewards.journal import RewardJournal
from hybridflow.errors import ConfigError, RewardError

own_run = pytest.mark.own_run("episodes: its environments neither hang nor die")


def in_processes(test):
    """Mark a test that starts processes."""
    return pytest.mark.runs(own_run(test))


CODE = '''
import asyncio, os, signal, time
from hybridflow.environments import Environment, Reply


class Hostile:
    def __repr__(self):
        raise ValueError("not shown")


class Counter(Environment):
    """Counts its questions, and does what a row says."""

    async def reset(self, row):
        self.log = os.environ.get("QUESTIONS")
        self.count = 0
        self._note("reset")
        return await super().reset(row)

    def _note(self, what):
        if self.log:
            with open(self.log, "a") as file:
                file.write(what + "\\n")

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def do(self, code: str) -> str:
        """Run code."""
        exec(code, globals())
        return "done"

    async def cancelled(self) -> str:
        raise asyncio.CancelledError()

    async def restless(self) -> str:
        while True:
            try:
                await asyncio.sleep(0.05)
            except BaseException:
                pass

    async def step(self, turn):
        self._note("step")
        self.count += 1
        if turn.content.startswith("do "):
            names = {**globals()}
            exec(turn.content.removeprefix("do "), names)
            if "answer" in names:
                return names["answer"]
        return Reply([{"role": "user", "content": str(self.count)}], reward=0.5)

    async def reward(self, episode):
        return {"score": float(self.count), "turns": len(episode.turns)}

    async def group_rewards(self, episodes):
        longest = max(len(episode.turns) for episode in episodes)
        return [float(len(episode.turns) == longest) for episode in episodes]


class Plain(Environment):
    """An environment whose methods are not `async`."""

    def reset(self, row):
        return [{"role": "user", "content": "begin"}]

    def step(self, turn):
        return Reply([{"role": "user", "content": "more"}], reward=0.5)

    def reward(self, episode):
        return len(episode.turns)

    def close(self):
        pass


class NoTypes(Counter):
    def add(self, a, b):
        return a + b


class NoReward(Environment):
    def add(self, a: int, b: int) -> int:
        return a + b


class Odd(NoReward):
    async def group_rewards(self, episodes):
        return [0.0 for _ in episodes]


def judge(solution_str, extra_info, data_source, ground_truth, worth=1.0):
    said = [message["content"] for message in extra_info["messages"]]
    return {"score": worth * (solution_str == ground_truth), "said": len(said), "answer": solution_str}


async def judge_by_names(completion, prompt, messages, level):
    return level if [prompt, completion] == [message["content"] for message in messages] else 0.0


def judge_late(completion):
    time.sleep(2 if completion == "late" else 0)
    return int(completion) if completion.isdigit() else [completion]


def judge_all(completions):
    return [0.0 for _ in completions]
'''


@pytest.fixture
def pool_of(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    pools = []

    def make(name="Counter", processes=1, seconds=0.5, memory=2 * 2**30, judge="", kwargs=None):
        limits = CallLimits(seconds)
        sources = {"counter": f"{tmp_path}/mine.py:{name}"}
        function = judge and f"{tmp_path}/mine.py:{judge}"
        pools.append(
            EnvironmentPool(
                sources,
                num_processes=processes,
                limits=limits,
                memory_bytes=memory,
                reward_function=function,
                reward_kwargs=kwargs or {},
            )
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


HANG = "while True: time.sleep(0.01)"
KILL_ONCE = """
if not os.path.exists(os.environ["ONCE"]):
    open(os.environ["ONCE"], "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def said(content="", *calls):
    return TakeTurn(AssistantTurn(content, calls=tuple(ToolCall(name, arguments) for name, arguments in calls)))


def run(pool, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, pool.loop).result(60)


def episode(pool, *questions, number=0, row=None, **options):
    """Return the answers to questions of one episode."""
    client = EpisodeClient(pool.environment("counter", number), **options)

    async def ask():
        return [await client(question) for question in (Begin({"prompt": "Count."} | (row or {})), *questions)]

    return run(pool, ask())


places = pytest.mark.parametrize("processes", [0, pytest.param(2, marks=[pytest.mark.runs, own_run])])
"""In the rank, and in processes."""


@places
def test_an_episode_in_a_process_equals_one_in_the_rank(pool_of, processes):
    pool = pool_of(processes=processes)
    kind = pool.kinds["counter"]
    assert kind.scores_groups
    assert next(schema["function"]["name"] for schema in kind.schemas) == "add"
    answers = episode(pool, said("a", ("add", {"a": 3, "b": 4})), said("b"), Finish("done"))
    assert answers[0].messages == ({"role": "user", "content": "Count."},)
    assert [message["content"] for message in answers[1].messages] == ["7", "1"]
    assert answers[1].called[0].result == "7"
    assert [answer.reward for answer in answers] == [0.0, 0.5, 0.5, 0.0]
    assert answers[3].rewards == {"score": 2.0, "turns": 2.0}
    question = ScoreGroup([Episode({}, turns=turns) for turns in ([1, 2], [1], [1, 2])])
    assert run(pool, pool.environment("counter", 0).ask([question])).group == (1.0, 0.0, 1.0)
    for text, error in (
        ("raise SystemExit(3)", "step raised SystemExit: 3 at "),
        ("answer = Hostile()", "what it returned cannot be used: ValueError: not shown"),
        ("raise asyncio.CancelledError()", "step was cancelled: asyncio.CancelledError"),
    ):
        failed = episode(pool, said(f"do {text}"), Finish("error"))[1]
        assert failed.failure == "raised"
        assert failed.error.startswith(error)
    assert episode(pool, said("a"), Finish("done"))[2].rewards == {"score": 1.0, "turns": 1.0}


@in_processes
def test_a_tool_that_fails_is_an_answer_for_the_model(pool_of):
    results = {
        "bytearray(8 * 2**30)": "error: MemoryError: ",
        "os.write(1, b'not a reply')": "done",
        "raise SystemExit(3)": "error: SystemExit: 3",
        "raise ValueError('\\ud800')": "error: ValueError: ?",
        HANG: "error: do took longer than 0.5 s",
    }
    pool = pool_of()
    calls = [("cancelled", {}), ("restless", {}), *(("do", {"code": code}) for code in results)]
    answers = episode(pool, *(said("", call) for call in calls), said("on"), Finish("done"))
    assert [answer.messages[0]["content"] for answer in answers[1:-2]] == [
        "error: cancelled was cancelled: asyncio.CancelledError",
        "error: restless took longer than 0.5 s",
        *results.values(),
    ]
    assert answers[-1].rewards == {"score": 8.0, "turns": 8.0}
    (first,) = pool._processes
    while not first.num_stuck:  # it reports the call that never ends
        time.sleep(0.05)
    assert first.num_stuck == 1
    pool.renew()
    assert first.popen.poll() is not None
    assert episode(pool, said("a"), Finish("done"))[2].rewards == {"score": 1.0, "turns": 1.0}


@in_processes
def test_a_tool_that_ends_its_process_fails_its_episode_alone(pool_of):
    pool = pool_of(seconds=20)

    async def both():
        bad, good = (EpisodeClient(pool.environment("counter", 0)) for _ in range(2))
        begun = Begin({"prompt": "Count."})
        assert not (await bad(begun)).failure
        assert not (await good(begun)).failure
        assert not (await good(said("a"))).failure
        lost, *others = await asyncio.gather(bad(said("", ("do", {"code": "os._exit(3)"}))), good(said("b")))
        return lost, *others, await good(Finish("done"))

    lost, going, rewarded = run(pool, both())
    assert lost.failure == "died"
    assert "exit status 3" in lost.error
    assert going.messages[0]["content"] == "2"
    assert rewarded.rewards == {"score": 2.0, "turns": 2.0}


@places
def test_methods_that_are_not_async_are_called(pool_of, processes):
    begun, answered, ended = episode(pool_of("Plain", processes), said("a"), Finish("turns"))
    assert begun.messages[0]["content"] == "begin"
    assert (answered.messages[0]["content"], answered.reward) == ("more", 0.5)
    assert (ended.failure, ended.rewards) == (None, {"score": 1.0})


@in_processes
def test_processes_and_directories_end_with_the_pool_and_the_rank(pool_of, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    pool = pool_of(processes=2)
    episode(pool, said("", ("do", {"code": HANG})), number=1)
    processes = list(pool._processes)
    assert len(list(tmp_path.glob("hybridflow-environment-*"))) == 2
    pool.close()
    assert [each.popen.poll() is None for each in processes] == [False, False]
    assert list(tmp_path.glob("hybridflow-environment-*")) == []
    (process,) = pool_of()._processes
    process.connection.shutdown(2)  # as by the end of the rank
    assert process.popen.wait(100) is not None


def journal_of(tmp_path, *, failures=False):
    journal = RewardJournal(tmp_path / "journal", 0, ["mine"], failures=failures)
    journal.open(3)
    return {"key": (3, 0), "journal": journal}


def test_failures_are_asked_again_unless_they_are_kept(pool_of, tmp_path):
    def play(failures):
        return episode(pool_of(processes=0), said("do raise SystemExit(3)"), **journal_of(tmp_path, failures=failures))

    kept = play(True)
    assert kept[1].failure == "raised"
    # The length changes as well: bytecode of the same second and size would be read again.
    (tmp_path / "mine.py").write_text(CODE.replace('startswith("do ")', 'startswith("never ")'))
    assert play(True) == kept
    assert play(False)[1].messages[0]["content"] == "1"


@in_processes
def test_a_question_that_ends_two_processes_is_not_asked_a_third_time(pool_of, tmp_path, monkeypatch):
    asked = tmp_path / "questions"
    monkeypatch.setenv("QUESTIONS", str(asked))
    answers = episode(pool_of(seconds=20), said("do os._exit(3)"), Finish("error"))
    assert [answer.failure for answer in answers] == [None, "died", "died"]
    assert asked.read_text().split() == ["reset", "step", "reset", "step"]


def test_a_message_that_json_cannot_write_is_a_failure(pool_of):
    answers = episode(
        pool_of(processes=0), said("do answer = Reply([{'role': 'user', 'content': 'a', 'number': float('nan')}])")
    )
    assert answers[1].failure == "raised"
    assert "expected a list of messages" in answers[1].error


@in_processes
def test_a_killed_process_costs_a_repetition_of_its_questions(pool_of, tmp_path, monkeypatch):
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    answers = episode(pool_of(seconds=20), said("a"), said(f"do {KILL_ONCE}"), said("b"), Finish("done"))
    assert [answer.messages[0]["content"] for answer in answers[1:4]] == ["1", "2", "3"]
    assert answers[4].rewards == {"score": 3.0, "turns": 3.0}


@in_processes
def test_a_step_that_blocks_its_process_is_late(pool_of, monkeypatch, caplog):
    monkeypatch.setattr("hybridflow.environments.processes.environment_pool.GRACE_S", 1.0)
    answers = episode(pool_of(), said("do while True: pass"), Finish("error"))
    assert answers[1].failure == "timeout"
    assert "gave no sign of life for 1.5 s" in answers[1].error
    assert "A process of environments gave no sign of life for 1.5 s" in caplog.text


@places
def test_a_class_that_cannot_serve_is_an_error_at_the_start(pool_of, processes):
    for name, judge, message in (
        ("NoTypes", "", r"tool 'add': parameter 'a' has no type"),
        ("NoReward", "", r"NoReward has no method `reward`, .*; write one, or set reward.function"),
        ("Missing", "", r"environment.classes.counter .*has no class 'Missing'; it has Hostile, Counter, "),
        ("Counter", "judge", r"Counter has a method `reward`, and reward.function='.*mine.py:judge' is set: both give"),
        ("NoReward", "judge_all", r"'.*mine.py:judge_all' takes lists of responses, but episodes are scored one by"),
        ("NoReward", "judging", r"reward function '.*mine.py:judging': .*it has judge, judge_by_names, judge_late"),
    ):
        with pytest.raises(ConfigError, match=message):
            pool_of(name, processes, judge=judge)


@places
def test_a_reward_function_scores_episodes_of_a_class_without_reward(pool_of, processes):
    pool = pool_of("NoReward", processes, judge="judge", kwargs={"worth": 0.5})
    row = {"data_source": "sums", "ground_truth": "7", "extra_info": {"level": 3.0}}
    answers = episode(pool, said("", ("add", {"a": 3, "b": 4})), said("7"), Finish("done"), row=row)
    assert answers[-1].rewards == {"score": 0.5, "said": 4.0, "answer": "7"}
    assert episode(pool, said("8"), Finish("done"), row=row)[-1].rewards == {"score": 0.0, "said": 2.0, "answer": "8"}
    named = episode(pool_of("Odd", processes, judge="judge_by_names"), said("a"), Finish("done"), row=row)
    assert named[-1].rewards == {"score": 3.0}
    pool = pool_of("NoReward", processes, judge="judge_late")
    for text, failure, error in (
        ("late", "timeout", "reward.function took longer than 0.5 s"),
        ("what", "raised", "reward.function returned score={'shown': \"['what']\"}; expected a"),
    ):
        failed = episode(pool, said(text), Finish("done"), row=row)[-1]
        assert (failed.failure, failed.error[: len(error)]) == (failure, error)
    assert episode(pool, said("7"), Finish("done"), row=row)[-1].rewards == {"score": 7.0}


def test_the_journal_answers_in_place_of_the_environment(pool_of, tmp_path, monkeypatch):
    asked = tmp_path / "questions"
    monkeypatch.setenv("QUESTIONS", str(asked))
    questions = [said("a", ("add", {"a": 1, "b": 2})), said("b"), Finish("done")]

    def play(upto, **options):
        return episode(pool, *questions[:upto], **journal_of(tmp_path), **options)

    pool = pool_of(processes=0)
    first = play(1)
    assert asked.read_text().split() == ["reset", "step"]
    whole = play(3)  # the first two answers are known: the environment has the questions when a third one comes
    assert whole[:2] == first
    assert asked.read_text().split() == ["reset", "step", "reset", "step", "step"]
    assert play(3, seconds=-1.0) == whole
    assert asked.read_text().split() == ["reset", "step", "reset", "step", "step"]
    assert whole[3].rewards == {"score": 2.0, "turns": 2.0}


def test_the_journal_knows_answers_to_the_same_conversation_only(pool_of, tmp_path):
    pool = pool_of(processes=0)

    def play(*questions):
        return episode(pool, *questions, Finish("done"), **journal_of(tmp_path))[-1].rewards

    assert play(said("a")) == {"score": 1.0, "turns": 1.0}
    assert play(said("a"), said("b")) == {"score": 2.0, "turns": 2.0}
    assert play(said("c"), said("b")) == {"score": 2.0, "turns": 2.0}
    assert play(said("a")) == {"score": 1.0, "turns": 1.0}
    lines = {path.read_text() for path in (tmp_path / "journal").iterdir()}
    assert sum(text.count("\n") for text in lines) == 1 + 2 + 2 + 3


def test_a_row_of_the_journal_that_is_not_an_answer_is_an_error_with_its_place(pool_of, tmp_path):
    pool, options = pool_of(processes=0), journal_of(tmp_path)
    episode(pool, **options)
    (path,) = (tmp_path / "journal").iterdir()
    path.write_text(path.read_text().replace("is_done", "was_done"))
    options["journal"].reopen()
    options["journal"].open(3)
    with pytest.raises(RewardError, match=r"the journal '.*' has a row that is not an answer .*; remove the directory"):
        episode(pool, **options)


def test_an_answer_is_read_as_it_was_written(pool_of):
    answer = episode(pool_of(processes=0), said("a", ("add", {"a": 3, "b": 4})))[1]
    assert Answer.of_message(answer.to_message()) == answer
    with pytest.raises(ValueError, match="is not an answer of an environment"):
        Answer.of_message({"messages": 3})
