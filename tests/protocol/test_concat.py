"""Concatenation and joining pad columns of different lengths as if all rows had been built together."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol import FIELDS, DataProto, DataProtoFuture, Field
from hybridflow.protocol.handle import HeldBatch
from hybridflow.protocol.side_by_side import join_columns, response_len

T = torch.tensor
Row = tuple[list[int], list[int]]
"""The tokens of a prompt and of its response."""

SHORT, LONG = ([5, 6], [7]), ([1, 2, 3], [4, 8])


def build(rows: list[Row], columns: Any = None, prompt_len: int = 0, length: int = 0, **meta_info: Any) -> DataProto:
    """Return the batch of rows, whose prompts and responses have at least these lengths."""
    prompt_len = max([prompt_len, *(len(prompt) for prompt, _ in rows)])
    length = max([length, *(len(response) for _, response in rows)])
    pad = meta_info.get("pad_token_id", 0)

    def right(values: list, value: Any) -> list:
        return values + [value] * (length - len(values))

    made: dict[str, list] = {name: [] for name in DTYPES}
    for prompt, response in rows:
        left, number = prompt_len - len(prompt), len(prompt) + len(response)
        made["prompts"].append([pad] * left + prompt)
        made["prompt_mask"].append([False] * left + [True] * len(prompt))
        made["responses"].append(right(response, pad))
        made["input_ids"].append(made["prompts"][-1] + made["responses"][-1])
        rest = [0] * (length - len(response))
        made["attention_mask"].append([0] * left + [1] * number + rest)
        made["position_ids"].append([0] * left + list(range(number)) + rest)
        made["response_mask"].append(right([True] * len(response), False))
        made["values"].append(right([token / 4 for token in response], 0.0))
        made["rollout_versions"].append(right(response, -1))
        made["candidate_ids"].append(right([[token, 1] for token in response], [0, 0]))
        made["scores"].append(float(sum(response)))
        made["mine"].append([sum(prompt), 1])
    shapes = {"candidate_ids": (len(rows), length, 2), "scores": (len(rows),), "mine": (len(rows), 2)}
    widths = {"prompts": prompt_len, "prompt_mask": prompt_len}
    widths |= dict.fromkeys(("input_ids", "attention_mask", "position_ids"), prompt_len + length)
    tensors = {
        name: T(column, dtype=DTYPES[name]).reshape(shapes.get(name, (len(rows), widths.get(name, length))))
        for name, column in made.items()
        if columns is None or name in columns
    }
    return DataProto.from_dict(tensors, {"texts": [str(row) for row in rows]}, meta_info)


DTYPES = {
    **dict.fromkeys(("prompts", "responses", "input_ids", "attention_mask", "position_ids"), torch.int64),
    **dict.fromkeys(("rollout_versions", "candidate_ids", "mine"), torch.int64),
    **dict.fromkeys(("prompt_mask", "response_mask"), torch.bool),
    **dict.fromkeys(("values", "scores"), torch.float32),
}
SEQUENCES = {"input_ids", "attention_mask", "position_ids"}
RESPONSES_OF_TOKENS = {"responses", "response_mask", "values", "rollout_versions"}


def assert_equal(found: DataProto, expected: DataProto) -> None:
    assert {name: (column.dtype, column.tolist()) for name, column in found.batch.items()} == {
        name: (column.dtype, column.tolist()) for name, column in expected.batch.items()
    }
    assert found.non_tensor_batch["texts"].tolist() == expected.non_tensor_batch["texts"].tolist()
    assert found.meta_info == expected.meta_info


TOKENS = st.lists(st.integers(1, 9), max_size=4)
ROWS = st.lists(st.tuples(TOKENS, TOKENS), max_size=3)
PROPERTY = settings(deadline=None, derandomize=True, max_examples=100)


@PROPERTY
@given(st.lists(ROWS, min_size=1, max_size=4), st.sets(st.sampled_from(sorted(DTYPES))), st.sampled_from([0, 9]))
def test_concat_of_parts_is_the_batch_of_all_their_rows(parts, columns, pad):
    columns |= {"responses"} if columns & SEQUENCES and "prompts" not in columns else {"scores"}
    meta_info = {"pad_token_id": pad} if pad else {}
    batches = [build(rows, columns, **meta_info) for rows in parts]
    before = [{name: column.tolist() for name, column in batch.batch.items()} for batch in batches]
    both = DataProto.concat(batches)
    assert_equal(both, build([row for rows in parts for row in rows], columns, **meta_info))
    if len(parts) > 1:
        for column in both.batch.values():
            column.zero_()
    assert [{name: column.tolist() for name, column in batch.batch.items()} for batch in batches] == before


@PROPERTY
@given(ROWS, st.lists(st.sampled_from([*sorted(DTYPES)]), min_size=2, unique=True), st.data())
def test_joined_columns_have_responses_as_long_as_the_longest(rows, columns, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, len(columns) - 1), max_size=2)))
    longest, meta_info = max((len(response) for _, response in rows), default=0), {}
    if data.draw(st.booleans()):
        meta_info = {"pad_token_id": 9}
    parts: list[DataProto] = []
    given_columns: set[str] = set()
    for start, end in zip([0, *cuts], [*cuts, None], strict=True):
        own = set(columns[start:end]) - given_columns
        if own & SEQUENCES and not own & {"prompts", *RESPONSES_OF_TOKENS}:
            own -= SEQUENCES  # of unknown response length
        if not own:
            continue
        given_columns |= own
        part = build(rows, own, length=longest + data.draw(st.integers(0, 2)), **meta_info)
        parts.append(part.select(None, [] if parts else None))
    if parts:
        length = max(response_len(part) or 0 for part in parts)
        assert_equal(join_columns(parts), build(rows, given_columns, length=length, **meta_info))


def test_concat_joins_arrays_and_meta_info_of_any_iterable():
    first = DataProto.from_dict({"x": T([[1, 2]])}, {"o": ["a"], "s": np.array(["long"])}, {"k": 1})
    second = DataProto.from_dict({"x": T([[3, 4], [5, 6]])}, {"o": [[1], {}], "s": np.array(["b", "c"])}, {"m": 2})
    both = DataProto.concat(part for part in (first, second))
    assert both.batch["x"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert both.non_tensor_batch["o"].tolist() == ["a", [1], {}]
    assert both.non_tensor_batch["s"].tolist() == ["long", "b", "c"]
    assert both.meta_info == {"k": 1, "m": 2}


def advantages(values: list, responses: list) -> DataProto:
    return DataProto.from_dict({"advantages": T(values), "responses": T(responses)})


def test_advantages_of_one_number_per_row_are_padded_only_for_one_token():
    per_row, per_token = advantages([[0.5]], [[1, 2]]), advantages([[1.5, 2.5]], [[3, 4]])
    one_token = advantages([[3.0]], [[1]])
    assert DataProto.concat([per_row, advantages([[1.5]], [[7]])]).batch["advantages"].tolist() == [[0.5], [1.5]]
    assert DataProto.concat([one_token, per_token]).batch["advantages"].tolist() == [[3.0, 0.0], [1.5, 2.5]]
    with pytest.raises(BatchError, match="part 0 has one number per row"):
        DataProto.concat([per_row, per_token])
    wide = DataProto.from_dict({"old_log_probs": torch.zeros(1, 3)})
    for part, expected in ((per_row, [[0.5]]), (per_token, [[1.5, 2.5, 0.0]]), (one_token, [[3.0, 0.0, 0.0]])):
        assert join_columns([part, wide]).batch["advantages"].tolist() == expected
    assert join_columns([per_row.select(["advantages"]), wide]).batch["advantages"].tolist() == [[0.5]]
    returns = DataProto.from_dict({"returns": torch.ones(1, 3)})
    assert join_columns([one_token.select(["responses"]), returns]).batch["responses"].tolist() == [[1, 0, 0]]
    alone = DataProto.from_dict({"responses": torch.ones(1, 2), "values": torch.ones(1)})  # values: one per row
    assert join_columns([alone, wide]).batch["values"].tolist() == [1.0]


def test_column_added_to_the_glossary_is_padded(monkeypatch):
    monkeypatch.setitem(FIELDS, "mine", Field("mine", ("batch", "my_len"), torch.float32, "left", -2.0))
    both = DataProto.concat([DataProto.from_dict({"mine": torch.ones(1, n)}) for n in (1, 2)])
    assert both.batch["mine"].tolist() == [[-2.0, 1.0], [1.0, 1.0]]


def test_response_len_is_the_length_of_the_responses():
    for columns, expected in (
        (None, 2), (["input_ids", "prompts", "scores"], 2), (["input_ids", "scores"], None), (["prompts"], None)
    ):  # fmt: skip
        assert response_len(build([SHORT, LONG], columns)) == expected
    for width, expected in ((1, None), (3, 3)):
        assert response_len(DataProto.from_dict({"advantages": torch.ones(2, width)})) == expected
    assert response_len(DataProto(meta_info={"k": 1})) is None


def test_shorter_rows_of_a_future_join_columns_computed_for_all_rows():
    columns = ("responses", "input_ids")
    parts = [DataProto.from_dict({"responses": T(r), "input_ids": T(i)}) for r, i in (
        ([[1], [2]], [[7, 1], [8, 2]]), ([[3, 4]], [[9, 3, 4]])
    )]  # fmt: skip
    future = DataProtoFuture(DataProto.concat, [HeldBatch(part) for part in parts], None, 3, columns, [2, 1])
    joined = future.union(DataProto.from_dict({"advantages": T([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])}))
    first = joined.slice(0, 2).get()
    assert first.batch["responses"].tolist() == [[1, 0], [2, 0]]
    assert first.batch["input_ids"].tolist() == [[7, 1, 0], [8, 2, 0]]
    assert first.batch["advantages"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    turned = joined.select_rows(np.array([2, 0, 1])).get()
    assert turned.batch["input_ids"].tolist() == [[9, 3, 4], [7, 1, 0], [8, 2, 0]]


def test_joined_meta_info_is_merged_as_in_union_and_parts_are_not_changed():
    first = DataProto.from_dict({"responses": torch.ones(1, 1)}, meta_info={"step": 1, "metrics": {"a": 1.0}})
    second = DataProto.from_dict({"values": torch.ones(1, 2)}, meta_info={"step": 1, "metrics": {"b": 2.0}})
    joined = join_columns([first, second])
    assert joined.meta_info == {"step": 1, "metrics": {"a": 1.0, "b": 2.0}}
    joined.meta_info["k"] = 1
    assert (first.batch["responses"].tolist(), first.meta_info) == ([[1]], {"step": 1, "metrics": {"a": 1.0}})
    assert join_columns([first]).batch["responses"].tolist() == [[1]]


def two(first: Any, second: Any) -> list[DataProto]:
    return [DataProto.from_single_dict({"x": first}), DataProto.from_single_dict({"x": second})]


RESPONSES = build([SHORT], ["responses"])


@pytest.mark.parametrize(
    ("join", "parts", "error", "message"),
    [
        (DataProto.concat, [build([SHORT], ["input_ids"]), build([LONG], ["input_ids"])], BatchError,
         r"'input_ids'.*\(1, 3\), \(1, 5\); the batch needs prompts or responses"),
        (DataProto.concat, [RESPONSES.union(DataProto.from_dict({"prompts": T([[1]]), "input_ids": T([[1, 2]])})),
                            RESPONSES.union(DataProto.from_dict({"prompts": T([[1]]), "input_ids": T([[1]])}))],
         BatchError, "in part 1 a prompt of length 1 and a response of length 1"),
        (DataProto.concat, two(torch.zeros(1, 2), torch.zeros(1, 3)), BatchError,
         r"'x' has different lengths in the parts: \(1, 2\), \(1, 3\)"),
        (DataProto.concat, two(torch.zeros(1), np.zeros(1)), FieldError, r"batch of part 0 has \['x'\], but that"),
        (DataProto.concat, [two(np.zeros(1), np.zeros(1))[0], DataProto()], FieldError, "non_tensor_batch of part 0"),
        *[
            (DataProto.concat, two(first, second), BatchError, r"'x' is .* in part 0, but .* in part 1")
            for first, second in (
                (torch.zeros(1), torch.zeros(1, dtype=torch.int64)),
                (torch.zeros(1), torch.zeros(1, 1)),
                (torch.zeros(1, 2, 3), torch.zeros(1, 2, 4)),
                (np.zeros(1), np.zeros(1, dtype=np.int64)),
                (np.zeros(1), np.array(["text"])),
                (np.zeros((1, 2)), np.zeros((1, 3))),
            )
        ],
        (DataProto.concat, [], BatchError, "at least one batch"),
        (DataProto.concat, RESPONSES, BatchError, "in a list or another iterable, got DataProto; write"),
        (DataProto.concat, None, BatchError, "in a list or another iterable, got NoneType"),
        (DataProto.concat, [RESPONSES, 3], BatchError, "in a list or another iterable, got int"),
        (join_columns, [RESPONSES, RESPONSES], FieldError, r"both futures have \['responses', 'texts'\]"),
        (join_columns, two(np.zeros(1), torch.zeros(1)), FieldError, r"both futures have \['x'\]"),
        (join_columns, [RESPONSES, DataProto.from_dict({"values": torch.ones(2, 2)})], BatchError,
         "this batch has 1 rows, the other has 2"),
        (join_columns, [build([SHORT], ["input_ids"]), RESPONSES.select(["responses"], []),
                        DataProto.from_dict({"values": torch.ones(1, 3)})], BatchError, "input_ids"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_an_error(join, parts, error, message):
    with pytest.raises(error, match=message):
        join(parts)
