"""The rest of an epoch for another number of ranks, by the Python and by the proved arithmetic."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from odb_ref.core.resume import Checkpoint, RoundStart
from odb_ref.torch.plan.state import Generation, Part
from tests.helpers.effort import few
from tests.proofs.conftest import UNSHRUNK, Model
from tests.proofs.wire import write_integers

Case = tuple[list[int], list[Generation], list[int]]


@st.composite
def checkpoints(draw: st.DrawFn, samples: int) -> Checkpoint:
    """Draws where a rank with ``samples`` samples may stand: carried samples were read, taken ones were carried or follow."""
    read = draw(st.integers(0, samples))
    carried = sorted(draw(st.sets(st.integers(0, read - 1)))) if read else []
    open_ = [*carried, *range(read, samples)]
    taken = draw(st.lists(st.sampled_from(open_), unique=True)) if open_ else []
    return Checkpoint(start=RoundStart(read_samples=read, carried=tuple(carried)), taken=tuple(taken))


@st.composite
def histories(draw: st.DrawFn) -> Case:
    """Draws an order, its interruptions, each by another number of ranks, and the rest according to the Python."""
    order = draw(st.permutations(range(draw(st.integers(0, 40)))))
    left = list(order)
    base = []
    for _ in range(draw(st.integers(1, 3))):
        world_size = draw(st.integers(1, 5))
        shares = [len(range(rank, len(left), world_size)) for rank in range(world_size)]
        base.append(Generation(tuple(Part(draw(checkpoints(samples))) for samples in shares)))
        left = base[-1].compute_rest(left)
    return list(order), base, left


def _write_case(order: list[int], base: list[Generation]) -> str:
    words = ["rest", str(len(base))]
    for generation in base:
        words.append(str(len(generation.parts)))
        for part in generation.parts:
            start = part.checkpoint.start
            words += [
                str(start.read_samples),
                write_integers(start.carried),
                write_integers(part.checkpoint.taken),
            ]
    return " ".join([*words, write_integers(order)])


@settings(UNSHRUNK, max_examples=few(60))
@given(st.lists(histories(), min_size=10, max_size=10))
def test_the_model_shares_out_what_is_left_as_the_python_does(model: Model, cases: list[Case]) -> None:
    """Checks: RESUME, COVER, ONCE (the link from proof to code)."""
    asked = [_write_case(order, base) for order, base, _ in cases]
    assert model(" ".join(asked)) == [f"[{' '.join(map(str, left))}]" for _, _, left in cases]


def test_a_sample_that_is_forgotten_is_noticed(model: Model) -> None:
    """The comparison can fail: positions 0 and 2 of one rank were carried and 2 taken, so 0 is left, before the unread ones."""
    part = Part(Checkpoint(start=RoundStart(read_samples=3, carried=(0, 2)), taken=(2, 3)))
    order = [7, 5, 6, 4, 8]
    assert Generation((part,)).compute_rest(order) == [7, 8]
    assert model(_write_case(order, [Generation((part,))])) == ["[7 8]"]
    forgetful = Part(Checkpoint(start=RoundStart(read_samples=3, carried=(2,)), taken=(2, 3)))
    assert model(_write_case(order, [Generation((forgetful,))])) == ["[8]"]
