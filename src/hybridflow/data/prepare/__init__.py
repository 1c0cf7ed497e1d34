"""Preparation of data sets: `train.parquet` and `test.parquet` in one schema."""
