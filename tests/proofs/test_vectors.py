"""The extracted model gives the exact answers of the conformance cases."""

from __future__ import annotations

from odb_ref.conformance.vectors import read_cases
from tests.proofs.conftest import Model
from tests.proofs.vectors import NUMBERS, RULES_OF, SHARDS, ask, make_exact, word


def test_the_answers_are_the_models(model: Model) -> None:
    """Spec: R2.1, R2.5, R3.2, R3.3, R4.1, R4.2, R4.5, R5, R10.2, R10.3, R14.3. The Python wrote none of them."""
    assert model is not None
    cases = [case for case in read_cases() if case.kind in RULES_OF]
    assert len(cases) == 3 + sum(NUMBERS.values()) + len(SHARDS)
    found = ask([(case.kind, case.record) for case in cases])
    assert [
        case.id for case, answer in zip(cases, found, strict=True) if case.exact != make_exact(case.kind, answer)
    ] == []


def test_another_question_has_another_answer(model: Model) -> None:
    """The comparison can fail."""
    question = {"lengths": [9, 9, 30], "budget": 30, "limits": [], "layout": "padded"}
    (own,) = ask([("groups", question)])
    (other,) = ask([("groups", question | {"budget": 10})])
    assert own == [[2], [1, 0]] or sorted(map(sorted, own)) == [[0, 1], [2]]
    assert own != other
    assert word("shares", {"wants": [3, 1], "left": 2}).startswith("shares 2 3 1 2")
    assert model is not None
