"""Training steps to plan, run and measure: the models of the zoo, and the user's own."""

from rekindle.models.load import load
from rekindle.models.workload import Workload
from rekindle.models.zoo.catalog import available, build

__all__ = ["Workload", "available", "build", "load"]
