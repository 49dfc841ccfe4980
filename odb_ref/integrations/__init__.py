"""Thin layers between `odb_ref.torch` and training frameworks; each module needs the framework it is named after.

They use the frameworks' public hooks only and decide nothing about batches: what a framework does to a loss (divide it by the
micro-steps of an update, by its own token count) is met here, so that each loss is scaled exactly once. WEIGHT.
"""

from odb_ref.extras import require

require(__name__, "torch", "numpy", extra="torch")
