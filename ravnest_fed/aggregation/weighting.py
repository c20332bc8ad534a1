"""The integer weight of a contribution, a pure function of signed and agreed facts.

The mean divides the sum of weight * delta by the sum of shares. A contribution's share says how much work it stands
for; its weight is its share, or less where its norm is past the bound. So clipping shrinks a delta without giving the
others more say.
"""

import math
from fractions import Fraction
from typing import Literal, NamedTuple

from ravnest_fed.aggregation.fixed_point import MAX_WEIGHT

Mode = Literal["examples", "equal"]


class Weight(NamedTuple):
    """How a contribution counts: 0 <= weight <= share <= 2^16."""

    weight: int
    share: int


def weigh(
    num_examples: int, max_examples: int, mode: Mode, norm: float, clip_bound: float, cap: int, staleness: int = 0
) -> Weight:
    """The weight of a contribution of `num_examples` out of the `max_examples` that an order may ask for.

    The share is ceil(2^16 * num_examples / max_examples) within 1 and `cap` (at most 2^16), or just `cap` in the mode
    "equal"; divided by sqrt(1 + staleness), rounded down but at least 1, for a delta that is so many rounds behind (Xie et
    al., "Asynchronous federated optimization" (2019)). The weight is the share times min(1, clip_bound / norm), rounded down;
    0 for a norm that is not finite.
    """
    cap = max(1, min(cap, MAX_WEIGHT))
    share = cap if mode == "equal" else max(1, min(cap, -(-MAX_WEIGHT * num_examples // max(max_examples, 1))))
    if staleness > 0:
        share = max(1, math.isqrt(share * share // (1 + staleness)))
    if not math.isfinite(norm):
        return Weight(0, share)
    if norm <= clip_bound:
        return Weight(share, share)
    return Weight(int(share * Fraction(max(clip_bound, 0.0)) / Fraction(norm)), share)
