"""An odb-trace file as data for spec/tla/TraceCheck.tla."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from odb_ref.core.offer import NONE
from odb_ref.trace.format import Header, JsonObject, Record
from odb_ref.trace.reading import read_trace
from tests.tla.tlc import TLA_NONE, Configuration, complete, to_tla

_ANSWERS = {"agreed": "post_offer", "counted": "post_counts", "reported": "post_report"}


def _who(rank: object) -> object:
    return rank + 1 if isinstance(rank, int) and rank != NONE else TLA_NONE


def _convert_offer(offer: Mapping[str, object], budget_tokens: int) -> dict[str, object]:
    return {
        "kind": "offer", "round": offer["round_min"], "ready": offer["ready_min"], "failed": _who(offer["failed_rank"]),
        "stop": _who(offer["stop_rank"]), "step": offer["stop_step"], "samples": offer["samples_min"],
        "reading": offer["groups_min"], "groups": offer["groups_max"], "due": offer["due_max"],
        "budget": min(budget_tokens, _integer(offer.get("budget_min", NONE))),
    }  # fmt: skip


def _convert_effects(effects: Sequence[JsonObject], budget_tokens: int) -> dict[str, object]:
    line: dict[str, object] = {"read": 0, "delivered": [], "collate": [], "post": {"kind": "none"}, "finish": []}
    delivered: list[object] = []
    for effect in effects:
        match effect:
            case {"kind": "read", "count": int(count)}:
                line["read"] = count
            case {"kind": "deliver", "number": int(number)}:
                delivered.append(number)
            case {"kind": "collate", "round": int(round_), "steps": [dict(first), *_] as steps}:
                sizes = [len(step["positions"]) for step in steps if isinstance(step, dict)]
                line["collate"] = [round_, first["number"], *sizes]
            case {"kind": "post_offer", "offer": dict(offer)}:
                line["post"] = _convert_offer(offer, budget_tokens)
            case {"kind": "post_counts", "counts": list(counts)}:
                line["post"] = {"kind": "counts", "sizes": [row[0] for row in counts]}
            case {"kind": "post_report", "report": {"cause": str(cause)}}:
                line["post"] = {"kind": "report", "failed": bool(cause)}
            case {"kind": "finish", "outcome": {"kind": str(kind), "rank": rank}, "step_limit": int(limit)}:
                line["finish"] = [kind, TLA_NONE if kind == "lost" else _who(rank), limit]
    line["delivered"] = delivered
    return line


def _convert(record: Record, budget_tokens: int) -> dict[str, object]:
    line = {"rank": record.rank + 1, **_convert_effects(record.effects, budget_tokens)}
    match record.event:
        case None:
            return {"kind": "start", **line}
        case {"kind": "samples_read", "samples": list(samples), "is_ended": bool(is_ended)}:
            is_full = record.event.get("is_full") is True
            return {"kind": "samples_read", "n": len(samples), "ended": is_ended, "full": is_full, **line}
        case {"kind": "collated", "round": int(round_)}:
            return {"kind": "collated", "round": round_, **line}
        case {"kind": "agreed", "agreement": dict(offer)}:
            agreement = _convert_offer(offer, budget_tokens) | {"samples": [offer["samples_min"], offer["samples_max"]]}
            return {"kind": "agreed", "agreement": agreement, **line}
        case {"kind": "budget_accepted", "tokens": int(tokens)}:
            return {"kind": "budget_accepted", "tokens": tokens, **line}
        case {"kind": "counted", "counts": list(counts)}:
            return {"kind": "counted", "sizes": [row[0] for row in counts], **line}
        case {"kind": str(kind)}:
            return {"kind": kind, **line}
        case _:
            raise ValueError(f"not an event: {record.event!r}")


def merge(world_size: int, records: Sequence[Record]) -> list[Record]:
    """Merges records so that every answer follows all posts. Files of one rank each define no other order."""
    waiting = [deque(record for record in records if record.rank == rank) for rank in range(world_size)]
    posted = [dict.fromkeys(_ANSWERS.values(), 0) for _ in range(world_size)]
    answered = [dict.fromkeys(_ANSWERS, 0) for _ in range(world_size)]
    merged: list[Record] = []
    while any(waiting):
        for rank, queue in enumerate(waiting):
            kind = str(queue[0].event["kind"]) if queue and queue[0].event else ""
            post = _ANSWERS.get(kind)
            if not queue or (post and any(row[post] <= answered[rank][kind] for row in posted)):
                continue
            record = queue.popleft()
            if post:
                answered[rank][kind] += 1
            for effect in record.effects:
                if effect["kind"] in posted[rank]:
                    posted[rank][str(effect["kind"])] += 1
            merged.append(record)
            break
        else:
            # An answer without its posts, which the model will refuse here.
            merged += [record for queue in waiting for record in queue]
            break
    return merged


def read_records(paths: Sequence[Path]) -> tuple[Header, list[Record]]:
    """Returns the header and the records of the files of one run, in one order."""
    records: list[Record] = []
    for path in paths:
        header, lines = read_trace(path)
        records += lines
    return header, merge(header.world_size, records) if len(paths) > 1 else records


def write_trace_data(header: Header, records: Sequence[Record], work: Path) -> Configuration:
    """Writes TraceData.tla into ``work``, and returns what TLC checks of it. The queue depth, which is not in the header, is
    the largest number of steps that any queue held.
    """
    budget_tokens = _integer(header.config["budget_tokens"])
    lines = [_convert(record, budget_tokens) for record in records]
    ranks = range(1, header.world_size + 1)
    shards = [sum(_integer(line.get("n", 0)) for line in lines if line["rank"] == rank) for rank in ranks]
    depths = []
    for rank in ranks:
        held = most = 0
        for line in lines:
            if line["rank"] == rank:
                held -= line["kind"] == "step_taken"
                held += len(_list(line["delivered"]))
                most = max(most, held)
        depths.append(max(most, 1))
    given: dict[int, int] = {}
    for line in lines:
        if line["kind"] == "agreed":
            agreement, post = line["agreement"], line["post"]
            assert isinstance(agreement, dict)
            assert isinstance(post, dict)
            given[agreement["round"]] = len(post["sizes"]) if post["kind"] == "counts" else TLA_NONE
    targets = [given.get(round_, TLA_NONE) for round_ in range(max(given, default=-1) + 1)]
    body = ",\n".join(map(to_tla, lines))
    (work / "TraceData.tla").write_text(
        f"---- MODULE TraceData ----\nGiven == {to_tla(targets)}\nTrace == <<\n{body}\n>>\n====\n"
    )
    config = header.config
    constants = {
        "Shard": shards, "Depth": depths, "Cap": budget_tokens, "Window": config["window_samples"],
        "Ramp": config["ramp_rounds"], "Age": config["max_age_rounds"], "Mode": config["mode"],
        "Quota": config["quota_samples"] or 0, "Rule": "any", "Urging": "never",
    }  # fmt: skip
    return Configuration(
        constants=complete(constants), module="TraceCheck", specification="TraceSpec", invariants="Kept"
    )


def _integer(value: object) -> int:
    assert isinstance(value, int)
    return value


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
