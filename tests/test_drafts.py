"""What a round decides from its facts: means, scale, weights and why training ends."""

import math

import msgspec
import pytest

from ravnest_fed.decree import MAX_METRIC, check_body, count, reduction_of, stop_reason, weighted_means
from ravnest_fed.errors import VerificationError
from ravnest_fed.facts import Counted, Evaluation
from tests.building import contribution, decide, tiny

ONE = tiny()
FEDERATION = ONE.federation
REPLICA = ONE.replica()
for _ in range(2):
    _before = decide(ONE, REPLICA, [contribution(ONE, REPLICA.head, member) for member in (0, 1)])
    REPLICA.fold(_before.body, _before.raw, _before.read_update)
HEAD = REPLICA.head


def test_means_of_the_greatest_metrics_are_finite() -> None:
    most = [Evaluation(b"", str(n), 0, b"", 2**48, {"loss": MAX_METRIC * (-1) ** n}) for n in range(1023)]
    assert math.isfinite(weighted_means(most)["loss"])


def test_a_metric_is_averaged_over_those_that_measured_it() -> None:
    found = [
        Evaluation(b"", "a", 0, b"", 1, {"loss": 1.0, "accuracy": 0.5}),
        Evaluation(b"", "b", 0, b"", 3, {"loss": 3.0}),
    ]
    assert weighted_means(found) == {"accuracy": 0.5, "loss": 2.5}
    assert weighted_means([]) == {}


def test_the_first_round_draws_its_scale_from_its_own_contributions() -> None:
    head = ONE.replica().head
    small, large = (
        reduction_of(FEDERATION, head, [Counted("c", 1, b"", 1, 1, 1.0, greatest)]).scale_bits
        for greatest in (0.01, 10.0)
    )
    assert small > large
    assert reduction_of(FEDERATION, HEAD, [Counted("c", 1, b"", 1, 1, 1.0, 10.0)]).scale_bits == HEAD.scale_bits


def test_a_contribution_past_the_bound_weighs_less_than_its_share() -> None:
    manifest = contribution(ONE, HEAD, 0).manifest
    half = msgspec.structs.replace(manifest, norm=2 * HEAD.clip_bound)
    counted = count(FEDERATION, HEAD, half, b"")
    assert 2 * counted.weight == counted.share == count(FEDERATION, HEAD, manifest, b"").weight


@pytest.mark.parametrize(
    ("settings", "server_round", "metrics", "date_reached", "reason"),
    [
        ({}, 10**6, {"loss": 0.0}, False, ""),
        ({"stop.rounds": "5"}, 4, {}, False, ""),
        ({"stop.rounds": "5"}, 5, {}, False, "the last of 5 rounds is committed"),
        ({"stop.metric": "acc", "at_least": "0.9"}, 1, {"acc": 0.89}, False, ""),
        ({"stop.metric": "acc", "at_least": "0.9"}, 1, {"acc": 0.9}, False, "acc reached 0.9"),
        ({"stop.metric": "loss", "at_most": "0.1"}, 1, {"loss": 0.2}, False, ""),
        ({"stop.metric": "loss", "at_most": "0.1"}, 1, {"loss": 0.1}, False, "loss fell to 0.1"),
        ({"stop.metric": "loss", "at_most": "0.1"}, 1, {"other": 0.0}, False, ""),
        ({"stop.date": "2030-01-01T00:00:00+00:00"}, 1, {}, False, ""),
        ({"stop.date": "2030-01-01T00:00:00+00:00"}, 1, {}, True, "the date 2030-01-01T00:00:00+00:00 is reached"),
    ],
)
def test_training_ends_for_the_reasons_that_were_set(
    settings: dict[str, str], server_round: int, metrics: dict[str, float], date_reached: bool, reason: str
) -> None:
    assert stop_reason(tiny(settings=settings).federation, server_round, metrics, date_reached) == reason


def test_a_body_that_stops_at_the_date_is_accepted_where_a_date_is_set() -> None:
    one = tiny(settings={"stop.date": "2030-01-01T00:00:00+00:00"})
    replica = one.replica()
    decided = decide(one, replica, [contribution(one, replica.head, 0)], date_reached=True)
    assert decided.body.stop == "the date 2030-01-01T00:00:00+00:00 is reached"
    check_body(one.federation, replica.head, decided.body, decided.evidence)
    wrong = msgspec.structs.replace(decided.body, stop="the date 2020-01-01T00:00:00+00:00 is reached")
    with pytest.raises(VerificationError, match="stop is not"):
        check_body(one.federation, replica.head, wrong, decided.evidence)
