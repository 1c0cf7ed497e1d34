from hybridflow.trainers.data_facts import data_facts


class Rows(list):
    fingerprint = "12ab"


def test_rows_and_fingerprint_of_each_data_set_are_recorded():
    assert data_facts(train=Rows([1, 2, 3]), val=None) == {"train_rows": 3, "train_fingerprint": "12ab"}
    assert list(data_facts(train=Rows(), val=Rows())) == [
        *("train_rows", "train_fingerprint", "val_rows", "val_fingerprint")
    ]
