"""Search budget: a constraint on mean searches a question, kept by a Lagrange multiplier instead of a fixed weight.

    whoever planned the queries earns   -price x queries    (the team does for searches nobody planned who learns)
    held   <-  clip(held + rate x excess, 0, MOST)          after each update; excess = mean searches - limit
    price  =   clip(held + HASTE x rate x excess, 0, MOST)

The saddle point of max_pi min_price E[R] - price (E[searches] - limit) (RCPO, arXiv 1805.11074, eq. 5); the
proportional part keeps it from swinging (PID Lagrangian, arXiv 2007.03964, algorithm 2). The price stays with the
decision that asked, as every process reward does: spread over the team it drowns what the others have to learn. The
limit comes down linearly from what the policy does at first: priced in full from the start, searching collapses to one
query (as JADE's costs did), for nobody has learnt yet to do with fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jointrag.configs.schema import BudgetConfig
from jointrag.graph.episode import Episode
from jointrag.rewards.reading import plans, queries

MOST = 5.0  # reward a search may cost: more than any search can bring
HASTE = 2.0  # weight of this update's excess beside the sum of all
TERM = "search_price"


@dataclass
class SearchBudget:
    """The multiplier of one training. `start`: mean searches before the first update, None = not seen yet."""

    config: BudgetConfig
    price: float = 0.0
    held: float = 0.0
    start: float | None = None
    updates: int = 0

    @property
    def limit(self) -> float:
        """Mean searches allowed in the next update."""
        if self.start is None or self.start <= self.config.searches:
            return self.config.searches
        share = min(1.0, (self.updates + 1) / self.config.ramp)
        return self.start + share * (self.config.searches - self.start)

    def charge(self, episodes: Sequence[Episode]) -> None:
        """Add the price of a planned query to its decision's process reward, of other searches to the team's."""
        for e in episodes:
            planned = 0
            for d, terms in zip(e.decisions, e.process, strict=True):
                if d.trains and plans(d):
                    planned += len(queries(d))
                    terms[TERM] = -self.price * len(queries(d))
            e.team[TERM] = -self.price * max(0, e.searches - planned)

    def observe(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Move the price after an update; return what is logged of it."""
        searches = sum(e.searches for e in episodes) / max(1, len(episodes))
        self.start = searches if self.start is None else self.start
        limit, charged = self.limit, self.price
        step = self.config.rate * (searches - limit)
        self.held = min(MOST, max(0.0, self.held + step))
        self.price = min(MOST, max(0.0, self.held + HASTE * step))
        self.updates += 1
        return {"searches": searches, "limit": limit, "price": charged}

    def state(self) -> tuple[float, float, float | None, int]:
        """Return what a checkpoint keeps."""
        return self.price, self.held, self.start, self.updates

    def set_state(self, state: tuple[float, float, float | None, int]) -> None:
        """Go back to it."""
        self.price, self.held, self.start, self.updates = state
