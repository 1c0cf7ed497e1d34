"""Configurations of verl as recipes of hybridflow."""

from hybridflow.cli.migration.convert import Converted, convert

__all__ = ["Converted", "convert"]
