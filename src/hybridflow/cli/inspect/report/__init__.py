"""A page that shows a run: one HTML file that needs no network, made from the run's files."""

from hybridflow.cli.inspect.report.page import make_page, write_report
from hybridflow.cli.inspect.report.page_data import page_data

__all__ = ["make_page", "page_data", "write_report"]
