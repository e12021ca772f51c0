"""Intervals and tests against numbers worked by hand, readable loops, scipy, and a synthetic null."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from jointrag.eval import statistics
from jointrag.eval.statistics import (
    Difference,
    Interval,
    as_json,
    bootstrap_mean,
    bootstrap_means,
    holm,
    paired_difference,
    paired_differences,
    paired_over_seeds,
    seed_interval,
    sign_flip_p,
)

SCORES_N = np.random.default_rng(7).beta(0.5, 0.5, size=120)  # like F1: much at both ends
OTHER_N = np.clip(SCORES_N + np.random.default_rng(8).normal(0.05, 0.2, size=120), 0, 1)


def test_bootstrap_of_a_constant_has_no_width() -> None:
    assert bootstrap_mean([0.25] * 10) == Interval(0.25, 0.25, 0.25)
    assert bootstrap_mean([0.5]) == Interval(0.5, 0.5, 0.5)


def test_bootstrap_of_two_values_is_worked_by_hand() -> None:
    # values 0, 1: a resample's mean is 0, 1/2, 1 with probability 1/4, 1/2, 1/4
    assert bootstrap_mean([0.0, 1.0], level=0.95) == Interval(0.5, 0.0, 1.0)  # the 2.5% point lies within the first 1/4
    assert bootstrap_mean([0.0, 1.0], level=0.4) == Interval(0.5, 0.5, 0.5)  # the 30% point lies within the middle 1/2


@pytest.mark.parametrize("chunk", [1, 1000, 1 << 22])
def test_bootstrap_equals_its_loop_twin_at_any_chunk_size(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, means = np.random.default_rng(3), []
    for _ in range(300):
        drawn = [SCORES_N[i] for i in rng.integers(0, 120, size=120)]
        means.append(math.fsum(drawn) / 120)
    lo, hi = np.quantile(means, [0.05, 0.95])

    monkeypatch.setattr(statistics, "_CHUNK", chunk)
    interval = bootstrap_mean(SCORES_N, resamples=300, level=0.9, seed=3)
    assert (interval.mean, interval.lo, interval.hi) == pytest.approx((SCORES_N.mean(), lo, hi), abs=1e-12)


def test_bootstrap_agrees_with_scipy() -> None:
    ours = bootstrap_mean(SCORES_N, resamples=20_000, seed=1)
    theirs = stats.bootstrap(
        (SCORES_N,), np.mean, n_resamples=20_000, method="percentile", batch=500, rng=np.random.default_rng(2)
    ).confidence_interval
    # Monte Carlo error of a 2.5% point of a normal mean: se sqrt(.025 * .975 / 20,000) / .0584 = .019 se,
    # times sqrt 2 for a difference of two: .027 se; five of these are .13 se
    standard_error = SCORES_N.std() / math.sqrt(120)
    assert (ours.lo, ours.hi) == pytest.approx((theirs.low, theirs.high), abs=0.13 * standard_error)


def test_a_column_has_the_same_bits_alone_and_among_others() -> None:
    together = bootstrap_means(np.stack([SCORES_N, OTHER_N, SCORES_N], axis=1), resamples=500, seed=5)
    assert together == [bootstrap_mean(v, resamples=500, seed=5) for v in (SCORES_N, OTHER_N, SCORES_N)]


def test_same_seed_same_numbers_and_another_seed_others() -> None:
    assert bootstrap_mean(SCORES_N, 200, seed=1) == bootstrap_mean(SCORES_N, 200, seed=1)
    assert bootstrap_mean(SCORES_N, 200, seed=1) != bootstrap_mean(SCORES_N, 200, seed=2)
    pair = [paired_difference(OTHER_N, SCORES_N, 200, seed=s, permutations=200) for s in (4, 4, 5)]
    assert pair[0] == pair[1] != pair[2]
    seeds = [paired_over_seeds([SCORES_N, OTHER_N], 200, seed=s) for s in (4, 4, 5)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_bootstrap_is_fast_and_its_memory_bounded() -> None:
    values_N = np.linspace(0, 1, 600)
    seconds = []
    for _ in range(3):  # the best of three, for a machine shared with others
        started = time.perf_counter()
        bootstrap_mean(values_N)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.3
    tracemalloc.start()
    bootstrap_mean(values_N)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6  # indices and values of one chunk, 4.2 MB each; all at once would be 96 MB


def test_paired_difference_has_the_interval_of_the_differences() -> None:
    difference = paired_difference(OTHER_N, SCORES_N, resamples=400, seed=2, permutations=50)
    interval = bootstrap_mean(OTHER_N - SCORES_N, resamples=400, seed=2)
    assert (difference.mean, difference.lo, difference.hi) == (interval.mean, interval.lo, interval.hi)


def test_paired_differences_are_those_of_each_column() -> None:
    a_NM, b_NM = np.stack([OTHER_N, SCORES_N], axis=1), np.stack([SCORES_N, OTHER_N], axis=1)
    there, back = paired_differences(a_NM, b_NM, resamples=300, permutations=300)
    assert there == paired_difference(OTHER_N, SCORES_N, resamples=300, permutations=300)
    assert back.mean == -there.mean
    assert back.p == there.p  # two-sided, under the same flips


def test_sign_flip_p_of_three_equal_differences_is_a_quarter() -> None:
    # d = 1, 1, 1: |sum| = 3 only for +++ and ---, 2 of 8 patterns. Standard error sqrt(.25 * .75 / 10,000) = .0043
    assert sign_flip_p([1.0, 1.0, 1.0]) == pytest.approx(0.25, abs=0.02)


def test_sign_flip_p_counts_ties_that_rounding_would_break() -> None:
    # d = .1, .2, .3, -.6: each pattern and its mirror; the observed sum is 0, so every pattern is as extreme: p = 1
    assert sign_flip_p([0.1, 0.2, 0.3, -0.6], permutations=500) == 1.0
    # d = .1 ten times: 2 of 1,024 patterns reach 1.0, which floats miss by 1e-16 one way or the other
    assert sign_flip_p([0.1] * 10, permutations=40_000) == pytest.approx(2 / 1024, abs=0.0012)


def test_sign_flip_p_is_one_without_a_difference_and_never_zero() -> None:
    assert sign_flip_p([0.0] * 20) == 1.0
    assert sign_flip_p([1.0] * 100, permutations=999) == 1 / 1000  # (0 + 1) / (999 + 1)


@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_sign_flip_p_equals_its_loop_twin_at_any_chunk_size(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    differences = (OTHER_N - SCORES_N)[:70] - 0.03  # 70 questions need two 64-bit words of coins a permutation
    rng, extreme = np.random.default_rng([9, 1]), 1
    for _ in range(200):
        coins: list[int] = []
        for word in rng.integers(0, 1 << 64, size=2, dtype=np.uint64):
            for byte in int(word).to_bytes(8, "little"):
                coins += [byte >> bit & 1 for bit in range(7, -1, -1)]
        total = math.fsum(-d if coin else d for d, coin in zip(differences, coins, strict=False))
        extreme += abs(total) >= abs(math.fsum(differences))
    monkeypatch.setattr(statistics, "_CHUNK", chunk)
    assert sign_flip_p(differences, permutations=200, seed=9) == extreme / 201


def test_sign_flip_p_agrees_with_scipy() -> None:
    a_N, b_N = OTHER_N[:60], SCORES_N[:60] + 0.03
    theirs = stats.permutation_test(
        (a_N, b_N),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=20_000,
        batch=1000,
        rng=np.random.default_rng(0),
    ).pvalue
    ours = paired_difference(a_N, b_N, resamples=10, permutations=20_000).p
    assert 0.02 < theirs < 0.98  # a case that can tell
    # scipy doubles the smaller tail, so its error is 2 sqrt(p/2 (1 - p/2) / 20,000) <= .0061, ours <= .0035:
    # .007 together; four of these
    assert ours == pytest.approx(theirs, abs=0.028)


def test_under_the_null_five_percent_of_p_values_lie_below_five_percent() -> None:
    rng, below = np.random.default_rng(12), 0
    for repeat in range(1000):
        # exact level of p < .05 at 200 permutations: 1 + c <= 10 of 201 ranks = 4.98%; standard error .7%
        below += sign_flip_p(rng.normal(size=50), permutations=200, seed=repeat) < 0.05
    assert 30 <= below <= 70


def test_holm_is_worked_by_hand() -> None:
    # ascending .005 .01 .03 .04, times 4 3 2 1: .02 .03 .06 .04; running maximum: .02 .03 .06 .06
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02], abs=1e-12)
    # .3 * 3 = .9, .5 * 2 -> 1, then at least 1
    assert holm([0.5, 0.9, 0.3]) == pytest.approx([1.0, 1.0, 0.9], abs=1e-12)
    assert holm([0.2]) == [0.2]
    assert holm([]) == []
    # equal p-values get equal adjustments: .02 * 3, .02 * 2, .02 * 1 -> all .06
    assert holm([0.02, 0.02, 0.02]) == pytest.approx([0.06] * 3, abs=1e-12)


def test_over_seeds_every_seed_weighs_the_same() -> None:
    # means .1 and .5 -> .3, though the first seed has four times the questions
    difference = paired_over_seeds([np.full(40, 0.1), np.full(10, 0.5)], resamples=2000)
    assert difference.mean == pytest.approx(0.3, abs=1e-12)
    # questions do not vary; resampled pairs of seeds give .1, .3, .5 with probability 1/4, 1/2, 1/4
    assert (difference.lo, difference.hi) == pytest.approx((0.1, 0.5), abs=1e-12)
    assert difference.p == pytest.approx(2 / 2001, abs=1e-12)  # no resample at or below 0: 2 (1 + 0) / (R + 1)


def test_over_one_seed_it_is_the_bootstrap_over_questions() -> None:
    difference = paired_over_seeds([OTHER_N - SCORES_N], resamples=20_000)
    plain = bootstrap_mean(OTHER_N - SCORES_N, resamples=20_000, seed=1)
    standard_error = (OTHER_N - SCORES_N).std() / math.sqrt(120)
    assert difference.mean == plain.mean
    assert (difference.lo, difference.hi) == pytest.approx((plain.lo, plain.hi), abs=0.13 * standard_error)


def test_over_seeds_the_variance_is_that_of_seeds_plus_that_of_questions() -> None:
    # S seeds of n questions: Var = (variance of the seed means) / S + mean over seeds of (question variance / n) / S
    rng = np.random.default_rng(0)
    diffs = [rng.normal(centre, 0.3, size=50) for centre in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)]
    variance = np.var([d.mean() for d in diffs]) / 6 + np.mean([d.var() / 50 for d in diffs]) / 6
    difference = paired_over_seeds(diffs, resamples=20_000)
    width = 2 * 1.96 * math.sqrt(variance)
    assert difference.hi - difference.lo == pytest.approx(width, rel=0.04)


def test_questions_that_all_seeds_share_are_drawn_once_for_all_of_them() -> None:
    # five seeds with the very same differences tell no more than one: the interval is that of the questions
    rng = np.random.default_rng(0)
    d = rng.normal(0.1, 0.3, size=100)
    one = bootstrap_mean(d, resamples=20_000)
    crossed = paired_over_seeds([d] * 5, resamples=20_000, crossed=True)
    nested = paired_over_seeds([d] * 5, resamples=20_000)
    assert (crossed.lo, crossed.hi) == pytest.approx((one.lo, one.hi), abs=0.003)
    assert nested.hi - nested.lo < 0.6 * (crossed.hi - crossed.lo)


def test_over_seeds_without_a_difference_p_is_one() -> None:
    assert paired_over_seeds([np.zeros(5), np.zeros(5)], resamples=100).p == 1.0


def test_seed_interval_is_worked_by_hand() -> None:
    # mean .2, s = .1, t(.975, 2) = 4.302653: half width 4.302653 * .1 / sqrt 3 = .248414
    interval = seed_interval([0.1, 0.2, 0.3])
    assert (interval.mean, interval.lo, interval.hi) == pytest.approx((0.2, -0.048414, 0.448414), abs=1e-6)


@pytest.mark.parametrize("seeds", [2, 3, 4, 5, 6, 10, 31])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_seed_interval_agrees_with_scipy(seeds: int, level: float) -> None:
    values_S = SCORES_N[:seeds]
    lo, hi = stats.t.interval(level, seeds - 1, loc=values_S.mean(), scale=stats.sem(values_S))
    ours = seed_interval(values_S, level)
    assert (ours.lo, ours.hi) == pytest.approx((lo, hi), rel=1e-9)


def test_as_json_is_the_form_of_eval_json() -> None:
    assert as_json(Interval(0.5, 0.4, 0.6)) == {"mean": 0.5, "interval": [0.4, 0.6]}
    assert as_json(Difference(0.5, 0.4, 0.6, 0.01)) == {"mean": 0.5, "interval": [0.4, 0.6], "p": 0.01}
    computed = as_json(paired_difference(OTHER_N, SCORES_N, resamples=20, permutations=20))
    assert json.loads(json.dumps(computed)) == computed  # plain floats, none of numpy's


def test_input_is_not_changed() -> None:
    a_N, b_N = OTHER_N.copy(), SCORES_N.copy()
    paired_difference(a_N, b_N, resamples=20, permutations=20)
    paired_over_seeds([a_N, b_N], resamples=20)
    assert (a_N == OTHER_N).all()
    assert (b_N == SCORES_N).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_mean([]), "at least one question"),
        (lambda: bootstrap_mean([[1.0, 2.0]]), r"values: got shape \(1, 2\)"),
        (lambda: bootstrap_mean([0.1, math.nan]), "got nan in row 1, column 0.*leave out"),
        (lambda: bootstrap_mean([0.1], resamples=0), "resamples: got 0"),
        (lambda: bootstrap_mean([0.1], level=95), "level: got 95"),
        (lambda: bootstrap_means([0.1, 0.2]), r"expected \[N, M\]"),
        (lambda: paired_difference([0.1, 0.2], [0.1]), "pair the same questions"),
        (lambda: sign_flip_p([0.1], permutations=0), "permutations: got 0"),
        (lambda: holm([0.1, 1.5]), "p_values: got 1.5"),
        (lambda: holm([math.nan]), "p_values: got nan"),
        (lambda: paired_over_seeds([]), "got no seed"),
        (lambda: paired_over_seeds([[0.1], []]), r"diffs\[1\]: got shape"),
        (lambda: seed_interval([0.1]), "at least 2"),
        (lambda: seed_interval([0.1, 0.2], level=1.0), "level: got 1.0"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
