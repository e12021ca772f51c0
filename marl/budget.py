"""Search budget: a constraint on mean searches a question, kept by a Lagrange multiplier instead of a fixed weight.

    team reward  +=  -price x searches
    price        <-  clip(price + rate (mean searches - limit), 0, MOST)        after each update

The saddle point of max_pi min_price E[R] - price (E[searches] - limit), the price moving on the slower scale (RCPO,
arXiv 1805.11074, eq. 5). The limit comes down linearly from what the policy does at first: priced in full from the
start, searching collapses to one query (as JADE's costs did), for nobody has learnt yet to do with fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jointrag.configs.schema import BudgetConfig
from jointrag.graph.episode import Episode

MOST = 0.5  # reward a search may cost: two searches then cost a correct answer
TERM = "search_price"


@dataclass
class SearchBudget:
    """The multiplier of one training. `start`: mean searches before the first update, None = not seen yet."""

    config: BudgetConfig
    price: float = 0.0
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
        """Add the price of each episode's searches to its team reward."""
        for e in episodes:
            e.team[TERM] = -self.price * e.searches

    def observe(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Move the price after an update; return what is logged of it."""
        searches = sum(e.searches for e in episodes) / max(1, len(episodes))
        self.start = searches if self.start is None else self.start
        limit, charged = self.limit, self.price
        self.price = min(MOST, max(0.0, self.price + self.config.rate * (searches - limit)))
        self.updates += 1
        return {"searches": searches, "limit": limit, "price": charged}

    def state(self) -> tuple[float, float | None, int]:
        """Return what a checkpoint keeps."""
        return self.price, self.start, self.updates

    def set_state(self, state: tuple[float, float | None, int]) -> None:
        """Go back to it."""
        self.price, self.start, self.updates = state
