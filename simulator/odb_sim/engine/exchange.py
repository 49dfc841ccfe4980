"""The collectives of the loaders, as one SimPy object. The posts of all ranks are combined once the last one has posted."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import assert_never

import simpy

from odb_ref.core.effects import Post
from odb_ref.core.errors import InvariantError
from odb_ref.core.events import Agreed, Counted, Reported
from odb_ref.core.exchange import Answer, combine_posts
from odb_sim.inputs.costs import NetworkCost

Process = Generator[simpy.Event, object, None]


class SimulatedExchange:
    """Takes one post of each rank, waits as long as the network needs, and answers all ranks with the combination.

    Without jitter a collective ends for all ranks at once, so one event serves them all, and they are answered in order. With
    jitter, each rank is answered at its own time. ``stretch`` draws how long a latency takes on one rank.
    """

    __slots__ = ("_answer", "_cost", "_env", "_missing", "_posts", "_stretch", "count_rounds", "seconds")

    def __init__(
        self,
        env: simpy.Environment,
        cost: NetworkCost,
        ranks: int,
        *,
        answer: Callable[[int, Answer], None],
        stretch: Callable[[float], float] | None = None,
    ) -> None:
        self._env = env
        self._cost = cost
        self._answer = answer
        self._stretch = stretch
        self._posts: list[Post | None] = [None] * ranks
        self._missing = ranks
        self.count_rounds = 0
        """The rounds that formed steps, counted by their exchanges of counts."""
        self.seconds = 0.0
        """The simulated seconds of all exchanges, each from the last post to the answer."""

    def post(self, rank: int, post: Post) -> None:
        """Adds the post of ``rank`` to the open collective.

        Raises: InvariantError when the rank has already posted to it.
        """
        if self._posts[rank] is not None:
            raise InvariantError("ALIGN", f"rank {rank} posts {post} while its {self._posts[rank]} is open")
        self._posts[rank] = post
        self._missing -= 1
        if not self._missing:
            self._env.process(self._complete())

    def _complete(self) -> Process:
        posts = [post for post in self._posts if post is not None]
        answer = combine_posts(posts)
        latency_s = self._compute_latency_s(answer)
        self.seconds += latency_s
        self.count_rounds += isinstance(answer, Counted) and bool(answer.counts)
        self._posts = [None] * len(posts)
        self._missing = len(posts)
        if self._stretch is not None:
            for rank in range(len(posts)):
                self._env.process(self._answer_later(rank, answer, self._stretch(latency_s)))
            return
        yield self._env.timeout(latency_s)
        for rank in range(len(posts)):
            self._answer(rank, answer)

    def _answer_later(self, rank: int, answer: Answer, latency_s: float) -> Process:
        yield self._env.timeout(latency_s)
        self._answer(rank, answer)

    def _compute_latency_s(self, answer: Answer) -> float:
        ranks = len(self._posts)
        match answer:
            case Agreed():
                return self._cost.compute_offer_s(ranks)
            case Counted():
                counts, resources = answer.counts, len(answer.counts[0].costs) if answer.counts else 0
                return self._cost.compute_counts_s(ranks, len(counts), resources=resources, wants=len(answer.wants))
            case Reported():
                return self._cost.compute_reports_s(ranks)
            case _:
                assert_never(answer)
