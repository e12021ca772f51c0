"""Intervals and tests for means over questions: bootstrap, paired differences, Holm, several seeds.

Axes, as suffixes: R resamples, N questions, M metrics (or any columns measured on the same questions), S seeds.

One set of resample indices serves every column, so M metrics of a variant cost little more than one, and a column's
interval does not depend on which other columns stand beside it. Work goes in chunks of at most _CHUNK indices; the
random stream is read in row order, so the chunk size changes memory, never a number. Sums are numpy's own (no BLAS,
no threads): the same seed gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_CHUNK = 1 << 19  # indices held at once: 4 MB, and as much again for the values they pick
_TIE = 1e-12  # relative; two sign patterns with equal sums may differ by rounding, and must still count as a tie


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the ends of its interval."""

    mean: float
    lo: float
    hi: float


@dataclass(frozen=True, slots=True)
class Difference(Interval):
    """A mean difference with its interval and the two-sided p-value of "no difference"."""

    p: float


def as_json(interval: Interval) -> dict[str, float | list[float]]:
    """{"mean": x, "interval": [lo, hi]}, and "p" for a Difference: the form of every figure in eval.json."""
    figure: dict[str, float | list[float]] = {"mean": interval.mean, "interval": [interval.lo, interval.hi]}
    if isinstance(interval, Difference):
        figure["p"] = interval.p
    return figure


def bootstrap_mean(values: npt.ArrayLike, resamples: int = 10_000, level: float = 0.95, seed: int = 0) -> Interval:
    """Mean over questions, interval = percentiles (1 -+ level)/2 of the means of questions drawn with replacement.

    One value gives an interval of no width: a bootstrap sees only the spread between the questions it has.
    """
    return bootstrap_means(_column("values", values), resamples, level, seed)[0]


