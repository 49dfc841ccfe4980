"""Checks of a rule by itself: it stays within its bounds, depends on the agreement alone, and has a name of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

from odb_ref.core.batching.rules import RULES, compute_bounds
from odb_ref.core.offer import Offer
from odb_sim.verify.agreements import describe_agreement, fit, is_possible
from odb_sim.verify.guard import CHANGES, OUTSIDE
from odb_sim.verify.rule_client import PROCESSES, Answer, RuleProcesses
from odb_sim.verify.stages import Finding

Ask = Callable[[Sequence[Offer]], Sequence[Answer]]

BOUNDS: Final = "RULE-BOUNDS"
PURE: Final = "RULE-PURE"
NAME: Final = "RULE-NAME"
SHUFFLED: Final = 12_000
"""The number of agreements that each rank from 2 on is asked about, a different random sample for each."""
_NEAR: Final = 64
_AGAIN: Final = 2_000
_FURTHER: Final = 300


def _find(property_: str, detail: str, case: Offer | str) -> Finding:
    shown = case if isinstance(case, str) else f"agreement {describe_agreement(case)}"
    return Finding(property=property_, detail=detail, case=shown)


def check_bounds(ask: Ask, agreements: Sequence[Offer], answers: Sequence[Answer]) -> Finding | None:
    """Returns a finding if the rule leaves its bounds, with the first such agreement made small. Spec: R3.3."""
    for agreement, answer in zip(agreements, answers, strict=True):
        detail = _describe_breach(agreement, answer)
        if detail is not None:
            is_slow = isinstance(answer, str) and answer.startswith(("does not answer", "ends its process, with"))
            small = agreement if is_slow else _shrink(ask, agreement)
            again = None if is_slow else _describe_breach(small, *ask([small]))
            is_impure = isinstance(answer, str) and answer.startswith((OUTSIDE, CHANGES))
            return _find(PURE if is_impure else BOUNDS, again or detail, small)
    return None


def is_within(agreement: Offer, answer: Answer) -> bool:
    """Returns True when the answer is a target within the bounds. Spec: R3.3."""
    return _describe_breach(agreement, answer) is None


def _describe_breach(agreement: Offer, answer: Answer) -> str | None:
    if isinstance(answer, str):
        return f"the rule {answer}"
    low, high = compute_bounds(agreement)
    return None if low <= answer <= high else f"the rule answers {answer}, outside {low}..{high}"


def _shrink(ask: Ask, agreement: Offer) -> Offer:
    """Returns the agreement with its numbers lowered in turn, as far as the breach remains, until nothing changes."""
    numbers = ("samples_max", "groups_max", "samples_min", "groups_min", "due_max", "round_max", "budget_min")
    while True:
        before = agreement
        for name in numbers:
            tried = [smaller for smaller in _iterate_lower(agreement, name) if is_possible(smaller)]
            answers = ask(tried)
            failing = (one for one, answer in zip(tried, answers, strict=True) if _describe_breach(one, answer))
            agreement = next(failing, agreement)
        if agreement == before:
            return agreement


def _iterate_lower(agreement: Offer, name: str) -> list[Offer]:
    """Returns the agreement with one number lowered, and others to match, from the lowest value up."""
    value: int = getattr(agreement, name)
    lower = {*range(min(value, _NEAR)), *range(max(0, value - _NEAR), value)}
    lower |= {value - (value >> shift) for shift in range(1, value.bit_length())}
    tried = (fit(agreement, name, number) for number in sorted(lower))
    # A number that is NONE has lower ones for which others must be higher.
    return [one for one in tried if one.groups_max <= agreement.groups_max and one.samples_max <= agreement.samples_max]


def check_purity(rule: RuleProcesses, agreements: Sequence[Offer], answers: Sequence[Answer]) -> Finding | None:
    """Returns a finding if an answer depends on more than the agreement, such as earlier questions or the process.

    Rank 0 has answered all agreements in order. It is asked some again, rank 1 all backwards, and each further rank some in a
    different order. Finally some are asked under further hash seeds.
    """
    known = list(zip(agreements, answers, strict=True))
    processes = chain(map(rule.get_process, range(PROCESSES)), rule.iterate_further())
    for rank, process in enumerate(processes):
        asked = known[:_AGAIN]
        if rank == 1:
            asked = known[::-1]
        elif rank:
            asked = random.Random(rank).sample(known, min(SHUFFLED if rank < PROCESSES else _FURTHER, len(known)))
        found = process.ask([agreement for agreement, _ in asked])
        differing = [
            (agreement, one, other) for (agreement, one), other in zip(asked, found, strict=True) if one != other
        ]
        if differing:
            agreement, one, other = min(differing, key=lambda item: (item[0].samples_max, item[0].round_max))
            who = (
                f"rank {rank}, another process, asked in another order, answers" if rank else "asked again, it answers"
            )
            return _find(PURE, f"rank 0 answered {one}; {who} {other}", agreement)
    return check_state(rule)


def check_state(rule: RuleProcesses) -> Finding | None:
    """Returns a finding if a rank's rule keeps state between questions, since its answers may then change after more."""
    changes = (rule.get_process(rank).find_change() for rank in range(PROCESSES))
    change = next(filter(None, changes), "")
    advice = "what it has computed it may remember by functools.lru_cache alone"
    return _find(PURE, f"it keeps state between calls: {change}; {advice}", "what it keeps") if change else None


def check_name(rule: RuleProcesses, agreements: Sequence[Offer], answers: Sequence[Answer]) -> Finding | None:
    """Returns a finding if the rule's name does not identify it. Ranks compare rules by name only (R1.4)."""
    description = rule.description
    if not description.name:
        return _find(NAME, f"its name is {description.shown}, which is not a word", "its name")
    for rank in range(1, PROCESSES):
        other = rule.get_process(rank).description
        if other.name != description.name:
            detail = f"it is called {description.shown} on rank 0 and {other.shown} on rank {rank}"
            return _find(NAME, detail, "its name")
    shipped = RULES.get(description.name)
    if shipped is not None:
        for agreement, answer in zip(agreements, answers, strict=True):
            expected = shipped.compute_target(agreement)
            if answer != expected:
                detail = f"it is called {description.name!r} as a shipped rule is, which answers {expected}, and this {answer}"
                return _find(NAME, detail, agreement)
    variant = rule.get_process(0).find_variant(random.Random(0).sample(agreements, min(3_000, len(agreements))))
    if variant is not None:
        detail = f"with {variant.parameter}={variant.value} it is called {description.name!r} too, and answers {variant.theirs}"
        return _find(NAME, f"{detail} in place of {variant.ours}", variant.agreement)
    return None
