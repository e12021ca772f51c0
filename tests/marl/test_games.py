"""Toy games played with the product's own credit, normalisation and loss; policies and critic are tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from jointrag.marl.credit.base import Floats, Scored
from jointrag.marl.credit.team_gae import team_gae
from jointrag.marl.losses import RunningStat, normalise, policy_loss, value_loss

Move = tuple[int, int, int, int]  # step, agent, what it sees (a row of its table), action
Play = Callable[[Callable[[int, int], int]], tuple[list[Move], float]]  # choose(agent, seen) -> moves, team reward


@dataclass
class Team:
    """Tabular agents: logits [agents, states, 2] and values [states]; one Adam over all."""

    agents: int
    states: int
    seed: int
    lr: float = 0.05
    entropy: float = 0.0
    gamma: float = 1.0
    lam: float = 0.95
    logits: torch.Tensor = field(init=False)
    value: torch.Tensor = field(init=False)

    def again(self, absent: frozenset[str]) -> Floats:
        """Team GAE runs nothing again."""
        raise AssertionError(absent)

    def __post_init__(self) -> None:
        self.logits = torch.zeros((self.agents, self.states, 2), requires_grad=True)
        self.value = torch.zeros(self.states, requires_grad=True)
        self.spread = [RunningStat() for _ in range(self.agents)]
        self.optimizer = torch.optim.Adam([self.logits, self.value], lr=self.lr)
        self.rng = np.random.default_rng(self.seed)

    def log_prob(self, moves: Sequence[Move]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs [D, 1] of the actions taken and entropies [D, 1]: each action is one token."""
        _, agent, seen, action = torch.tensor(moves).T
        logp = torch.log_softmax(self.logits[agent, seen], -1)
        return logp.gather(1, action[:, None]), -(logp.exp() * logp).sum(-1, keepdim=True)

    def advantages(self, episodes: Sequence[tuple[list[Move], float]]) -> tuple[Floats, Floats]:
        """Advantages and value targets of all moves."""
        values = self.value.detach().tolist()
        scored = [
            Scored(
                [m[0] for m in moves], reward, [0.0] * len(moves), [values[m[2]] for m in moves],
                [0.0] * len(moves), [False] * len(moves),
            )
            for moves, reward in episodes
        ]  # fmt: skip
        credits = team_gae(scored, self.again, self.gamma, self.lam)
        return np.concatenate([c.advantages for c in credits]), np.concatenate([c.returns for c in credits])

    def loss(self, moves: Sequence[Move], advantage: Floats, old: torch.Tensor) -> torch.Tensor:
        """The product's policy loss of each move."""
        logp, entropy = self.log_prob(moves)
        d = len(moves)
        return policy_loss(
            logp, old, old, entropy, torch.ones((d, 1), dtype=torch.bool), torch.tensor(advantage, dtype=torch.float32),
            torch.full((d,), 0.2), torch.zeros(d), torch.full((d,), self.entropy),
            torch.zeros(d, dtype=torch.bool),
        ).total  # fmt: skip

    def update(self, play: Play, episodes: int, epochs: int = 2) -> None:
        """Play, give credit, normalise each agent's, and take `epochs` steps."""
        table = torch.softmax(self.logits.detach(), -1).numpy()
        batch = [play(lambda a, s: int(self.rng.random() < table[a, s, 1])) for _ in range(episodes)]
        moves = [m for played, _ in batch for m in played]
        raw, returns = self.advantages(batch)
        agent, seen = np.array([m[1] for m in moves]), [m[2] for m in moves]
        advantage = raw.copy()
        for a in range(self.agents):
            advantage[agent == a] = normalise(raw[agent == a], self.spread[a], 0.1)
        with torch.no_grad():
            old, _ = self.log_prob(moves)
        before, goal = self.value.detach()[seen], torch.tensor(returns, dtype=torch.float32)
        for _ in range(epochs):
            self.optimizer.zero_grad()
            per_move = self.loss(moves, advantage, old)
            share = torch.stack([per_move[torch.tensor(agent == a)].mean() for a in range(self.agents)])
            total = share.sum() + value_loss(self.value[seen], before, goal, 5.0).mean()
            total.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    def greedy(self, play: Play) -> float:
        """Reward of the greedy policies."""
        best = self.logits.detach().argmax(-1)
        return play(lambda a, s: int(best[a, s]))[1]


# The two-step game of the QMIX paper (Rashid et al. 2018, arXiv 1803.11485, section 6.1 and appendix): in step 1 agent
# 1's action alone picks the matrix, agent 2 acts without effect; in step 2 both act at once. Optimum 8; the safe
# matrix pays 7 whatever is done, and a uniform team gets (0 + 1 + 1 + 8) / 4 = 2.5 in the other.
SAFE, RISKY = 1, 2
PAYOFF = {SAFE: [[7.0, 7.0], [7.0, 7.0]], RISKY: [[0.0, 1.0], [1.0, 8.0]]}


def two_step(choose: Callable[[int, int], int]) -> tuple[list[Move], float]:
    first = [choose(0, 0), choose(1, 0)]
    room = (SAFE, RISKY)[first[0]]
    second = [choose(0, room), choose(1, room)]
    moves = [(0, a, 0, first[a]) for a in (0, 1)] + [(1, a, room, second[a]) for a in (0, 1)]
    return moves, PAYOFF[room][second[0]][second[1]]