def bootstrap_means(
    matrix: npt.ArrayLike, resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> list[Interval]:
    """`bootstrap_mean` of each column of matrix [N, M], all columns under the same resamples; parallel to M.

    A question without a value in some column (no gold passages: recall None) is no NaN here: leave it out and
    bootstrap that column alone.
    """
    values_NM = _matrix("matrix", matrix)
    means_MR = _resampled_means(values_NM, _positive("resamples", resamples), np.random.default_rng(seed))
    return [_percentiles(values_NM[:, m].mean(), means_MR[m], level) for m in range(values_NM.shape[1])]


def paired_difference(
    a: npt.ArrayLike,
    b: npt.ArrayLike,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
    permutations: int = 10_000,
) -> Difference:
    """Mean of a - b over the same questions in the same order; bootstrap interval, sign-flip p.

    Comparing two unpaired intervals instead would count the spread between easy and hard questions as doubt about the
    difference, which it is not.
    """
    return paired_differences(_column("a", a), _column("b", b), resamples, level, seed, permutations)[0]


def paired_differences(
    a: npt.ArrayLike,
    b: npt.ArrayLike,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
    permutations: int = 10_000,
) -> list[Difference]:
    """`paired_difference` of each column of a and b [N, M], resamples and sign flips shared; parallel to M."""
    a_NM, b_NM = _matrix("a", a), _matrix("b", b)
    if a_NM.shape != b_NM.shape:
        raise ValueError(
            f"a, b: got shapes {a_NM.shape} and {b_NM.shape}, expected one; pair the same questions in the same order"
        )
    differences_NM = a_NM - b_NM
    intervals = bootstrap_means(differences_NM, resamples, level, seed)
    p_M = _sign_flip_ps(differences_NM, permutations, seed)
    return [Difference(i.mean, i.lo, i.hi, p) for i, p in zip(intervals, p_M, strict=True)]


def sign_flip_p(differences: npt.ArrayLike, permutations: int = 10_000, seed: int = 0) -> float:
    """Two-sided p = (1 + #{|sum of s_i d_i| >= |sum of d_i|}) / (permutations + 1), signs s_i = +-1 by fair coins.

    Under "no difference" swapping a and b of any question is as likely as not, so nothing is assumed of the shape of
    the scores. The +1 counts the observed signs themselves: p is never 0, and a test at p <= alpha errs at most alpha
    of the time (Phipson and Smyth 2010). All differences zero: p = 1.
    """
    return _sign_flip_ps(_column("differences", differences), permutations, seed)[0]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm (1979): in ascending order, adjusted p_(i) = max over j <= i of min(1, (m - j + 1) p_(j)); input's order."""
    for p in p_values:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p_values: got {p!r}, expected a probability in [0, 1]")
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def paired_over_seeds(
    diffs: Sequence[npt.ArrayLike],
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
    crossed: bool = False,
) -> Difference:
    """Mean over seeds of the mean paired difference; resamples draw seeds, then questions within each seed drawn.

    crossed: all seeds asked the same questions in the same order, so one draw of questions serves all seeds; drawn
    anew for each, a question that happens to favour one side would count as often as there are seeds.

    `diffs[s]` holds seed s's per-question differences; seeds weigh the same however many questions they have. p is
    read off the same resamples, p = min(1, 2 (1 + min(#{mean <= 0}, #{mean >= 0})) / (R + 1)), so that it agrees with
    the interval (sign flips of questions would take a lucky seed for evidence). Resampling S seeds shows only
    (S - 1)/S of their variance, so for three seeds this is the narrow side; `seed_interval` of the seed means is the
    wide, safe one.
    """
    if len(diffs) == 0:
        raise ValueError("diffs: got no seed, expected one array of differences a seed")
    _positive("resamples", resamples)
    values_S = [_column(f"diffs[{s}]", values) for s, values in enumerate(diffs)]
    rng = np.random.default_rng(seed)
    drawn_RS = rng.integers(0, len(values_S), size=(resamples, len(values_S)))
    means_RS = np.empty(drawn_RS.shape)
    if crossed:
        means_SR = _resampled_means(np.concatenate(values_S, axis=1), resamples, rng)
        means_RS = np.take_along_axis(means_SR.T, drawn_RS, axis=1)
    else:
        for s, values_N1 in enumerate(values_S):
            here_RS = drawn_RS == s
            means_RS[here_RS] = _resampled_means(values_N1, int(here_RS.sum()), rng)[0]
    means_R = means_RS.mean(axis=1)
    interval = _percentiles(np.mean([values.mean() for values in values_S]), means_R, level)
    tail = min(int((means_R <= 0).sum()), int((means_R >= 0).sum()))
    return Difference(interval.mean, interval.lo, interval.hi, min(1.0, 2 * (1 + tail) / (resamples + 1)))


def seed_interval(values: npt.ArrayLike, level: float = 0.95) -> Interval:
    """Mean -+ t s / sqrt(S): Student's interval over one number a seed, s with S - 1, t at S - 1 degrees of freedom."""
    means_S = _column("values", values)[:, 0]
    if len(means_S) < 2:
        raise ValueError(
            "values: got 1 seed, expected at least 2; one seed says nothing about the spread between seeds"
        )
    mean = float(means_S.mean())
    half = _student_quantile(level, len(means_S) - 1) * float(means_S.std(ddof=1)) / math.sqrt(len(means_S))
    return Interval(mean, mean - half, mean + half)


def _resampled_means(values_NM: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Means [M, R] of each column over N questions drawn with replacement, the draw shared by the columns."""
    count, columns = values_NM.shape
    values_MN = np.ascontiguousarray(values_NM.T)
    means_MR = np.empty((columns, resamples))
    for rows in _chunks(resamples, count):
        picks_RN = rng.integers(0, count, size=(rows.stop - rows.start, count))
        for m in range(columns):
            means_MR[m, rows] = values_MN[m][picks_RN].mean(axis=1)
    return means_MR


def _sign_flip_ps(differences_NM: Floats, permutations: int, seed: int) -> list[float]:
    """`sign_flip_p` of each column under shared signs; the flips come from a stream apart from the bootstrap's."""
    count, columns = differences_NM.shape
    rng = np.random.default_rng([seed, 1])
    differences_MN = np.ascontiguousarray(differences_NM.T)
    threshold_M = np.abs(differences_MN.sum(axis=1)) - _TIE * np.abs(differences_MN).sum(axis=1)
    extreme_M = [1] * columns  # the observed signs
    for rows in _chunks(_positive("permutations", permutations), count):
        words = rng.integers(0, 1 << 64, size=(rows.stop - rows.start, -(-count // 64)), dtype=np.uint64)
        flip_RN = np.unpackbits(words.astype("<u8").view(np.uint8), axis=1, count=count).view(np.bool_)
        for m in range(columns):
            sums_R = np.where(flip_RN, -differences_MN[m], differences_MN[m]).sum(axis=1)
            extreme_M[m] += int((np.abs(sums_R) >= threshold_M[m]).sum())
    return [extreme / (permutations + 1) for extreme in extreme_M]


def _chunks(rows: int, width: int) -> Iterator[slice]:
    """Slices that cover `rows`, each of at most _CHUNK numbers (and at least one row)."""
    step = max(1, _CHUNK // width)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _percentiles(mean: np.floating | float, means_R: Floats, level: float) -> Interval:
    """The percentile interval of a resampled mean."""
    _check_level(level)
    lo, hi = np.quantile(means_R, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(mean), float(lo), float(hi))


def _student_quantile(level: float, degrees: int) -> float:
    """The t with P(|T| <= t) = level, by bisection on theta = atan(t / sqrt(degrees)).

    P is the finite series for whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4): no scipy needed.
    """
    _check_level(level)
    odd = degrees % 2 == 1

    def within(theta: float) -> float:
        cos, term = math.cos(theta), math.cos(theta) if odd else 1.0
        series = 0.0
        for k in range(2 if odd else 1, degrees, 2):  # odd: cos + 2/3 cos^3 ...; even: 1 + 1/2 cos^2 ...
            series += term
            term *= cos * cos * k / (k + 1)
        series *= math.sin(theta)
        return 2 / math.pi * (theta + series) if odd else series

    lo, hi = 0.0, math.pi / 2
    for _ in range(100):
        middle = (lo + hi) / 2
        lo, hi = (middle, hi) if within(middle) < level else (lo, middle)
    return math.sqrt(degrees) * math.tan(lo)


def _column(name: str, values: npt.ArrayLike) -> Floats:
    """A vector of N numbers as a matrix [N, 1]."""
    values_N = np.asarray(values, dtype=np.float64)
    if values_N.ndim != 1:
        raise ValueError(f"{name}: got shape {values_N.shape}, expected one number a question, shape [N]")
    return _matrix(name, values_N[:, None])


def _matrix(name: str, values: npt.ArrayLike) -> Floats:
    values_NM = np.asarray(values, dtype=np.float64)
    if values_NM.ndim != 2 or values_NM.shape[0] == 0:
        raise ValueError(f"{name}: got shape {values_NM.shape}, expected [N, M] with at least one question")
    if not np.isfinite(values_NM).all():
        row, column = np.argwhere(~np.isfinite(values_NM))[0]
        raise ValueError(
            f"{name}: got {values_NM[row, column]} in row {row}, column {column}, expected finite numbers; "
            "leave out questions without a value"
        )
    return values_NM


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name}: got {value}, expected at least 1")
    return value


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level: got {level}, expected a share between 0 and 1, such as 0.95")
