"""A conversation as tokens: the part before the first answer, and the rest with a mask of the answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridflow.data.chat_prompts import PromptEncoder, encode_texts
from hybridflow.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChangedTurns(DataError):
    """The chat template changes earlier turns of a conversation when later ones follow."""


@dataclass(frozen=True)
class Turns:
    """Token ids of a conversation that ends with an answer; `counts` is True where `response` is the assistant's."""

    prompt: list[int]
    response: list[int]
    counts: list[bool]


def answers_of(messages: Sequence[Mapping[str, Any]], place: str) -> list[int]:
    """Return the numbers of the assistant's messages; raise DataError if there is none after another message."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or answers[0] == 0:
        raise DataError(
            f"{place}: the conversation has the roles {', '.join(message['role'] for message in messages)}; expected "
            "a message of the assistant with another message before it."
        )
    return answers


def encode_turns(
    tokenizer: "PreTrainedTokenizerBase",
    encoder: PromptEncoder,
    messages: list[dict[str, Any]],
    eos_id: int,
    place: str,
) -> Turns:
    """Return the conversation up to its last answer; prompt and answers are encoded apart, as in generation.

    An answer counts up to its first EOS token, which is added if the template writes none. Raises DataError if there is
    no answer or no message before it, and for several answers without a chat template; ChangedTurns for a template that
    changes earlier turns when later ones follow.
    """
    answers = answers_of(messages, place)
    if len(answers) > 1 and not encoder.uses_template:
        raise DataError(
            f"{place}: {len(answers)} messages of the assistant need a chat template, which marks the ends of turns; "
            "add one to the tokenizer (and set data.chat_template = true), or write one row for each answer."
        )
    contexts, replies, written = [], [], ""
    for number in answers:
        before = encoder.text(messages[:number], place)
        after = before + messages[number]["content"]
        if encoder.uses_template:
            after = encoder.text(messages[: number + 1], place, add_generation_prompt=False)
        if not (before.startswith(written) and after.startswith(before)):
            raise ChangedTurns(
                f"{place}: the chat template changes the messages before message {number} when that one follows, so a "
                "model does not see this text when it answers; write one row for each answer."
            )
        contexts.append(before[len(written) :])
        replies.append(after[len(before) :])
        written = after
    prompt, *between = [*encoder.encode(contexts[:1]), *encode_texts(tokenizer, contexts[1:])]
    response, counts = [], []
    for number, reply in enumerate(encode_texts(tokenizer, replies)):
        if number:
            response += between[number - 1]
            counts += [False] * len(between[number - 1])
        if eos_id not in reply:
            reply = [*reply, eos_id]
        num_counted = reply.index(eos_id) + 1
        is_last = number == len(replies) - 1
        kept = reply[:num_counted] if is_last else reply
        response += kept
        counts += [position < num_counted for position in range(len(kept))]
    return Turns(prompt, response, counts)
