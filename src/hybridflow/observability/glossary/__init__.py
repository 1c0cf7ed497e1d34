"""The entries of the glossary of metrics, by subject; `metric_names` joins them."""
