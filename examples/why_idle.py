"""Prints why each idle step of a traced epoch was idle.

    python examples/why_idle.py ddp-trace/*.ndjson

Give all files of one epoch. See docs/howto/diagnose.md for what helps.
"""

from __future__ import annotations

import argparse
from collections import Counter

from odb_ref.core.errors import UsageError
from odb_ref.core.events import Agreed
from odb_ref.core.offer import NONE
from odb_ref.trace.format import decode_event, decode_offer
from odb_ref.trace.reading import read_trace


def main() -> None:
    parser = argparse.ArgumentParser(description="Why steps of an epoch were idle.")
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    try:
        explain(parser.parse_args().traces)
    except UsageError as error:
        parser.error(str(error))


def explain(traces: list[str]) -> None:
    """Prints a line for each round with idle steps, and the number of each kind.

    Raises: UsageError when a file is not a trace.
    """
    idle: Counter[str] = Counter()
    epochs: dict[int, str] = {}
    for path in traces:
        header, records = read_trace(path)
        epochs.setdefault(header.epoch, path)
        if len(epochs) > 1:
            raise UsageError(f"{' and '.join(epochs.values())} are of different epochs: give all files of one")
        offers, agreements = {}, {}
        for record in records:
            if record.event and record.event["kind"] == "agreed":
                event = decode_event(record.event)
                if isinstance(event, Agreed):
                    agreements[record.rank] = event.agreement
            for effect in record.effects:
                if effect["kind"] == "post_offer":
                    offers[record.rank] = decode_offer(effect["offer"])
                if effect["kind"] == "collate":
                    numbers = [str(step["number"]) for step in effect["steps"] if not step["positions"]]
                    if not numbers:
                        continue
                    # A round's counts are collated before the next round's offer is posted, so this offer is the round's own.
                    own, most = offers[record.rank], agreements[record.rank].groups_max
                    # A window that is bounded in bytes may hold fewer samples than the other ranks need steps.
                    why = "its source has ended" if own.groups_min == NONE else "its window is small"
                    print(
                        f"rank {record.rank}, round {effect['round']}: steps {', '.join(numbers)} idle; it held "
                        f"{own.samples_max} samples in {own.groups_max} groups, the most groups of any rank: {most}; {why}"
                    )
                    idle[why] += len(numbers)
    print(", ".join(f"{count} idle because {why}" for why, count in idle.items()) or "no step was idle")


if __name__ == "__main__":
    main()
