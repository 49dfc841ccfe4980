"""Planners with one defect each, made from ours. A judge must find this defect and nothing else.

They do not consult the judge. If a change would break more than it should, a rule of the planner leaves the case unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from odb_ref.conformance.asking import Exchange
from odb_ref.plan import plan_rank
from tests.conformance.ours import plan_here, plan_there

Question = Mapping[str, Any]
Said = dict[str, Any]
Plan = list[list[list[int]]]


def plan(question: Question) -> Plan:
    said: Any = plan_here(question)
    return [[[*batch] for batch in own] for own in said["plan"]]


def change(question: Question, **terms: Any) -> Question:
    """Returns the question with other terms."""
    return {**question, "terms": {**question["terms"], **terms}}


def is_plain(question: Question) -> bool:
    """Returns True if a micro-batch costs the sum of its lengths, and nothing else matters."""
    return set(question["terms"]) <= {"budget", "at_least"} and "together" not in question


def measure(question: Question, rank: int, batch: list[int]) -> int:
    own = question["lengths"][rank]
    if question["kind"] == "plan_all":
        own = [length for lengths in question["lengths"] for length in lengths]
    return sum(own[index] for index in batch)


def exceed_the_budget(question: Question) -> Plan:
    plan(question)
    return plan(change(question, budget=question["terms"]["budget"] + 1))


def drop_a_sample(question: Question) -> Plan:
    found = plan(question)
    longer = [batch for own in found for batch in own if len(batch) > 1]
    if is_plain(question) and longer:
        longer[-1].pop()
    return found


def repeat_a_sample(question: Question) -> Plan:
    found = plan(question)
    for rank, own in enumerate(found if is_plain(question) else ()):
        for batch in filter(None, own):
            if measure(question, rank, [*batch, batch[0]]) <= question["terms"]["budget"]:
                batch.append(batch[0])
                return found
    return found


def take_anothers(question: Question) -> Plan:
    """Gives a rank a sample that it does not hold."""
    found = plan(question)
    found[0][0].append(sum(map(len, question["lengths"])))
    return found


def forget_to_synchronise(question: Question) -> Plan:
    """Gives one rank one more micro-batch, an empty one, for which it has no sample."""
    found = plan(question)
    if is_plain(question) and question["kind"] == "plan_ranks":
        for own in found:
            if all(len(batch) <= 1 for batch in own):
                own.append([])
                return found
    return found


def forget_the_multiple(question: Question) -> Plan:
    plan(question)
    return plan(change(question, multiple_of=1, at_least=1))


def leave_one_empty(question: Question) -> Plan:
    found = plan(question)
    for rank, own in enumerate(found if is_plain(question) else ()):
        for one, other in combinations(filter(None, own), 2):
            if measure(question, rank, one + other) <= question["terms"]["budget"]:
                one.extend(other)
                other.clear()
                return found
    return found


def part_what_belongs_together(question: Question) -> Plan:
    plan(question)
    terms = {name: value for name, value in question["terms"].items() if name != "within"}
    return plan({name: value for name, value in question.items() if name != "together"} | {"terms": terms})


def order_backwards(question: Question) -> Plan:
    found = plan(question)
    return [own[::-1] for own in found] if "order" in question["terms"] else found


def order_by_hash(question: Question) -> Plan:
    found = plan(question)
    if "order" not in question["terms"]:
        for own in found:
            own.sort(key=lambda batch: hash(str(batch)))
    return found


def refuse_who_is_short(question: Question) -> Plan:
    found = plan(question)
    if any(not batch for own in found for batch in own):
        raise ValueError("too few samples")
    return found


def restore_as_run(question: Question) -> Said:
    found = plan(question)
    return {"plan": found, "restored": [[index for batch in own for index in batch] for own in found]}


def weigh_for_one_rank(question: Question) -> Said:
    said: Any = plan_here(question)
    if "scales" in said:
        said["scales"] = [[scale / len(said["plan"]) for scale in own] for own in said["scales"]]
    return {name: value for name, value in said.items() if name != "report"}


def weigh_alike(question: Question) -> Said:
    """Weighs each token equally, whatever mean is asked for."""
    said: Any = plan_here({**question, "mean": "token-mean"} if "mean" in question else question)
    return {name: value for name, value in said.items() if name != "report"}


def promise_too_much(question: Question) -> Said:
    """Claims that the least possible number is one micro-batch more."""
    said: Any = plan_here(question)
    return {"plan": said["plan"], "report": {"least": said["report"]["least"] + 1}}


def say_nothing_when_short(question: Question) -> Plan | None:
    found = plan(question)
    return None if any(not batch for own in found for batch in own) else found


def take_one_more(question: Question) -> Plan:
    """Uses one micro-batch more than needed."""
    found = plan(question)
    if is_plain(question) and sum(map(len, question["lengths"])):
        return plan(change(question, at_least=len(found[0]) + 1))
    return found


IN_ONE_PLACE = {
    "BUDGET": [exceed_the_budget],
    "COVER": [drop_a_sample],
    "ONCE": [repeat_a_sample],
    "HOME": [take_anothers],
    "EQUAL": [forget_to_synchronise],
    "MULTIPLE": [forget_the_multiple],
    "NONEMPTY": [leave_one_empty],
    "TOGETHER": [part_what_belongs_together],
    "ORDER": [order_backwards],
    "DETERMINISM": [order_by_hash],
    "EXPECT": [refuse_who_is_short],
    "RESTORE": [restore_as_run],
    "WEIGHT": [weigh_for_one_rank, weigh_alike],
    "REPORT": [promise_too_much],
    "ANSWER": [say_nothing_when_short],
    "EXACT": [take_one_more],
}


def raise_before_the_exchange(question: Question, exchange: Exchange) -> Any:
    if max(question["lengths"], default=0) > question["terms"]["budget"] and "oversize" not in question["terms"]:
        raise ValueError("too long")
    return plan_there(question, exchange)


def refuse_alone(question: Question, exchange: Exchange) -> Any:
    """Exchanges, but then only the rank with the long sample refuses."""
    try:
        return plan_there(question, exchange)
    except ValueError as error:
        if ": sample" in str(error) and f"rank {question['rank']}:" not in str(error):
            return {"plan": []}
        raise


def refuse_in_words_of_its_own(question: Question, exchange: Exchange) -> Any:
    try:
        return plan_there(question, exchange)
    except ValueError as error:
        raise ValueError(f"on rank {question['rank']}: {error}") from error


def count_alone(question: Question, exchange: Exchange) -> Any:
    """All agree, but then each rank uses its own count."""
    said: Any = plan_there(question, exchange)
    if "group_supervised" in question:
        return said["plan"]
    given = {name: question[name] for name in ("supervised", "together", "uses") if name in question}
    alone = plan_rank(question["lengths"], **given, **{**question["terms"], "short": "empty"}).micro_batches
    return alone if len(alone) < len(said["plan"]) else said["plan"]


def leave_early(question: Question, exchange: Exchange) -> Any:
    """Makes a rank without samples leave, as if it were not needed."""
    return plan_there(question, exchange) if question["lengths"] else {"plan": [[]]}


ON_RANKS = {
    "TERMINATION": [raise_before_the_exchange, leave_early],
    "AGREE": [refuse_alone, refuse_in_words_of_its_own],
    "EQUAL": [count_alone],
}


def say_something_else(question: Question) -> Any:
    """Answers something that is not a plan."""
    return {"plan": 5} if question["lengths"] else 5


def say_no_json(_: Question) -> Any:
    return {1: 2, "a": 3, (4,): 5}


def end_the_process(question: Question) -> Any:
    raise SystemExit(0)


def refuse_all(question: Question) -> Any:
    raise ValueError("no")
