"""Tools for your own loop: a budget that fits memory, steps that survive running out of it, scaled rates, inference."""

from odb_ref.torch.loop.budget import MemoryFit, MemoryPoint, fit_token_budget, rehearse
from odb_ref.torch.loop.guard import StepGuard
from odb_ref.torch.loop.inference import generate
from odb_ref.torch.loop.rates import scaled_learning_rate
from odb_ref.torch.loop.splitting import count_pairs, split_pairs

__all__ = [
    "MemoryFit",
    "MemoryPoint",
    "StepGuard",
    "count_pairs",
    "fit_token_budget",
    "generate",
    "rehearse",
    "scaled_learning_rate",
    "split_pairs",
]
