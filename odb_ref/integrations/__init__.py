"""Thin layers between `odb_ref.torch` and training frameworks. Each module needs the framework that it is named after.

They hook into the frameworks and decide nothing about batches. A framework may divide a loss by the micro-steps of an
update, or by its own token count. These layers compensate for it, so that each loss is scaled exactly once. WEIGHT.
"""

from odb_ref.extras import require

require(__name__, "torch", "numpy", extra="torch")
