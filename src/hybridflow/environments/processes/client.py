"""The questions of one episode: answered by the journal of the step if it knows them, otherwise by the environment."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Protocol

from hybridflow.environments.episodes.answers import Answer, Question
from hybridflow.environments.processes.host import EnvironmentHost
from hybridflow.environments.rewards.journal import RewardJournal
from hybridflow.environments.rewards.outcome import Outcome
from hybridflow.errors import RewardError


class EnvironmentHandle(Protocol):
    """The environment of one episode, in this process or in another one."""

    async def ask(self, questions: Sequence[Question]) -> Answer:
        """Return the answer to the last of all questions so far; those that the environment has not had come first."""
        ...


class LocalEnvironment:
    """An environment in this process, made when it is needed."""

    def __init__(self, make_host: Callable[[], EnvironmentHost]) -> None:
        self._make_host = make_host
        self._host: EnvironmentHost | None = None
        self._num_had = 0

    async def ask(self, questions: Sequence[Question]) -> Answer:
        """Return the answer to the last question, see `EnvironmentHandle.ask`."""
        self._host = self._host or self._make_host()
        answer = Answer()
        for question in questions[self._num_had :]:
            self._num_had += 1
            answer = await self._host.answer(question)
        return answer


class EpisodeClient:
    """Asks the environment of one episode; `key` names the episode in the journal.

    An episode that has taken longer than `seconds` since its first question gets answers with `is_late`.
    """

    def __init__(
        self,
        environment: EnvironmentHandle,
        key: Sequence[int] = (),
        journal: RewardJournal | None = None,
        seconds: float = math.inf,
    ) -> None:
        self._environment, self._key, self._journal = environment, list(key), journal
        self._seconds, self._started = seconds, 0.0
        self._questions: list[Question] = []
        self._history = ""  # digest of the earlier questions

    async def __call__(self, question: Question) -> Answer:
        """Return the answer to the next question."""
        if not self._questions:
            self._started = time.monotonic()
        self._questions.append(question)
        call = None
        if self._journal:
            number, kind = len(self._questions), type(question).__name__
            asked = {"episode": self._key, "number": number, "after": self._history, kind: asdict(question)}
            call = self._journal.call(asked, None)
            self._history = call.key
            known = None if call.known is None else _answer_of(call.known, self._journal)
            if known and (not known.failure or self._journal.keeps_failures):
                return known
        answer = await self._environment.ask(self._questions)
        if time.monotonic() - self._started > self._seconds:
            answer = replace(answer, is_late=True)
        if self._journal and call:
            text = json.dumps(answer.to_message())
            self._journal.write(call, Outcome(text), is_answer=answer.failure is None)
        return answer


def _answer_of(known: Outcome, journal: RewardJournal) -> Answer:
    try:
        return Answer.of_message(json.loads(known.result))
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"the journal '{journal.directory}' has a row that is not an answer of an environment ({error}); remove "
            "the directory, so that environments are asked again."
        ) from error
