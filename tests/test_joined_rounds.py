"""Rounds of whole federations in memory: agreement, exactness, view changes, restarts, minorities."""

import numpy as np
import pytest

from ravnest_fed.decree import check_votes
from ravnest_fed.facts import Body, decode
from ravnest_fed.messages import CommitNotice, PlanNotice, Propose, VoteNotice, Waiting
from tests.joined import BLOCK, Joined


def proposer_of(joined: Joined) -> str:
    """Who proposes in the view that the open round is in."""
    agreements = [broker.core.round._agreement for broker in joined.brokers.values()]
    view = max(agreement.view for agreement in agreements)
    return agreements[0].proposer(view)


@pytest.mark.parametrize("brokers", [1, 2, 3, 5])
def test_a_round_commits_on_every_broker_with_the_same_state(brokers: int) -> None:
    joined = Joined.started(brokers, 4)
    for server_round in (1, 2, 3):
        joined.contribute()
        assert joined.rounds() == {server_round}
        assert len({head.commit_hash for head in joined.heads().values()}) == 1
        assert joined.model_hashes() == {head.model_hash for head in joined.heads().values()}


def test_what_is_still_on_its_way_is_abandoned_once_the_round_is_committed_durably() -> None:
    joined = Joined.started(3, 4)
    joined.contribute()
    joined.contribute()
    assert all(broker.abandoned == [(1, "spool"), (2, "spool")] for broker in joined.brokers.values())


def test_the_bits_do_not_depend_on_arrival_order_or_on_the_number_of_brokers() -> None:
    seen = set()
    for brokers in (1, 3, 5):
        for seed in range(4):
            joined = Joined.started(brokers, 5, seed=seed)
            for _ in range(3):
                joined.contribute(*joined.random.sample(list(joined.clients), 5))  # type: ignore[union-attr]
            assert joined.rounds() == {3}
            seen |= joined.model_hashes()
    assert len(seen) == 1


def test_the_update_is_the_weighted_mean_of_the_deltas() -> None:
    joined = Joined.started(3, 3, codecs={"up": "fp32", "down": "fp32"}, strategy={"clip_factor": 0.0})
    before = joined.initial.vector.copy()
    joined.contribute()
    body = decode(Body, joined.brokers["b1"].disk.commits[1].body)
    mean = np.zeros(3 * BLOCK, np.float64)
    for counted in body.counted:
        name = joined.federation.name_of(counted.client)
        delta = np.random.default_rng([int(name[1:]), 0]).standard_normal(3 * BLOCK, np.float32) * np.float32(0.01)
        mean += counted.weight * delta.astype(np.float64)
    mean /= sum(counted.share for counted in body.counted)
    after = joined.brokers["b2"].replica.state
    np.testing.assert_allclose(after.vector[: 3 * BLOCK], before[: 3 * BLOCK] - mean, rtol=0, atol=2e-7)
    assert after.counters[0] == joined.federation.rounds.local_steps
    np.testing.assert_array_equal(after.vector[3 * BLOCK :][:5], np.full(5, 0.875, np.float32))


def test_every_commit_carries_the_votes_of_a_majority() -> None:
    joined = Joined.started(5, 3)
    joined.contribute()
    for broker in joined.brokers.values():
        commit = broker.disk.commits[1]
        assert check_votes(joined.federation, commit) == 0
        assert len(commit.votes) >= 3


def test_shards_are_spread_over_the_brokers() -> None:
    joined = Joined.started(3, 2)
    owners = [joined.heads()["b1"].owners]
    joined.contribute()
    owners.append(joined.heads()["b1"].owners)
    for one in owners:
        assert len(one) == len(joined.federation.schema.shards) == 5
        assert set(one) == {0, 1, 2}
        assert max(one.count(index) for index in range(3)) <= 2


@pytest.mark.parametrize("victim", ["b1", "b2", "b3"])
def test_a_dead_broker_costs_no_committed_round_and_training_goes_on(victim: str) -> None:
    joined = Joined.started(3, 4, rounds={"grace_seconds": 2.0})
    joined.contribute()
    joined.kill(victim)
    joined.join_clients()
    for _ in range(3):
        joined.contribute()
        joined.pass_time(5)
    assert joined.rounds() == {4}
    assert len(joined.model_hashes()) == 1
    joined.restart(victim)
    joined.pass_time(5)
    assert joined.rounds() == {4}
    assert len(joined.model_hashes()) == 1 and len(joined.heads()) == 3


@pytest.mark.parametrize("stage", [PlanNotice, Propose, VoteNotice])
def test_a_proposer_that_dies_in_the_middle_is_replaced(stage: type) -> None:
    joined = Joined.started(3, 4, rounds={"grace_seconds": 2.0})
    proposer = proposer_of(joined)
    name = joined.by_id[proposer].name

    def die(source: str, target: str, message: object) -> bool:
        if source == proposer and isinstance(message, stage):
            joined.by_id[proposer].alive = False
            return True
        return False

    joined.dropping = die
    joined.contribute()
    assert not joined.by_id[proposer].alive
    joined.kill(name)
    joined.pass_time(10)
    if joined.rounds() == {0}:
        joined.join_clients()
        joined.contribute()
        joined.pass_time(30)
    assert joined.rounds() == {1}
    joined.restart(name)
    joined.pass_time(10)
    assert joined.rounds() == {1} and len({head.commit_hash for head in joined.heads().values()}) == 1


