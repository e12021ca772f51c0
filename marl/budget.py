"""Search budget: a constraint on mean searches a question, kept by a Lagrange multiplier instead of a fixed weight.

    whoever planned queries earns   -price x those past the first floor(budget) of the question
    held   <-  clip(held + rate x excess, 0, MOST)          after each update; excess = mean searches - limit
    price  =   clip(held + HASTE x rate x excess, 0, MOST)

The saddle point of max_pi min_price E[R] - price (E[searches] - limit) (RCPO, arXiv 1805.11074, eq. 5); the
proportional part keeps it from swinging (PID Lagrangian, arXiv 2007.03964, algorithm 2). The price stays with the
decision that asked, as every process reward does: spread over the team it drowns what the others have to learn. The
limit comes down linearly from what the policy does at first: priced in full from the start, searching collapses to one
query (as JADE's costs did), for nobody has learnt yet to do with fewer. What every question may have is free: a price
that overshoots cuts down to floor(budget), not to nothing. Searches nobody planned who learns cost the team: so does a
planner's silence where the graph searches on without its queries, instead of branching on `wants_search`.

A warm start that always asks on never samples a stop, so no price could teach it one (P(stop) e^-10 in the demo).
While the limit is exceeded a share of the plans past the budget is therefore made to ask nothing. What came of them is
learnt by imitation where it was better than what the agent does by itself, max(0, A) log pi (SIL, arXiv 1806.05635, eq.
2). Decisions before it are credited with what came of it, as of any chance.
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
    excess: float = 0.0  # in the last update

    @property
    def spare(self) -> tuple[float, int]:
        """Share of plans that are made to ask nothing, and the queries a question may ask before: those are free."""
        return (self.config.spare if self.excess > 0 else 0.0), int(self.config.searches)

    @property
    def limit(self) -> float:
        """Mean searches allowed in the next update."""
        if self.start is None or self.start <= self.config.searches:
            return self.config.searches
        share = min(1.0, (self.updates + 1) / self.config.ramp)
        return self.start + share * (self.config.searches - self.start)

    def charge(self, episodes: Sequence[Episode]) -> None:
        """Add the price of queries past the budget to their plan's process reward, of other searches to the team's."""
        free = int(self.config.searches)
        for e in episodes:
            asked, charged = 0, 0
            for d, terms in zip(e.decisions, e.process, strict=True):
                if plans(d):
                    asked += len(queries(d))
                    past = min(len(queries(d)), max(0, asked - free))
                    if d.trains:
                        terms[TERM] = -self.price * past
                        charged += past
            e.team[TERM] = -self.price * max(0, e.searches - free - charged)

    def begin(self, episodes: Sequence[Episode]) -> None:
        """Take in what the policy does before the first update."""
        self.start = self._mean(episodes)
        self.excess = self.start - self.limit

    def observe(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Move the price after an update; return what is logged of it."""
        searches = self._mean(episodes)
        self.start = searches if self.start is None else self.start
        limit, charged = self.limit, self.price
        self.excess = searches - limit
        self.held = min(MOST, max(0.0, self.held + self.config.rate * self.excess))
        self.price = min(MOST, max(0.0, self.held + HASTE * self.config.rate * self.excess))
        self.updates += 1
        return {"searches": searches, "limit": limit, "price": charged}

    def _mean(self, episodes: Sequence[Episode]) -> float:
        """Return mean searches of the policy itself, had no plan been spared; unbiased.

        After n plans that might have been spared and were not, a search counts for (1 - share)^-n of its like; after
        one that was, for none.
        """
        total = 0.0
        for e in episodes:
            for d in e.decisions:
                at_stake = [p.spared for p in e.decisions if p.step < d.step and p.spared is not None]
                if d.searches and not any(at_stake):
                    total += d.searches * (1.0 - self.config.spare) ** -len(at_stake)
        return total / max(1, len(episodes))

    def state(self) -> tuple[float, float, float | None, int, float]:
        """Return what a checkpoint keeps."""
        return self.price, self.held, self.start, self.updates, self.excess

    def set_state(self, state: tuple[float, float, float | None, int, float]) -> None:
        """Go back to it."""
        self.price, self.held, self.start, self.updates, self.excess = state