def learn_two_step(seed: int, updates: int = 120) -> Team:
    """The one fixed setting: entropy falls linearly from EXPLORE to 0."""
    team = Team(agents=2, states=3, seed=seed)
    for i in range(updates):
        team.entropy = EXPLORE * max(0.0, 1 - i / (updates / 2))
        team.update(two_step, 64)
    return team


EXPLORE = 1.0


@pytest.mark.parametrize("seed", range(5))
def test_the_two_step_game_reaches_its_optimum(seed: int) -> None:
    team = learn_two_step(seed)
    assert team.greedy(two_step) == 8.0
    assert torch.softmax(team.logits.detach(), -1)[0, 0, 1] > 0.9  # not by a hair


def test_the_same_seed_learns_the_same_bits_and_another_seed_others() -> None:
    one, again, other = (learn_two_step(seed, 20) for seed in (3, 3, 4))
    assert torch.equal(one.logits, again.logits)
    assert torch.equal(one.value, again.value)
    assert not torch.equal(one.logits, other.logits)


# A sequential game: agent 1 picks a, agent 2 sees a and picks b. R = [[1, 0], [0, 3]]; optimum 3 at (1, 1).
REWARD = [[1.0, 0.0], [0.0, 3.0]]


def relay(choose: Callable[[int, int], int]) -> tuple[list[Move], float]:
    a = choose(0, 0)
    b = choose(1, 1 + a)
    return [(0, 0, 0, a), (1, 1, 1 + a, b)], REWARD[a][b]


# pi1 = (1/4, 3/4), pi2(.|0) = (1/2, 1/2), pi2(.|1) = (3/4, 1/4): of 16 episodes 2, 2, 9, 3 go (0,0) (0,1) (1,0) (1,1).
#   Q(0) = 1/2 * 1 = 1/2      Q(1) = 1/4 * 3 = 3/4      J = 1/4 * 1/2 + 3/4 * 3/4 = 11/16
#   dJ/d theta1[a]    = pi1(a) (Q(a) - J):               1/4 (8/16 - 11/16) = -3/64,   3/4 (12/16 - 11/16) = 3/64
#   dJ/d theta2[0, b] = pi1(0) pi2(b|0) (R(0, b) - Q(0)): 1/8 (1 - 1/2) = 1/16,          1/8 (0 - 1/2) = -1/16
#   dJ/d theta2[1, b] = pi1(1) pi2(b|1) (R(1, b) - Q(1)): 9/16 (0 - 3/4) = -27/64,       3/16 (3 - 3/4) = 27/64
COUNTS = {(0, 0): 2, (0, 1): 2, (1, 0): 9, (1, 1): 3}
BY_HAND = {(0, 0): [-3 / 64, 3 / 64], (1, 1): [1 / 16, -1 / 16], (1, 2): [-27 / 64, 27 / 64]}


@pytest.mark.parametrize(
    ("values", "lam"),
    [([0.0, 0.0, 0.0], 1.0), ([11 / 16, 1 / 2, 3 / 4], 0.0), ([11 / 16, 1 / 2, 3 / 4], 0.6)],
    ids=["no critic, lambda 1", "exact critic, lambda 0", "exact critic, lambda 0.6"],
)
def test_the_gradient_of_the_loss_is_the_policy_gradient_by_hand(values: list[float], lam: float) -> None:
    team = Team(agents=2, states=3, seed=0, lam=lam)
    with torch.no_grad():
        team.logits[0, 0] = torch.tensor([1 / 4, 3 / 4]).log()
        team.logits[1, 1] = torch.tensor([1 / 2, 1 / 2]).log()
        team.logits[1, 2] = torch.tensor([3 / 4, 1 / 4]).log()
        team.value[:] = torch.tensor(values)
    episodes = []
    for (a, b), count in COUNTS.items():
        actions = {0: a, 1: b}
        episodes += [relay(lambda agent, _, act=actions: act[agent])] * count  # type: ignore[misc]
    moves = [m for played, _ in episodes for m in played]
    raw, _ = team.advantages(episodes)
    old = team.log_prob(moves)[0].detach()
    (-team.loss(moves, raw, old).sum() / len(episodes)).backward()  # type: ignore[no-untyped-call]
    assert team.logits.grad is not None
    for (agent, state), expected in BY_HAND.items():
        torch.testing.assert_close(team.logits.grad[agent, state], torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert team.logits.grad[0, 1:].abs().max() == 0  # rows nobody visited
    assert team.logits.grad[1, 0].abs().max() == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_sequential_game_reaches_its_optimum(seed: int) -> None:
    team = Team(agents=2, states=3, seed=seed, entropy=0.01)
    for _ in range(60):
        team.update(relay, 64)
    assert team.greedy(relay) == 3.0
    exact = [3.0, 3.0]  # V of the start and of the state after a = 1, once both play the optimum
    np.testing.assert_allclose(team.value.detach()[[0, 2]].numpy(), exact, atol=0.5)