def test_a_silent_proposer_is_passed_over_by_time() -> None:
    joined = Joined.started(3, 4)
    proposer = proposer_of(joined)
    joined.dropping = lambda source, target, message: source == proposer and isinstance(message, PlanNotice)
    joined.contribute()
    assert joined.rounds() == {0}
    joined.pass_time(30)
    assert joined.rounds() == {1}
    assert len({head.commit_hash for head in joined.heads().values()}) == 1


def test_a_minority_takes_uploads_and_commits_nothing() -> None:
    joined = Joined.started(3, 3)
    joined.kill("b2")
    joined.kill("b3")
    joined.join_clients()
    joined.contribute()
    joined.pass_time(60)
    assert joined.rounds() == {0}
    assert all(client.receipts() == 1 for client in joined.clients.values())
    waiting = joined.brokers["b1"].core.waiting(joined.now).waiting
    assert waiting == "waiting for a majority of brokers (1 of 3 here)"
    told = [message.text for _, _, message in joined.to_client if isinstance(message, Waiting)]
    assert waiting in told
    joined.restart("b2")
    joined.pass_time(30)
    assert joined.rounds() == {1}


def test_a_split_commits_on_the_side_of_the_majority_and_heals() -> None:
    joined = Joined.started(3, 3, rounds={"grace_seconds": 1.0})
    lonely = joined.brokers["b3"].identity.node_id
    for name in ("b1", "b2"):
        other = joined.brokers[name]
        joined.cut.add(frozenset((lonely, other.identity.node_id)))
        from brokers import events as ev

        other.handle(ev.PeerDown(lonely))
        joined.brokers["b3"].handle(ev.PeerDown(other.identity.node_id))
    joined.contribute()
    joined.pass_time(30)
    assert joined.heads()["b1"].server_round == joined.heads()["b2"].server_round == 1
    assert joined.heads()["b3"].server_round == 0
    joined.cut.clear()
    for name in ("b1", "b2"):
        joined.brokers[name].handle(ev.PeerUp(lonely))
        joined.brokers["b3"].handle(ev.PeerUp(joined.brokers[name].identity.node_id))
    joined.pass_time(10)
    assert joined.rounds() == {1} and len(joined.model_hashes()) == 1


def test_all_brokers_restart_in_the_middle_of_a_round() -> None:
    joined = Joined.started(3, 4)
    joined.contribute()
    joined.contribute("c1", "c2", "c3")
    for name in joined.brokers:
        joined.kill(name)
    for name in joined.brokers:
        joined.restart(name)
    joined.join_clients()
    joined.contribute("c4")
    joined.pass_time(20)
    assert joined.rounds() == {2}
    assert len(joined.model_hashes()) == 1
    body = decode(Body, joined.brokers["b1"].disk.commits[2].body)
    assert len(body.counted) == 4


def test_one_client_below_the_minimum_waits_and_both_ends_say_so() -> None:
    joined = Joined.started(3, 2, rounds={"min_contributions": 2})
    joined.contribute("c1")
    joined.pass_time(60)
    assert joined.rounds() == {0}
    assert joined.brokers["b2"].core.waiting(joined.now).waiting == "waiting 1/2 contributions"
    told = [
        message.text for _, session, message in joined.to_client if session == "c1" and isinstance(message, Waiting)
    ]
    assert told[-1] == "waiting 1/2 contributions"
    joined.contribute("c2")
    assert joined.rounds() == {1}


def test_a_vanished_client_is_waited_for_no_longer_than_the_grace() -> None:
    joined = Joined.started(3, 3, rounds={"grace_seconds": 4.0})
    joined.contribute()
    joined.contribute("c1", "c2")
    joined.pass_time(2)
    assert joined.rounds() == {1}
    joined.pass_time(4)
    assert joined.rounds() == {2}
    joined.contribute("c1", "c2")
    from brokers import events as ev

    joined.brokers[joined.home_of("c3")].handle(ev.SessionLost("c3"))
    joined.deliver()
    assert joined.rounds() == {3}


def test_a_second_delta_of_a_client_for_a_round_drops_both() -> None:
    joined = Joined.started(3, 3, rounds={"grace_seconds": 1.0, "min_contributions": 2})
    cheat = joined.clients["c1"]
    home = joined.home_of("c1")
    cheat.contribute(home)
    joined.deliver()
    cheat.contribute(home, scale=0.5)
    joined.deliver()
    assert cheat.refusals() == ["second-delta-for-a-round"]
    assert joined.brokers[home].disk.equivocations == [cheat.identity.node_id]


def test_a_clients_commit_notices_come_with_the_next_order() -> None:
    joined = Joined.started(3, 3)
    joined.contribute()
    for client in joined.clients.values():
        assert [message.server_round for message in client.received if isinstance(message, CommitNotice)] == [1]
        assert client.order is not None


def test_training_ends_at_the_last_round() -> None:
    joined = Joined.started(3, 2, stop={"rounds": 2})
    for _ in range(2):
        joined.contribute()
    assert joined.rounds() == {2}
    assert {head.stop for head in joined.heads().values()} == {"the last of 2 rounds is committed"}
    joined.clients["c1"].contribute(joined.home_of("c1"))
    joined.deliver()
    assert joined.clients["c1"].refusals() == ["training-has-ended"]
    joined.pass_time(10)
    assert joined.rounds() == {2}
