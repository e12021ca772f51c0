from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from jointrag.marl.losses import (
    KLController,
    PolicyLoss,
    RunningStat,
    explained_variance,
    k3,
    normalise,
    policy_loss,
    value_loss,
)

UP, DOWN = math.log(1.5), math.log(0.5)  # log-ratios outside a clip of 0.2 on either side


def loss(
    logp: torch.Tensor,
    advantage: list[float],
    used: list[list[bool]] | None = None,
    *,
    old: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    clip: float = 0.2,
    beta: float = 0.0,
    eta: float = 0.0,
    spared: bool = False,
) -> PolicyLoss:
    count = len(advantage)
    return policy_loss(
        logp,
        torch.zeros_like(logp) if old is None else old,
        logp.detach() if reference is None else reference,
        torch.zeros_like(logp) if entropy is None else entropy,
        torch.ones_like(logp, dtype=torch.bool) if used is None else torch.tensor(used),
        torch.tensor(advantage),
        torch.full((count,), clip),
        torch.full((count,), beta),
        torch.full((count,), eta),
        torch.full((count,), spared),
    )


def test_a_good_action_gains_nothing_above_the_clip_and_a_bad_one_nothing_below() -> None:
    logp = torch.tensor([[UP, DOWN], [UP, DOWN]], requires_grad=True)
    out = loss(logp, [2.0, -2.0])
    # A = 2: min(3, 2.4) + min(1, 1.6) = 3.4;  A = -2: min(-3, -2.4) + min(-1, -1.6) = -4.6
    torch.testing.assert_close(out.total, torch.tensor([-3.4, 4.6]))
    out.total.sum().backward()  # type: ignore[no-untyped-call]
    # d(-rho A) = -rho A where the clip does not hold: 1: clipped, -1/2 * 2;  2: 3/2 * 2, clipped
    torch.testing.assert_close(logp.grad, torch.tensor([[0.0, -1.0], [3.0, 0.0]]))
    torch.testing.assert_close(out.clipped, torch.tensor([1.0, 1.0]))


def test_within_the_clip_the_loss_is_minus_ratio_times_advantage() -> None:
    logp = torch.tensor([[math.log(1.1), math.log(0.9)]])
    out = loss(logp, [2.0])
    torch.testing.assert_close(out.total, torch.tensor([-4.0]))  # -(1.1 + 0.9) * 2
    assert out.clipped.item() == 0.0


def test_what_was_not_sampled_is_imitated_where_it_was_good_and_else_let_be() -> None:
    logp = torch.tensor([[-3.0, -1.0], [-3.0, -1.0]], requires_grad=True)
    far = torch.full((2, 2), -9.0)  # from the warm start: what was not sampled tells nothing of the KL
    out = loss(logp, [0.5, -0.5], spared=True, reference=far, beta=0.3)  # far out of any clip
    torch.testing.assert_close(out.total, torch.tensor([2.0, 0.0]))  # -0.5 * (-3 - 1)
    out.total.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(logp.grad, torch.tensor([[-0.5, -0.5], [0.0, 0.0]]))
    assert out.clipped.tolist() == [0.0, 0.0] == out.kl.tolist()


def test_each_decision_has_its_own_clip() -> None:
    logp = torch.tensor([[UP]])
    assert loss(logp, [1.0], clip=0.1).total.item() == pytest.approx(-1.1)
    assert loss(logp, [1.0], clip=0.6).total.item() == pytest.approx(-1.5)


def test_tokens_are_summed_and_decisions_averaged() -> None:
    used = [[True, True, True], [True, False, False]]
    out = loss(torch.zeros((2, 3)), [1.0, 1.0], used)
    torch.testing.assert_close(out.total, torch.tensor([-3.0, -1.0]))
    assert out.total.mean().item() == -2.0  # a token mean would be -1: length would not count


def test_padding_is_ignored_in_every_term() -> None:
    short = torch.tensor([[0.1, -0.1]])
    padded = torch.tensor([[0.1, -0.1, 5.0, -7.0]], requires_grad=True)
    garbage = torch.tensor([[0.2, 0.3, 9.0, 9.0]])
    used = [[True, True, False, False]]
    a = loss(short, [1.5], reference=garbage[:, :2], entropy=garbage[:, :2], beta=0.3, eta=0.2)
    b = loss(padded, [1.5], used, reference=garbage, entropy=garbage, beta=0.3, eta=0.2)
    for one, other in ((a.total, b.total), (a.kl, b.kl), (a.entropy, b.entropy), (a.clipped, b.clipped)):
        torch.testing.assert_close(one, other.detach())
    b.total.sum().backward()  # type: ignore[no-untyped-call]
    assert padded.grad is not None
    assert padded.grad[0, 2:].tolist() == [0.0, 0.0]
    assert bool((padded.grad[0, :2] != 0).all())


def test_entropy_is_paid_and_kl_is_charged_per_token() -> None:
    logp = torch.zeros((1, 2))
    out = loss(logp, [0.0], reference=logp + math.log(2), entropy=torch.tensor([[0.5, 1.5]]), beta=0.5, eta=0.1)
    # k3 = 2 - ln 2 - 1 a token; 2 * 0.5 * k3 - 0.1 * (0.5 + 1.5)
    token = 1.0 - math.log(2)
    assert out.total.item() == pytest.approx(2 * 0.5 * token - 0.2)
    assert out.kl.item() == pytest.approx(2 * token)  # a sum: nats a decision
    assert out.entropy.item() == pytest.approx(1.0)  # a mean: nats a token


def test_the_loss_starts_at_minus_the_policy_gradient() -> None:
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss(logp, [0.7], old=logp.detach()).total.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(logp.grad, torch.tensor([[-0.7, -0.7]]))


# k3


