from __future__ import annotations

import math

import numpy as np
import torch

from jointrag.llm import ranking

WEIGHTS = torch.tensor([[4.0, 2.0, 1.0]]).log()
EVERY = torch.ones((1, 3), dtype=torch.bool)


def test_plackett_luce_by_hand() -> None:
    """Weights 4, 2, 1: first 4/7, then 2/3 of what is left, then the last one surely."""
    logp, entropy = ranking.log_prob(WEIGHTS, torch.tensor([[0, 1, 2]]), EVERY)
    assert np.allclose(logp[0], [math.log(4 / 7), math.log(2 / 3), 0.0], atol=1e-6)
    first = -sum(p * math.log(p) for p in (4 / 7, 2 / 7, 1 / 7))
    second = -sum(p * math.log(p) for p in (2 / 3, 1 / 3))
    assert np.allclose(entropy[0], [first, second, 0.0], atol=1e-6)
    logp, _ = ranking.log_prob(WEIGHTS, torch.tensor([[2, 0, 1]]), EVERY)
    assert np.allclose(logp[0], [math.log(1 / 7), math.log(4 / 6), 0.0], atol=1e-6)


def test_all_orderings_together_have_probability_one() -> None:
    orders = torch.tensor([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
    logp, _ = ranking.log_prob(WEIGHTS.expand(6, 3), orders, EVERY.expand(6, 3))
    assert math.isclose(float(logp.sum(1).exp().sum()), 1.0, abs_tol=1e-6)


def test_unused_picks_count_nothing() -> None:
    logp, entropy = ranking.log_prob(WEIGHTS, torch.tensor([[0, 1, 2]]), torch.tensor([[True, False, False]]))
    assert logp[0, 1:].tolist() == entropy[0, 1:].tolist() == [0.0, 0.0]


def test_gumbel_samples_have_plackett_luce_frequencies() -> None:
    """P(0 first) = 4/7, P(0, 1) = 4/7 * 2/3 = 8/21; 20,000 draws: standard error .0035."""
    g = torch.Generator().manual_seed(0)
    noise = -torch.log(-torch.log(torch.rand((20_000, 3), generator=g, dtype=torch.float64)))
    drawn = ranking.order(WEIGHTS.double().expand(20_000, 3), 2, noise)
    assert abs((drawn[:, 0] == 0).double().mean() - 4 / 7) < 0.012
    assert abs(((drawn[:, 0] == 0) & (drawn[:, 1] == 1)).double().mean() - 8 / 21) < 0.012


def test_zero_projection_is_the_index_with_ties_to_the_lower_row() -> None:
    scores = torch.tensor([[0.5, 2.0, 0.5, -1.0]])
    logits = ranking.logits(
        torch.randn(1, 8), torch.zeros(3, 8), scores, torch.randn(1, 4, 3), torch.tensor([0.15]),
        torch.ones((1, 4), dtype=torch.bool),
    )  # fmt: skip
    assert torch.equal(logits, scores / 0.15)
    assert ranking.order(logits, 4, None).tolist() == [[1, 0, 2, 3]]


def test_illegal_candidates_come_last_whatever_the_noise() -> None:
    legal = torch.tensor([[False, True, False, True]])
    logits = ranking.logits(
        torch.randn(1, 8), torch.randn(3, 8), torch.tensor([[9.0, 0.0, 9.0, 0.0]]), torch.randn(1, 4, 3),
        torch.tensor([0.15]), legal,
    )  # fmt: skip
    noise = torch.tensor([[50.0, 0.0, 50.0, 0.0]])
    assert set(ranking.order(logits, 2, noise)[0].tolist()) == {1, 3}


def test_the_residual_is_bounded() -> None:
    vector = torch.nn.functional.normalize(torch.randn(1, 1, 3), dim=-1)
    moved = ranking.logits(
        torch.randn(1, 8) * 1e4, torch.randn(3, 8), torch.zeros(1, 1), vector, torch.ones(1),
        torch.ones((1, 1), dtype=torch.bool),
    )  # fmt: skip
    assert float(moved.abs()) <= ranking.BOUND + 1e-4


def test_gradients_stay_finite_beside_masked_candidates_and_short_rows() -> None:
    scores = torch.tensor([[1.0, 0.5, 0.0], [0.2, 0.1, 0.0]], requires_grad=True)
    legal = torch.tensor([[True, True, True], [True, True, False]])
    logits = scores.masked_fill(~legal, float("-inf"))
    used = torch.tensor([[True, True, True], [True, True, False]])
    logp, entropy = ranking.log_prob(logits, torch.tensor([[2, 0, 1], [1, 0, 2]]), used)
    (logp.sum() + entropy.sum()).backward()
    assert scores.grad is not None
    assert bool(torch.isfinite(scores.grad).all())
    assert float(scores.grad[1, 2]) == 0.0
