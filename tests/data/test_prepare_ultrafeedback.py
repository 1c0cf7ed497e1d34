import pytest

from fixtures.row_files import SUFFIXES, rows_of, write_rows
from hybridflow.data import PreferenceDataset, prepare_ultrafeedback
from hybridflow.errors import DataConfigError, DataError


def messages(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def pair(prompt: str = "spell cat", chosen: str = "c a t", rejected: str = "k a t", **other) -> dict:
    """Return a pair as the published file has it."""
    sides = {"chosen": messages(prompt, chosen), "rejected": messages(prompt, rejected)}
    return {"prompt": prompt, **sides, "score_chosen": 8.0, "score_rejected": 5.5, **other}


BEE = pair("spell bee", "b e e", "b")
ROW = {"prompt": messages("spell cat"), "chosen": "c a t", "rejected": "k a t"}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_conversations_become_prompt_chosen_and_rejected(tmp_path, suffix):
    train, test = write_rows(tmp_path / f"a{suffix}", [pair()]), write_rows(tmp_path / f"b{suffix}", [BEE])
    files = prepare_ultrafeedback(train, tmp_path / "out", test_file=test)
    assert rows_of(files.train_file) == [ROW]
    assert rows_of(files.test_file) == [{"prompt": messages("spell bee"), "chosen": "b e e", "rejected": "b"}]
    assert (files.num_train, files.num_test, files.dropped) == (1, 1, {})


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_plain_texts_are_pairs_too(tmp_path, suffix):
    rows = [
        {"prompt": "spell cat", "chosen": "c a t", "rejected": "k a t", "score_chosen": "8", "score_rejected": "5.5"},
        {"prompt": "spell bee", "chosen": "b e e", "rejected": "b", "score_chosen": "", "score_rejected": ""},
    ]
    files = prepare_ultrafeedback(write_rows(tmp_path / f"a{suffix}", rows), tmp_path / "out", test_size=1)
    assert ROW in [*rows_of(files.train_file), *rows_of(files.test_file)]


def test_answers_alone_as_messages_take_the_prompt_of_its_column(tmp_path):
    prompt = messages("hello", "hi", "spell cat")
    answers = [[{"role": "assistant", "content": text}] for text in ("c a t", "k a t")]
    alone = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    turns = {"chosen": [*messages("1", "2", "3"), *answers[0]], "rejected": [*messages("1", "2", "3"), *answers[1]]}
    train, test = write_rows(tmp_path / "a.jsonl", [alone]), write_rows(tmp_path / "b.jsonl", [turns])
    files = prepare_ultrafeedback(train, tmp_path / "out", test_file=test)
    assert rows_of(files.train_file) == [{**ROW, "prompt": prompt}]
    assert rows_of(files.test_file) == [{**ROW, "prompt": messages("1", "2", "3")}]


@pytest.mark.parametrize("layout", ["policy", "reward_model"])
def test_the_written_files_are_read_by_the_preference_dataset(tmp_path, char_tokenizer, layout):
    source = write_rows(tmp_path / "a.jsonl", [pair(), BEE, pair("spell me", "m e", "me")])
    files = prepare_ultrafeedback(source, tmp_path / "out", test_size=1)
    for file, num_pairs in ((files.train_file, 2), (files.test_file, 1)):
        dataset = PreferenceDataset(file, char_tokenizer(), 32, 32, layout=layout)
        assert (len(dataset), dataset.num_dropped) == (num_pairs, 0)
        batch = dataset.collate(range(num_pairs))
        assert batch.batch["group_ids"].tolist() == [0, 0, 1, 1][: 2 * num_pairs]
    if layout == "policy":
        row = rows_of(files.test_file)[0]
        decoded = char_tokenizer().decode(batch.batch["responses"][0], skip_special_tokens=True)
        assert decoded.replace(" ", "") == row["chosen"].replace(" ", "")


def test_rows_that_are_dropped_are_counted_for_each_file(tmp_path):
    rows = [
        *(pair(), pair(), BEE, pair("spell dog", "d o g", "d")),
        pair("a", "same", " same "),
        pair("b", "", "x"),
        pair("c", "x", " "),
        pair("d", score_chosen=7, score_rejected=7.0),
        {**pair("e"), "rejected": messages("f", "x")},
        {"prompt": " ", "chosen": "x", "rejected": "y"},
        {"prompt": "g", "chosen": None, "rejected": "y"},
    ]
    train, test = write_rows(tmp_path / "a.jsonl", rows), write_rows(tmp_path / "b.jsonl", [BEE, BEE])
    files = prepare_ultrafeedback(train, tmp_path / "out", test_file=test)
    of_train, of_test = files.sources
    assert of_train.dropped == {
        "repeats an earlier row": 1,
        "the answers are equal": 1,
        "an answer is empty": 3,
        "the scores are equal": 1,
        "the prompts of the two answers differ": 1,
        "no prompt": 1,
        "the prompt is in the test set": 1,
    }
    assert of_test.dropped == {"repeats an earlier row": 1}
    assert (of_train.num_read, of_train.num_kept, len(rows_of(files.train_file))) == (11, 2, 2)
    assert (of_test.num_read, of_test.num_kept, len(rows_of(files.test_file))) == (2, 1, 1)


def test_pairs_with_equal_scores_can_be_kept(tmp_path):
    tie = pair("d", score_chosen=7, score_rejected=7)
    source = write_rows(tmp_path / "a.jsonl", [pair(), BEE, tie])
    assert prepare_ultrafeedback(source, tmp_path / "1", test_size=1).dropped == {"the scores are equal": 1}
    files = prepare_ultrafeedback(source, tmp_path / "2", test_size=1, keep_equal_scores=True)
    assert (files.num_train, files.num_test, files.dropped) == (2, 1, {})


def test_random_test_pairs_share_no_prompt_with_the_training_pairs(tmp_path):
    rows = [pair(f"spell {word}", word, f"{word}{n}") for word in ("a", "b", "c") for n in range(4)]
    files = prepare_ultrafeedback(write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out", test_size=2)
    train, test = (
        {row["prompt"][0]["content"] for row in rows_of(path)} for path in (files.train_file, files.test_file)
    )
    assert train
    assert not train & test
    (counts,) = files.sources
    assert counts.num_kept == files.num_train + files.num_test == 12 - files.dropped["the prompt is in the test set"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"a.json: the file has no rows"),
        ([{"prompt": "a", "chosen": "b"}], r"row 0: 'rejected' is missing; the row has prompt, chosen"),
        ([{"chosen": "b", "rejected": "c"}], r"row 0: 'prompt' is missing; the row has chosen, rejected"),
        ([BEE, {**pair(), "chosen": 3}], r"row 1: 'chosen' must be a text or a list of chat messages, got 3"),
        ([BEE, {**pair(), "rejected": ["x"]}], r"row 1: message 0 of 'rejected' needs a role and a content, got 'x'"),
        (
            [BEE, {**pair(), "chosen": messages("a")}],
            r"row 1: the last message of 'chosen' has the role 'user'; expected the answer of the 'assistant'",
        ),
        ([{"prompt": 3, "chosen": "b", "rejected": "c"}], r"row 0: 'prompt' must be a text or a list of chat messages"),
        ([pair(score_chosen="good")], r"row 0: 'score_chosen' must be a number, got 'good'"),
        ([pair(score_chosen=10**400)], r"row 0: 'score_chosen' must be a number, got 1000"),
        ([pair(score_rejected=[1])], r"row 0: 'score_rejected' must be a number, got \[1\]"),
        ([pair("a", "b", "b")], r"a.json: all rows were dropped \(1: the answers are equal\)"),
        (["b"], r"row 0: is a str; expected an object"),
    ],
)
def test_a_malformed_file_is_an_error_with_its_place(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        prepare_ultrafeedback(write_rows(tmp_path / "a.json", rows), tmp_path / "out", test_size=1)
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataConfigError, match=r"missing.parquet: no such file"):
        prepare_ultrafeedback(tmp_path / "missing.parquet", tmp_path / "out")
