import numpy as np
import pytest
import torch

from hybridflow.controller.columns import MethodColumns, resolve_columns
from hybridflow.errors import DispatchError, FieldError
from hybridflow.protocol import DataProto

BATCH = DataProto.from_dict(
    tensors={"responses": torch.zeros(4, 2), "advantages": torch.zeros(4, 2)},
    non_tensors={"texts": np.array(["a", "b", "c", "d"], dtype=object)},
    meta_info={"step": 3},
)


def reading(*columns):
    return MethodColumns("Actor.update", tuple(columns), None, 1)


def returning(writes: tuple[str, ...] | None, rows_per_row: int | None = 1):
    return MethodColumns("Actor.update", None, writes, rows_per_row)


def test_a_declaration_is_resolved_with_the_configuration():
    columns = resolve_columns("Actor.update", lambda kl: ("a", "b") if kl else ("a",), None, lambda kl: 2, True)
    assert columns == MethodColumns("Actor.update", ("a", "b"), None, 2)
    assert resolve_columns("Actor.update", ["a"], (), "one", None).rows_per_row is None  # pyright: ignore[reportArgumentType]


def test_a_function_that_returns_an_invalid_declaration_is_an_error():
    with pytest.raises(DispatchError, match=r"Actor\.update: reads='a'"):
        resolve_columns("Actor.update", lambda config: "a", None, "same", 1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DispatchError, match=r"Actor\.update: rows=-1"):
        resolve_columns("Actor.update", None, None, lambda config: -1, 1)


def test_selection_applies_to_a_list_of_batches():
    reduced = reading("responses").select_reads([BATCH, BATCH])
    assert [list(part.batch.keys()) for part in reduced] == [["responses"], ["responses"]]
    assert reading("responses").select_reads([1, "responses"]) == [1, "responses"]


def test_error_names_method_missing_column_batch_and_producer():
    with pytest.raises(
        FieldError,
        match=r"Actor\.update needs 'ref_log_probs', but the batch has advantages, responses, texts\. "
        r"It comes from: reference\.",
    ):
        reading("responses", "ref_log_probs").check_reads([BATCH])


def test_columns_may_come_from_any_batch_of_a_call():
    other = DataProto.from_dict(tensors={"values": torch.zeros(4)})
    reading("responses", "values").check_reads([BATCH, 0.5, other])
    reading("responses", "values").check_reads([[BATCH, BATCH], other])
    with pytest.raises(FieldError, match="needs 'responses'"):
        reading("responses").check_reads([[BATCH, other]])


def test_a_result_must_have_exactly_the_declared_columns():
    returning(("responses", "advantages", "texts")).check_output(BATCH, 0, 4)
    with pytest.raises(FieldError, match="missing values; not declared advantages, texts"):
        returning(("responses", "values")).check_output(BATCH, 0, 4)
    with pytest.raises(FieldError, match=r"on rank 2 returned .*writes=\(\): missing nothing"):
        returning(()).check_output(BATCH, 2, 4)


def test_a_method_with_declared_columns_must_return_a_batch():
    with pytest.raises(DispatchError, match="on rank 0 returned NoneType, but declares writes"):
        returning(("values",)).check_output(None, 0, 4)
    returning(()).check_output(None, 0, 4)
    returning(None).check_output(3.5, 0, 4)


def test_a_result_must_have_the_declared_number_of_rows():
    returning(None, 2).check_output(BATCH, 0, 2)
    with pytest.raises(DispatchError, match=r"on rank 1 returned 4 rows for 2, but declares 1 for each.*return 2 rows"):
        returning(None, 1).check_output(BATCH, 1, 2)
    with pytest.raises(DispatchError, match="returned 4 rows, but declares rows='one'"):
        returning(None, None).check_output(BATCH, 0, 4)
