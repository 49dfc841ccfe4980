"""Loads a mutant of the core: the same modules, with one text replaced in one of them, under a separate package name."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from types import ModuleType

from odb_sim.explore.bounds import Bounds
from odb_sim.explore.driver import Core

from odb_ref.core.config import Config
from odb_ref.core.invariants import check_transition
from odb_ref.core.offer import Offer
from odb_ref.core.state import State
from tests.mutants.defects import Defect

REBUILT = (
    "offer", "batching.budgets", "batching.sizes", "batching.grouping", "batching.layouts", "batching.order",
    "batching.alignment", "batching.rules", "batching.shards", "batching.updates", "rounds", "resume", "exchange",
    "machine",
)  # fmt: skip
"""The modules that decide, in import order. Values (states, events, effects, offers) keep their types."""

_names = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant(Defect):
    """A small defect, and the check that must find it.

    ``module`` is below the core. ``property`` is the id of the property that ``bounds`` shows to be broken.
    ``needs_invariants`` marks defects that only the core's own invariants can see: wrong books without effect on a driver.
    """

    property: str
    bounds: Bounds
    needs_invariants: bool = False
    prelude: str = ""
    """Text to append to the module. Used for defects with a memory, whose schedules cannot be replayed."""


@contextmanager
def load(mutant: Mutant, *, has_invariants: bool = True) -> Iterator[tuple[Core, Bounds]]:
    """Yields the mutant's core, and its bounds with the mutant's own target rule."""
    package = f"odb_mutant_{next(_names)}"
    modules = {name: _build(package, name, mutant) for name in REBUILT}
    try:
        machine, offer, rules = modules["machine"], modules["offer"], modules["batching.rules"]
        layouts, order, sizes = (modules[f"batching.{name}"] for name in ("layouts", "order", "sizes"))

        def reduce(offers: tuple[Offer, ...]) -> Offer:
            if mutant.module != "offer":
                return offer.reduce_offers(offers)
            return Offer(**asdict(offer.reduce_offers(offer.Offer(**asdict(item)) for item in offers)))

        def accept(config: Config, before: State, after: State) -> None:
            """Checks nothing, so that only the world's own checks remain."""

        check = check_transition if has_invariants else accept
        acceptance = modules["batching.budgets"].Acceptance
        core = Core(modules["resume"].resume, machine.transition, check, reduce, acceptance)
        rule, layout = rules.RULES[mutant.bounds.rule.name], layouts.Layout(str(mutant.bounds.layout))
        bounds = replace(
            mutant.bounds,
            rule=rule,
            layout=layout,
            order=order.StepOrder(str(mutant.bounds.order)),
            sizes=sizes.Sizes(str(mutant.bounds.sizes)),
        )
        yield core, bounds
    finally:
        for name in REBUILT:
            sys.modules.pop(f"{package}.{name}", None)


def _build(package: str, name: str, mutant: Mutant) -> ModuleType:
    original = import_module(f"odb_ref.core.{name}")
    if name == "offer" and mutant.module != "offer":
        return original
    source = inspect.getsource(original)
    if name == mutant.module:
        source = mutant.plant(source) + mutant.prelude
    for other in REBUILT:
        # A mutant of the offer changes how offers are reduced, not their type, so the other modules keep the original type.
        if other != "offer":
            source = source.replace(f"from odb_ref.core.{other} import", f"from {package}.{other} import")
    module = ModuleType(f"{package}.{name}")
    sys.modules[module.__name__] = module
    exec(compile(source, f"<{mutant.name}: {name}>", "exec"), module.__dict__)
    return module
