"""Traces as plain JSON, for tests that change them and write them again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from odb_ref.core.offer import Offer, reduce_offers
from odb_ref.trace.check.decode import compute_fingerprint

Line = dict[str, Any]


class Tampered:
    """A trace in memory, as header and records. `effects` and `events` find what to change."""

    def __init__(self, path: Path) -> None:
        self.header, *self.records = [json.loads(line) for line in path.read_text().splitlines()]

    def write(self, path: Path) -> Path:
        path.write_text("".join(json.dumps(line) + "\n" for line in (self.header, *self.records)))
        return path

    def events(self, kind: str, rank: int | None = None) -> list[Line]:
        """Returns the events of a kind, of all ranks or of one, in order."""
        return [
            record["event"]
            for record in self.records
            if record["event"] and record["event"]["kind"] == kind and rank in (None, record["rank"])
        ]

    def effects(self, kind: str, rank: int | None = None) -> list[Line]:
        return [effect for _, effect in self.iterate(kind, rank)]

    def iterate(self, kind: str, rank: int | None = None) -> Iterator[tuple[Line, Line]]:
        """Yields each record with its effect."""
        for record in self.records:
            if rank in (None, record["rank"]):
                yield from ((record, effect) for effect in record["effects"] if effect["kind"] == kind)

    def drop(self, record: Line) -> int:
        """Removes this very record, and returns its place."""
        place = next(index for index, item in enumerate(self.records) if item is record)
        del self.records[place]
        return place

    def answers(self, kind: str, rank: int) -> list[Line]:
        """Returns the records of a rank whose event is of a kind."""
        return [
            item for item in self.records if item["rank"] == rank and item["event"] and item["event"]["kind"] == kind
        ]

    @property
    def ranks(self) -> range:
        return range(self.header["world_size"])

    def configure(self, **changes: Any) -> None:
        """Changes the header's configuration, and every offer with it, so that the fingerprint does not reveal the change."""
        config = self.header["config"] | changes
        self.header["config"] = config
        fingerprint = compute_fingerprint(json.dumps(config, sort_keys=True))
        for offer in (
            *(it["offer"] for it in self.effects("post_offer")),
            *(it["agreement"] for it in self.events("agreed")),
        ):
            offer |= {"fingerprint_min": fingerprint, "fingerprint_max": fingerprint}

    def reduce_again(self) -> None:
        """Makes every agreement the reduction of the present offers."""
        offers = [[Offer(**effect["offer"]) for effect in self.effects("post_offer", rank)] for rank in self.ranks]
        for rank in self.ranks:
            for number, event in enumerate(self.events("agreed", rank)):
                event["agreement"] = asdict(reduce_offers(of_rank[number] for of_rank in offers))

    def sum_again(self) -> None:
        """Makes every sum of counts the sum of the present posts, and makes every step carry it."""
        posts = [self.effects("post_counts", rank) for rank in self.ranks]
        for rank in self.ranks:
            for number, event in enumerate(self.events("counted", rank)):
                steps = zip(*(of_rank[number]["counts"] for of_rank in posts), strict=True)
                event["counts"] = [[sum(column) for column in zip(*rows, strict=True)] for rows in steps]
            for event, effect in zip(self.events("counted", rank), self.effects("collate", rank), strict=False):
                for step, counts in zip(effect["steps"], event["counts"], strict=False):
                    step["counts"] = counts

    def count_again(self) -> None:
        """Makes every rank post the counts of its present steps, then sums again."""
        for rank in self.ranks:
            samples = {row[1]: row for event in self.events("samples_read", rank) for row in event["samples"]}
            for post, effect in zip(self.effects("post_counts", rank), self.effects("collate", rank), strict=False):
                for index, step in enumerate(effect["steps"]):
                    rows = [samples[position] for position in step["positions"]]
                    places = range(2, 1 + len(post["counts"][index]))
                    post["counts"][index] = [len(rows), *(sum(row[place] for row in rows) for place in places)]
        self.sum_again()


def tamper(path: Path, change: Callable[[Tampered], object], to: Path | None = None) -> Path:
    """Changes a trace, or writes it changed ``to`` another file. Returns the file that was written."""
    trace = Tampered(path)
    change(trace)
    return trace.write(to or path)
