"""The zoo: ready training steps to plan, run and measure, and a loader for the user's own.

Nothing else in the library imports this package; the command line, the benchmarks and the tests do.
"""

from rekindle.models.load import load
from rekindle.models.workload import Workload
from rekindle.models.zoo.catalog import available, build

__all__ = ["Workload", "available", "build", "load"]
