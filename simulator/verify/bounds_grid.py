"""A rule by itself: within its bounds on every agreement of a grid, and a function of the agreement and nothing else."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

from odb_ref.core.errors import UsageError
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.rules import TargetRule, compute_bounds

_SMALL_SAMPLES: Final = 7
_LARGE: Final = 4096
_TYPICAL: Final = {"round": 3, "fingerprint": 1}
_ASK: Final = """
import json, sys
from odb_ref.core.offer import Offer
from simulator.explore.scenario import load_rule
rule = load_rule(sys.argv[1])
def ask(wire):
    try:
        return rule.compute_target(Offer.from_wire(wire))
    except Exception:
        return None
print(json.dumps([ask(wire) for wire in json.load(sys.stdin)]))
"""


@dataclass(frozen=True, slots=True)
class Refutation:
    """Why a rule is refused: the property, what happened, and the agreement that shows it, as small as could be found."""

    property: str
    detail: str
    agreement: Offer


def make_agreement(
    *, samples_min: int, samples_max: int, groups_min: int, groups_max: int, due_max: int, round_: int
) -> Offer:
    """An agreement on a round that goes on: nobody has failed or stopped, and every rank is ready."""
    return Offer(
        round_min=round_,
        round_max=round_,
        fingerprint_min=_TYPICAL["fingerprint"],
        fingerprint_max=_TYPICAL["fingerprint"],
        ready_min=1,
        failed_rank=NONE,
        stop_step=NONE,
        stop_rank=NONE,
        samples_min=samples_min,
        samples_max=samples_max,
        groups_min=groups_min,
        groups_max=groups_max,
        due_max=due_max,
    )


def iterate_grid() -> Iterator[Offer]:
    """Every agreement on up to 7 samples a rank, smallest first, in an early round and a late one.

    All that ranks can agree on: some rank holds a sample, no rank has more groups than samples, and none that reads on has
    more than the rank with most; no more groups are due than there are.
    """
    for samples_max in range(1, _SMALL_SAMPLES + 1):
        for groups_max in range(1, samples_max + 1):
            for samples_min in range(samples_max + 1):
                for groups_min in (*range(1, groups_max + 1), NONE):
                    for due_max in range(groups_max + 1):
                        for round_ in (0, _TYPICAL["round"]):
                            yield make_agreement(
                                samples_min=samples_min,
                                samples_max=samples_max,
                                groups_min=groups_min,
                                groups_max=groups_max,
                                due_max=due_max,
                                round_=round_,
                            )


def iterate_large(count: int, seed: int) -> Iterator[Offer]:
    """Random agreements on up to 4,096 samples a rank, with the extremes more likely than chance."""
    draw = random.Random(seed)

    def between(low: int, high: int) -> int:
        return draw.choice((low, high, draw.randint(low, high), min(high, low + 1), max(low, high - 1)))

    for _ in range(count):
        samples_max = 2 ** draw.randint(0, 12) if draw.random() < 0.5 else draw.randint(1, _LARGE)
        groups_max = between(1, samples_max)
        groups_min = NONE if draw.random() < 0.2 else between(1, groups_max)
        round_ = draw.choice((0, 1, 2, 5, 100, 10_000))
        yield make_agreement(
            samples_min=between(0, samples_max),
            samples_max=samples_max,
            groups_min=groups_min,
            groups_max=groups_max,
            due_max=between(0, groups_max),
            round_=round_,
        )


def check_bounds(rule: TargetRule, agreements: Sequence[Offer]) -> Refutation | None:
    """The first agreement on which the rule leaves its bounds, made smaller as far as that goes. Spec: R3.3."""
    for agreement in agreements:
        detail = _describe_breach(rule, agreement)
        if detail is not None:
            small = _shrink(rule, agreement)
            return Refutation("RULE-BOUNDS", _describe_breach(rule, small) or detail, small)
    return None


def _describe_breach(rule: TargetRule, agreement: Offer) -> str | None:
    low, high = compute_bounds(agreement)
    try:
        target = rule.compute_target(agreement)
    except Exception as error:
        return f"the rule raises {type(error).__name__}: {error}"
    if type(target) is not int:
        return f"the rule answers {target!r}, which is no int"
    return None if low <= target <= high else f"the rule answers {target}, outside {low}..{high}"


def _shrink(rule: TargetRule, agreement: Offer) -> Offer:
    """The agreement with each number as low as the breach allows, one after the other, until nothing changes."""
    numbers = ("samples_max", "groups_max", "samples_min", "groups_min", "due_max", "round_max")
    while True:
        before = agreement
        for name in numbers:
            value: int = getattr(agreement, name)
            for lower in range(min(value, _LARGE)):
                smaller = replace(agreement, **{name: lower})
                if name == "round_max":
                    smaller = replace(smaller, round_min=lower)
                if _is_possible(smaller) and _describe_breach(rule, smaller) is not None:
                    agreement = smaller
                    break
        if agreement == before:
            return agreement


def _is_possible(agreement: Offer) -> bool:
    groups_min = 1 if agreement.groups_min == NONE else agreement.groups_min
    return (
        1 <= groups_min <= agreement.groups_max <= agreement.samples_max
        and agreement.samples_min <= agreement.samples_max
        and agreement.due_max <= agreement.groups_max
    )


def check_purity(rule: TargetRule, name: str, agreements: Sequence[Offer]) -> Refutation | None:
    """An agreement on which the answer depends on more than the agreement: on what was asked before, or on the process.

    Each is asked again in another order, of a copy, and in a new process with another hash seed: as the ranks of a job
    are, and a job that resumes.
    """
    first = [_ask(rule, agreement) for agreement in agreements]
    other = _copy(rule)
    backwards = [_ask(other, agreement) for agreement in reversed(agreements)][::-1]
    refuted = _compare(agreements, first, backwards, "asked in another order, the rule answers")
    if refuted is not None:
        return refuted
    return _compare(agreements, first, _ask_elsewhere(name, agreements), "in another process, the rule answers")


def _ask(rule: TargetRule, agreement: Offer) -> int | None:
    try:
        return rule.compute_target(agreement)
    except Exception:
        return None  # A breach of the bounds, which is said there.


def _copy(rule: TargetRule) -> TargetRule:
    try:
        return copy.deepcopy(rule)
    except Exception:
        return rule


def _ask_elsewhere(name: str, agreements: Sequence[Offer]) -> list[int | None]:
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "1",
        "PYTHONPATH": os.pathsep.join(["", *sys.path]).strip(os.pathsep),
    }
    answer = subprocess.run(
        [sys.executable, "-c", _ASK, name],
        input=json.dumps([agreement.to_wire() for agreement in agreements]),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"rule {name!r} cannot be asked in another process: {reason}")
    found: list[int | None] = json.loads(answer.stdout.splitlines()[-1])
    return found


def _compare(
    agreements: Sequence[Offer], first: Sequence[int | None], second: Sequence[int | None], what: str
) -> Refutation | None:
    for agreement, one, other in zip(agreements, first, second, strict=True):
        if one != other and one is not None:
            return Refutation("RULE-PURE", f"{what} {other}, before {one}", agreement)
    return None


def describe_agreement(agreement: Offer) -> str:
    """What of an agreement a rule may go by, in one line."""
    shown = ("round_min", "samples_min", "samples_max", "groups_min", "groups_max", "due_max")
    values = {item.name: getattr(agreement, item.name) for item in fields(Offer) if item.name in shown}
    return ", ".join(f"{name}={'NONE' if value == NONE else value}" for name, value in values.items())
