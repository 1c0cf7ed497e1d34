"""Examples, conversations and pairs for training without rollouts."""

import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fixtures.row_files import write_rows
from hybridflow.data import (
    BatchLoader,
    PreferenceDataset,
    SFTDataset,
    write_conversation_file,
    write_preference_file,
    write_sft_file,
)
from hybridflow.data.row_forms import RowForm
from hybridflow.errors import DataError

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
WITHOUT_EOS = TEMPLATE.replace("<eos>", "")
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role == 'user' or loop.last else '-' }}")


def chat(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def test_sft_batch_has_the_layout_of_rl_batches(char_tokenizer, tmp_path):
    file = write_sft_file(tmp_path / "sft.parquet", [("ab", "c"), ("a", "bcd")])
    batch = SFTDataset(file, char_tokenizer(), max_prompt_length=4, max_response_length=4).collate([0, 1])
    # "a" is 4 ... "d" is 7; EOS is 1; padding is 0.
    assert {name: column.tolist() for name, column in batch.batch.items()} == {
        "prompts": [[4, 5], [0, 4]],
        "responses": [[6, 1, 0, 0], [5, 6, 7, 1]],
        "response_mask": [[True, True, False, False], [True] * 4],
        "input_ids": [[4, 5, 6, 1, 0, 0], [0, 4, 5, 6, 7, 1]],
        "attention_mask": [[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]],
        "position_ids": [[0, 1, 2, 3, 3, 3], [0, 0, 1, 2, 3, 4]],
    }
    assert batch.batch["response_mask"].dtype == torch.bool
    assert batch.meta_info["pad_token_id"] == 0


def test_each_response_ends_in_exactly_one_eos_and_gets_no_bos(char_tokenizer, tmp_path):
    file = write_sft_file(tmp_path / "sft.parquet", [("a", "b<eos>"), ("a", "")])
    assert SFTDataset(file, char_tokenizer(), 4, 4).collate([0, 1]).batch["responses"].tolist() == [[5, 1], [1, 0]]
    dataset = SFTDataset(file, char_tokenizer(template="<bos> $A <eos>"), 4, 4)
    assert dataset.collate([0]).batch["input_ids"].tolist() == [[2, 4, 5, 1]]


def test_long_examples_and_pairs_are_dropped_and_logged(char_tokenizer, tmp_path, caplog):
    file = write_sft_file(tmp_path / "sft.parquet", [("abc", "b"), ("a", "bcd"), ("a", "bc")])
    pairs = write_preference_file(tmp_path / "p.parquet", [("a", "b", "cdef"), ("a", "b", "c")])
    with caplog.at_level(logging.WARNING):
        dataset = SFTDataset(file, char_tokenizer(), max_prompt_length=2, max_response_length=3)
        of_pairs = PreferenceDataset(pairs, char_tokenizer(), 4, 4)
    assert (len(dataset), dataset.num_dropped) == (1, 2)
    assert (len(of_pairs), of_pairs.num_dropped, of_pairs.longest) == (1, 1, 3)
    assert "dropped 2 of 3 examples longer than max_prompt_length=2 or max_response_length=3" in caplog.text
    assert "row 0: prompt 3, response 2 tokens" in caplog.text
    assert "dropped 1 of 2 pairs longer than max_prompt_length=4 or max_response_length=4" in caplog.text


def test_fingerprints_differ_by_response_and_answer(char_tokenizer, tmp_path):
    tokenizer = char_tokenizer(chat_template=TEMPLATE)
    files = [
        *(write_sft_file(tmp_path / f"{b}.parquet", [("a", "b"), ("b", b)]) for b in "cd"),
        *(write_conversation_file(tmp_path / f"{b}.parquet", [chat("x", "y", "z", b)]) for b in "wv"),
    ]
    assert len({SFTDataset(file, tokenizer, 40, 40).fingerprint for file in files}) == 4
    assert len(BatchLoader(SFTDataset(files[0], char_tokenizer(), 4, 4), 2).next_batch()) == 2


def test_examples_and_pairs_are_read_from_json_lines(tmp_path, char_tokenizer):
    examples = write_rows(tmp_path / "sft.jsonl", [{"q": "a", "a": "b c", "hard": 2}])
    form = RowForm({"prompt": "q", "response": "a"})
    assert SFTDataset(examples, char_tokenizer(), 4, 4, order_by="hard", form=form).numbers == [2]
    wrong = write_rows(tmp_path / "wrong.jsonl", [{"prompt": "a", "response": 3}])
    with pytest.raises(DataError, match=r"wrong\.jsonl: line 1: 'response' must be a text or a list of .*, got 3"):
        SFTDataset(wrong, char_tokenizer(), 4, 4)
    talk = write_rows(tmp_path / "talk.jsonl", [{"messages": chat("a", "b")}])
    assert len(SFTDataset(talk, char_tokenizer(), 4, 4)) == 1
    pairs = write_rows(tmp_path / "pairs.json", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    assert len(PreferenceDataset(pairs, char_tokenizer(), 4, 4)) == 1


# Conversations


def parts_of(char_tokenizer, tmp_path, messages, chat_template=TEMPLATE):
    """Return the prompt and the response of a conversation as texts, with uncounted tokens in brackets."""
    tokenizer = char_tokenizer(chat_template=chat_template)
    file = write_conversation_file(tmp_path / "chat.parquet", [messages])
    columns = SFTDataset(file, tokenizer, 40, 40).collate([0]).batch
    assert columns["attention_mask"].all()
    marked = "".join(
        tokenizer.decode([token]) if counts else f"({tokenizer.decode([token])})"
        for token, counts in zip(columns["responses"][0].tolist(), columns["response_mask"][0].tolist(), strict=True)
    )
    return tokenizer.decode(columns["prompts"][0]), marked.replace(")(", "")


@pytest.mark.parametrize(
    ("messages", "template", "expected"),
    [
        (chat("x", "yy", "z", "w"), TEMPLATE, ("u:x\na:", "yy<eos>(\nu:z\na:)w<eos>")),
        (chat("x", "y", "z"), TEMPLATE, ("u:x\na:", "y<eos>")),  # nothing after the last answer
        (chat("x", "y"), WITHOUT_EOS, ("u:x\na:", "y\n<eos>")),
        (chat("x", "y"), None, ("x", "y<eos>")),
        ([{"role": "system", "content": "be"}, *chat("x", "y")], TEMPLATE, ("s:be\nu:x\na:", "y<eos>")),
    ],
)
def test_each_answer_counts_up_to_its_eos(char_tokenizer, tmp_path, messages, template, expected):
    assert parts_of(char_tokenizer, tmp_path, messages, template) == expected


@pytest.mark.parametrize(
    ("messages", "template", "problem"),
    [
        (chat("x"), TEMPLATE, "row 0: the conversation has the roles user; expected a message of the assistant"),
        (chat("x", "y")[1:], TEMPLATE, "has the roles assistant; expected"),
        (chat("x", "y", "z", "w"), None, "2 messages of the assistant need a chat template"),
    ],
)
def test_invalid_conversations_are_errors(char_tokenizer, tmp_path, messages, template, problem):
    with pytest.raises(DataError, match=problem):
        parts_of(char_tokenizer, tmp_path, messages, template)


def test_file_with_messages_and_response_is_read_as_conversations(char_tokenizer, tmp_path, caplog):
    row = {"messages": chat("x", "y"), "prompt": chat("a")[:1], "response": "b"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "both.parquet")
    with caplog.at_level(logging.WARNING):
        dataset = SFTDataset(tmp_path / "both.parquet", char_tokenizer(chat_template=WITHOUT_EOS), 40, 40)
    assert "have the columns `messages` and `response`; `response` is ignored" in caplog.text
    assert dataset.longest == len("u:x\na:y\n") + 1


# Pairs


def test_chosen_response_comes_first_and_pairs_are_numbered(char_tokenizer, tmp_path):
    file = write_preference_file(tmp_path / "p.parquet", [("ab", "c", "de"), ("a", "b", "c")])
    batch = PreferenceDataset(file, char_tokenizer(), 4, 4).collate([0, 1]).batch
    # "a" is 4 ... "e" is 8; EOS is 1; padding is 0.
    assert batch["prompts"].tolist() == [[4, 5], [4, 5], [0, 4], [0, 4]]
    assert batch["responses"].tolist() == [[6, 1, 0], [7, 8, 1], [5, 1, 0], [6, 1, 0]]
    assert batch["response_mask"].sum(-1).tolist() == [2, 3, 2, 2]
    assert batch["group_ids"].tolist() == [0, 0, 1, 1]


def test_reward_model_layout_is_whole_conversations_scored_at_the_end(char_tokenizer, tmp_path):
    file = write_preference_file(tmp_path / "p.parquet", [("a", "b", "cd")])
    tokenizer = char_tokenizer(chat_template=WITHOUT_EOS)
    batch = PreferenceDataset(file, tokenizer, 8, 8, layout="reward_model").collate([0]).batch
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    assert [tokenizer.decode(ids[mask.bool()][:-1]) for ids, mask in rows] == ["u:a\na:b\n", "u:a\na:cd\n"]
    assert batch["response_mask"].tolist() == [[True], [True]]


PROMPT = chat("a")


@pytest.mark.parametrize(
    ("read", "rows", "limits", "message"),
    [
        (SFTDataset, [{"prompt": PROMPT}], (4, 4), "row 0: 'response' is missing; the row has prompt"),
        (SFTDataset, [{"prompt": PROMPT, "response": None}], (4, 4), "a.parquet: row 0: 'response' is empty"),
        (SFTDataset, [{"prompt": PROMPT, "response": "b"}], (4, 0), "max_response_length=0"),
        (SFTDataset, [{"prompt": PROMPT, "response": "bcd"}], (2, 2), "no examples are left"),
        (
            PreferenceDataset,
            [{"prompt": PROMPT, "chosen": "b"}],
            (4, 4),
            "row 0: 'rejected' is missing; the row",
        ),
        (
            PreferenceDataset,
            [("a", 1, "b")],
            (4, 4),
            "row 0: 'chosen' must be a text or a list of .*, got 1",
        ),
        (PreferenceDataset, [("a", "b", "c"), ("a", "b", "b")], (4, 4), "row 1: 'chosen' and 'rejected' are the same"),
        (PreferenceDataset, [("a", "b", "b<eos>")], (4, 4), "row 0: 'chosen' and 'rejected' have the same tokens"),
    ],
)
def test_malformed_files_and_invalid_limits_are_errors(char_tokenizer, tmp_path, read, rows, limits, message):
    names = ("prompt", "chosen", "rejected")
    rows = [dict(zip(names, (PROMPT, *row[1:]), strict=True)) if isinstance(row, tuple) else row for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        read(tmp_path / "a.parquet", char_tokenizer(), *limits)