def test_k3_by_hand_is_never_negative_and_finite_far_away() -> None:
    out = k3(torch.tensor([0.0, 0.0, -1.0, 0.0]), torch.tensor([0.0, math.log(2), -2.0, 1000.0]))
    # r = 0: 0;  ln 2: 2 - ln 2 - 1;  -1: 1/e + 1 - 1
    torch.testing.assert_close(out[:3], torch.tensor([0.0, 1 - math.log(2), 1 / math.e]))
    assert bool(torch.isfinite(out).all())
    assert bool((out >= 0).all())


def test_the_mean_of_k3_over_the_policy_is_the_kl() -> None:
    pi, ref = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.25, 0.25, 0.5])
    exact = float((pi * (pi / ref).log()).sum())
    assert float((pi * k3(pi.log(), ref.log())).sum()) == pytest.approx(exact, abs=1e-6)


# KL controller


def test_the_kl_controller_follows_the_table() -> None:
    c = KLController(beta=0.1, target=3.0, floor=0.05)
    seen = []
    for kl in (6.0, 3.0, 3.3, 0.0, -5.0):  # +0.2 (cut), 0, +0.1, -0.2 (cut), -0.2 (cut; an estimate may be negative)
        c.observe(kl)
        seen.append(c.beta)
    assert seen == pytest.approx([0.12, 0.12, 0.132, 0.1056, 0.08448])


def test_the_kl_controller_stops_at_its_floor_and_gain_scales_it() -> None:
    c = KLController(beta=0.06, target=3.0, floor=0.05)
    for _ in range(3):
        c.observe(0.0)  # 0.048 would be next
    assert c.beta == 0.05
    half = KLController(beta=0.1, target=3.0, floor=0.0, gain=0.5)
    half.observe(30.0)
    assert half.beta == pytest.approx(0.11)


# normalisation


def test_many_decisions_are_normalised_by_their_own_mean_and_std() -> None:
    x = np.array([1.0, 3.0] * 16)  # 32: mean 2, std 1
    out = normalise(x, RunningStat(), 0.1)
    np.testing.assert_allclose(out, [-1.0, 1.0] * 16)


def test_few_decisions_use_the_running_mean_and_std() -> None:
    running = RunningStat()
    running.add(np.array([1.0, 3.0] * 16))  # mean 2, mean of squares 5
    out = normalise(np.array([4.0, 4.0]), running, 0.1)
    # share of the second batch 1 / 1.9: mean 2 + 2 / 1.9, squares 5 + 11 / 1.9
    mean, square = 2 + 2 / 1.9, 5 + 11 / 1.9
    np.testing.assert_allclose(out, (4.0 - mean) / math.sqrt(square - mean**2))
    assert out[0] > 0.5  # alone, the batch would have no spread and give 0


def test_thirty_one_decisions_are_few_and_thirty_two_are_not() -> None:
    before = np.full(40, 10.0)
    for count, few in ((31, True), (32, False)):
        running = RunningStat()
        running.add(before)
        out = normalise(np.linspace(-1, 1, count), running, 0.1)
        assert bool(abs(out.mean()) > 0.5) is few


def test_a_spread_below_the_floor_is_not_blown_up() -> None:
    x = np.array([1.0, 1.002] * 16)  # std 0.001
    np.testing.assert_allclose(normalise(x, RunningStat(), 0.1), [-0.01, 0.01] * 16)
    np.testing.assert_allclose(normalise(np.array([5.0]), RunningStat(), 0.1), [0.0])


def test_no_decisions_change_nothing() -> None:
    running = RunningStat()
    assert len(normalise(np.array([]), running)) == 0
    assert (running.weight, running.std) == (0.0, 1.0)


def test_running_statistics_forget_exponentially_without_a_bias_to_zero() -> None:
    r = RunningStat(0.9)
    r.add(np.array([1.0, 3.0]))
    assert (r.mean, r.square, r.std) == pytest.approx((2.0, 5.0, 1.0))  # the first batch counts whole
    r.add(np.array([4.0]))
    # weights 0.9 * 0.1 and 0.1: the new batch counts 0.1 / 0.19
    assert r.mean == pytest.approx((0.09 * 2 + 0.1 * 4) / 0.19)
    assert r.square == pytest.approx((0.09 * 5 + 0.1 * 16) / 0.19)
    assert r.weight == pytest.approx(0.19)
    for _ in range(300):
        r.add(np.array([6.0, 8.0]))
    assert (r.mean, r.std) == pytest.approx((7.0, 1.0))


# critic


def test_value_loss_takes_the_worse_of_clipped_and_unclipped() -> None:
    value = torch.tensor([1.0, 0.2, -1.0])
    out = value_loss(value, torch.zeros(3), torch.full((3,), 2.0), 0.5)
    # 1 moved 0.5 too far: (0.5 - 2)^2;  0.2 is within: 1.8^2;  -1 moved the wrong way: (-1 - 2)^2
    torch.testing.assert_close(out, torch.tensor([2.25, 3.24, 9.0]))


def test_value_loss_stops_pulling_once_the_value_moved_by_the_clip() -> None:
    value = torch.tensor([0.6, 0.4], requires_grad=True)
    value_loss(value, torch.zeros(2), torch.full((2,), 2.0), 0.5).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(value.grad, torch.tensor([0.0, -3.2]))


def test_explained_variance_is_one_when_perfect_zero_for_a_constant_negative_when_worse() -> None:
    target = np.array([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(target, target) == 1.0
    assert explained_variance(target + 5, target) == 1.0  # a constant offset is no variance
    assert explained_variance(np.full(4, 1.5), target) == 0.0
    assert explained_variance(-target, target) == pytest.approx(-3.0)  # 1 - Var(2 t) / Var(t)
    assert explained_variance(target, np.ones(4)) == 0.0
