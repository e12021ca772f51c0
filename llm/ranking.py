"""Plackett-Luce over candidates: logit = (z-scored index score + bounded residual . vector) / tau.

The residual is a projection of the head's encoding, zero at first, so that an untrained retriever is exactly the index.
Plackett (1975); sampling without replacement by Gumbel top-k (Kool et al. 2019, arXiv 1903.06059).
"""

from __future__ import annotations

import torch

BOUND = 6.0  # the residual moves a z-score by at most this


def logits(encoding_BH: torch.Tensor, projection_DH: torch.Tensor, scores_BN: torch.Tensor, vectors_BND: torch.Tensor,
           tau_B: torch.Tensor, legal_BN: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """Return candidate logits [B, N]; illegal candidates are -inf."""
    residual = encoding_BH.float() @ projection_DH.T.float()
    norm = residual.norm(dim=-1, keepdim=True)
    residual = residual * (BOUND / norm.clamp(min=BOUND))
    moved = scores_BN + torch.einsum("bd,bnd->bn", residual, vectors_BND)
    return (moved / tau_B[:, None]).masked_fill(~legal_BN, float("-inf"))


def order(logits_BN: torch.Tensor, picks: int, noise_BN: torch.Tensor | None) -> torch.Tensor:
    """Return the first `picks` rows [B, picks]: best first, or sampled with Gumbel noise; ties go to the lower row."""
    keys = logits_BN if noise_BN is None else logits_BN + noise_BN
    return torch.sort(keys, dim=-1, descending=True, stable=True).indices[:, :picks]


def log_prob(
    logits_BN: torch.Tensor, picked_BK: torch.Tensor, used_BK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return per-pick conditional log-probs and entropies [B, K]; entries with `used` False are 0."""
    remaining = logits_BN
    logps, entropies = [], []
    for k in range(picked_BK.shape[1]):
        logp = torch.log_softmax(remaining, -1)
        logps.append(logp.gather(1, picked_BK[:, k : k + 1])[:, 0])
        p = logp.exp()
        entropies.append(-(p * logp.masked_fill(p == 0, 0.0)).sum(-1))
        remaining = remaining.scatter(1, picked_BK[:, k : k + 1], float("-inf"))
        remaining = torch.where(torch.isfinite(remaining).any(-1, keepdim=True), remaining, torch.zeros_like(remaining))
    zero = torch.zeros((), dtype=logits_BN.dtype, device=logits_BN.device)
    return torch.where(used_BK, torch.stack(logps, 1), zero), torch.where(used_BK, torch.stack(entropies, 1), zero)
