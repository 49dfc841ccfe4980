"""R13's own planner as the kit asks it: in one place, and on one rank. Spec: R13."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from odb_ref.conformance.asking import Exchange
from odb_ref.conformance.vectors import PLANNED, Json, decode
from odb_ref.plan import RankPlan, plan_rank
from tests.conformance.online import answer, run
from tests.plan.judge import make_plan


def plan_here(question: Mapping[str, Json]) -> Json:
    """Plans with `plan_all` or `plan_ranks`, and answers questions about the online protocol."""
    if question["kind"] == "epoch":
        return {"plan": run(question)["groups"]}
    if question["kind"] not in PLANNED:
        return answer(question)
    problem = decode(question, str(question["kind"]))
    plan = make_plan(problem)
    rows = [say(rank, problem.mean) for rank in plan.ranks]
    return {**{name: [row[name] for row in rows] for name in rows[0]}, "report": asdict(plan.report)}


def plan_there(question: Mapping[str, Json], exchange: Exchange) -> Json:
    """Plans one rank with `plan_rank`."""
    given = {name: value for name, value in question.items() if name not in ("kind", "rank", "ranks", "terms", "mean")}
    lengths, terms = given.pop("lengths"), question["terms"]
    if "group_supervised" in given:
        given["group_supervised"] = dict(given["group_supervised"])  # type: ignore[arg-type]
    plan = plan_rank(lengths, exchange=exchange, **given, **terms)  # type: ignore[arg-type]
    mean = question.get("mean")
    return {**say(plan, None if mean is None else str(mean)), "report": asdict(plan.report)}


def say(plan: RankPlan, mean: str | None) -> dict[str, Json]:
    """Returns a rank's micro-batches, and everything reported about them."""
    said: dict[str, Json] = {
        "plan": plan.micro_batches,
        "restored": plan.restore([batch or plan.spare for batch in plan.micro_batches]),
    }
    if mean is not None:
        weights = plan.weights(mean)
        said["weights"] = [[str(weight) for weight in batch] for batch in weights.samples]
        said["scales"] = weights.scales
    return said
