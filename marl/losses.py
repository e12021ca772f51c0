"""Pure functions of the update: clipped policy loss, k3 KL, normalisation, the KL controller, the value loss.

Decision-level values, token-level ratios, token sum and decision mean: a token mean would weigh agents by length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

MIN_DECISIONS = 32  # fewer of an agent: its running std is used


def k3(logp_DT: torch.Tensor, reference_DT: torch.Tensor) -> torch.Tensor:
    """Return exp(r) - r - 1 with r = reference - logp: unbiased for KL(pi, reference), never negative."""
    r = (reference_DT - logp_DT).clamp(-20.0, 20.0)
    return r.exp() - r - 1.0


@dataclass(frozen=True)
class PolicyLoss:
    """Terms of the policy loss of D decisions, per decision [D]."""

    total: torch.Tensor
    kl: torch.Tensor
    entropy: torch.Tensor
    clipped: torch.Tensor  # share of tokens whose ratio left the clip range


def policy_loss(
    logp_DT: torch.Tensor,
    old_DT: torch.Tensor,
    reference_DT: torch.Tensor,
    entropy_DT: torch.Tensor,
    used_DT: torch.Tensor,
    advantage_D: torch.Tensor,
    clip_D: torch.Tensor,
    beta_D: torch.Tensor,
    eta_D: torch.Tensor,
    spared_D: torch.Tensor,
) -> PolicyLoss:
    """Return sum over tokens of -min(rho A, clip(rho, 1-eps, 1+eps) A) + beta k3 - eta H, for each decision.

    PPO, arXiv 1707.06347 eq. 7. T: tokens or picks; `used` False is padding. `spared`: the policy did not sample these,
    so there is neither ratio nor KL; max(0, A) log pi stands for the first part (SIL, arXiv 1806.05635, eq. 2).
    """
    ratio = (logp_DT - old_DT).exp()
    a, eps = advantage_D[:, None], clip_D[:, None]
    surrogate = torch.minimum(ratio * a, ratio.clamp(1 - eps, 1 + eps) * a)
    surrogate = torch.where(spared_D[:, None], a.clamp(min=0.0) * logp_DT, surrogate)
    kl = torch.where(spared_D[:, None], 0.0, k3(logp_DT, reference_DT))
    per_token = -surrogate + beta_D[:, None] * kl - eta_D[:, None] * entropy_DT
    used = used_DT.to(per_token.dtype)
    count = used.sum(1).clamp(min=1)
    outside = (((ratio - 1).abs() > eps) & ~spared_D[:, None]).to(per_token.dtype)
    return PolicyLoss(
        (per_token * used).sum(1),
        (kl * used).sum(1),
        (entropy_DT * used).sum(1) / count,
        (outside * used).sum(1) / count,
    )


def value_loss(value_D: torch.Tensor, old_D: torch.Tensor, target_D: torch.Tensor, clip: float) -> torch.Tensor:
    """Return the clipped squared error [D], in normalised units (PPO's value clipping)."""
    clipped = old_D + (value_D - old_D).clamp(-clip, clip)
    return torch.maximum((value_D - target_D) ** 2, (clipped - target_D) ** 2)


class RunningStat:
    """Mean and std of a stream, exponentially forgetting; the state is three numbers."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay, self.mean, self.square, self.weight = decay, 0.0, 0.0, 0.0

    def add(self, x: npt.NDArray[np.float64]) -> None:
        """Take one batch in."""
        if len(x) == 0:
            return
        keep = self.decay * self.weight
        share = (1 - self.decay) / (keep + 1 - self.decay) if self.weight else 1.0
        self.mean += share * (float(x.mean()) - self.mean)
        self.square += share * (float((x**2).mean()) - self.square)
        self.weight = keep + 1 - self.decay

    @property
    def std(self) -> float:
        """Standard deviation; 1 before the first batch."""
        return float(np.sqrt(max(self.square - self.mean**2, 0.0))) if self.weight else 1.0


def normalise(
    advantages: npt.NDArray[np.float64],
    running: RunningStat,
    floor: float = 0.05,
    counts: npt.NDArray[np.bool_] | None = None,
) -> npt.NDArray[np.float64]:
    """Return (A - mean) / max(std, floor) over one agent's decisions; with few of them the running std is used.

    counts: the decisions mean and std are of, by default all. Per agent, not over all: Dr. MAS (arXiv 2602.08847)
    measures 28.0 against 43.8 F1.
    """
    own = advantages if counts is None else advantages[counts]
    running.add(own)
    if len(advantages) == 0:
        return advantages
    few = len(own) < MIN_DECISIONS
    std = running.std if few else float(own.std())
    mean = running.mean if few else float(own.mean())
    return (advantages - mean) / max(std, floor)


class KLController:
    """beta <- beta (1 + gain clip(KL / target - 1, -.2, .2)), at least `floor` (arXiv 1909.08593)."""

    def __init__(self, beta: float, target: float, floor: float, gain: float = 1.0) -> None:
        self.beta, self.target, self.floor, self.gain = beta, target, floor, gain

    def observe(self, kl: float) -> None:
        """Take the mean KL per decision of one update."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.beta = max(self.floor, self.beta * (1.0 + self.gain * error))


def explained_variance(value: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> float:
    """Return 1 - Var(target - value) / Var(target): 1 = perfect, 0 = as good as a constant; 0 for constant targets."""
    spread = float(target.var())
    return 1.0 - float((target - value).var()) / spread if spread > 1e-12 else 0.0
