"""TRL's packing, run by the Python of an environment that has TRL: see `tests.bench.plan`. Answers with the tokens it keeps."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Answers the request."""
    from datasets import Dataset
    from trl.data_utils import pack_dataset

    request = json.load(sys.stdin)
    dataset = Dataset.from_dict({"input_ids": [[1] * length for length in request["lengths"]]})
    packed = pack_dataset(dataset, seq_length=request["budget_tokens"], strategy="bfd")
    print("\n" + json.dumps(sum(len(row) for row in packed["input_ids"])))


if __name__ == "__main__":
    main()
