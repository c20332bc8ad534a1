"""Agreement on one round: each rule by itself, and no two bodies under any order of messages, losses and crashes."""

import pytest

from brokers.agreement import Agreement, Bound, Consider, Decided, Free, RecordPromise, RecordVote, ToAll, ToPeer
from ravnest_fed.errors import LocalProtocolError
from ravnest_fed.facts import BlobRef, body_hash
from ravnest_fed.ledger import VoteRecord
from ravnest_fed.messages import Prepare, Promise, Propose, Refusal, VoteNotice
from tests.agreeing import Network, run, settle, signed_vote

ROUND = 4
RUNS = 4000


def three() -> Network:
    return Network(3, ROUND)


def agreement(network: Network, node: int, record: VoteRecord | None = None) -> Agreement:
    return network.agreement(Agreement, network.roster[node], record or VoteRecord())


def promise(view: int, voted: int = -1, body: bytes | None = None) -> Promise:
    return Promise(ROUND, view, voted, BlobRef.of(body) if body is not None else None)


def kinds(effects: list[object]) -> list[type]:
    return [type(effect.message) if isinstance(effect, (ToAll, ToPeer)) else type(effect) for effect in effects]


@pytest.mark.parametrize(("brokers", "majority"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_a_body_is_decided_by_more_than_half_of_the_roster_in_one_view(brokers: int, majority: int) -> None:
    network = Network(brokers, ROUND)
    one = agreement(network, 0)
    for count, node in enumerate(network.roster, 1):
        decided = one.on_vote(signed_vote(node, ROUND, 0, b"body"))
        assert bool(decided) == (count == majority)
        if decided:
            assert isinstance(decided[0], Decided)
            assert decided[0].body_hash == body_hash(b"body") and len(decided[0].votes) == majority


def test_votes_in_different_views_for_other_rounds_by_strangers_or_twice_do_not_add_up() -> None:
    network = three()
    one = agreement(network, 0)
    assert not one.on_vote(signed_vote(network.roster[0], ROUND, 0, b"body"))
    assert not one.on_vote(signed_vote(network.roster[0], ROUND, 0, b"body"))
    assert not one.on_vote(signed_vote(network.roster[1], ROUND, 1, b"body"))
    assert not one.on_vote(signed_vote(network.roster[1], ROUND + 1, 0, b"body"))
    assert not one.on_vote(signed_vote(network.roster[1], ROUND, 0, b"other"))
    assert not one.on_vote(signed_vote("stranger", ROUND, 0, b"body"))
    assert one.on_vote(signed_vote(network.roster[2], ROUND, 0, b"body"))


def test_the_right_to_propose_goes_around_the_roster_from_the_round_on() -> None:
    network = three()
    one = agreement(network, 0)
    assert [one.proposer(view) for view in range(4)] == [network.roster[(ROUND + view) % 3] for view in range(4)]


def test_only_the_proposer_of_a_view_is_heard_in_it() -> None:
    network = three()
    one = agreement(network, 0)
    other = network.roster[2]
    assert one.proposer(0) == network.roster[1]
    assert one.on_propose(other, 0, BlobRef.of(b"body")) == []
    assert one.on_prepare(network.roster[1], 1) == []
    assert [type(effect) for effect in one.on_propose(network.roster[1], 0, BlobRef.of(b"body"))] == [Consider]


def test_view_0_is_free_without_promises_for_its_proposer_alone() -> None:
    network = three()
    assert agreement(network, 1).start() == [Free(0)]
    assert agreement(network, 0).start() == [] and agreement(network, 2).start() == []


def test_a_later_view_is_free_once_a_majority_promised_and_nobody_had_voted() -> None:
    network = three()
    one = agreement(network, 2)
    assert kinds(one.enter(1)) == [RecordPromise, Prepare]
    with pytest.raises(LocalProtocolError):
        one.propose(1, b"body")
    assert one.on_promise("stranger", promise(1)) == []
    assert one.on_promise(network.roster[0], promise(0)) == []
    assert one.on_promise(network.roster[0], promise(1)) == [Free(1)]
    assert one.on_promise(network.roster[1], promise(1, 0, b"late")) == []
    assert kinds(one.propose(1, b"body")) == [RecordVote, Propose, VoteNotice]


def test_a_proposer_is_bound_to_the_highest_vote_among_the_promises() -> None:
    network = Network(5, ROUND)
    one = agreement(network, 4, VoteRecord(1, 1, b"mine"))
    me = one.proposer(5)
    assert me == network.roster[4]
    one.enter(5)
    assert one.on_promise(network.roster[0], promise(5, 0, b"old")) == []
    bound = one.on_promise(network.roster[1], promise(5, 3, b"highest"))
    assert bound == [Bound(5, BlobRef.of(b"highest"), (network.roster[1],))]


def test_a_proposer_is_bound_to_its_own_vote() -> None:
    network = three()
    one = agreement(network, 2, VoteRecord(0, 0, b"mine"))
    one.enter(1)
    assert one.on_promise(network.roster[0], promise(1)) == [Bound(1, BlobRef.of(b"mine"), (network.roster[2],))]


def test_a_broker_votes_once_in_a_view_and_says_the_same_vote_again() -> None:
    network = three()
    one = agreement(network, 0)
    first = one.examined(0, b"body")
    assert kinds(first) == [RecordVote, VoteNotice]
    assert one.examined(0, b"other") == []
    again = one.on_propose(one.proposer(0), 0, BlobRef.of(b"other"))
    assert again == [effect for effect in first if isinstance(effect, ToAll)]


def test_nothing_below_the_promise_is_voted_for_or_promised() -> None:
    network = three()
    one = agreement(network, 0)
    assert kinds(one.on_prepare(one.proposer(1), 1)) == [RecordPromise, Promise]
    refusal = Refusal(ROUND, 1)
    assert one.on_propose(one.proposer(0), 0, BlobRef.of(b"body")) == [ToPeer(one.proposer(0), refusal)]
    assert one.on_prepare(one.proposer(0), 0) == [ToPeer(one.proposer(0), refusal)]
    assert one.examined(0, b"body") == []
    assert one.voted_body is None


def test_a_promise_repeated_is_the_same_and_not_recorded_twice() -> None:
    network = three()
    one = agreement(network, 0, VoteRecord(0, 0, b"mine"))
    first = one.on_prepare(one.proposer(1), 1)
    assert first == [RecordPromise(1), ToPeer(one.proposer(1), promise(1, 0, b"mine"))]
    assert one.on_prepare(one.proposer(1), 1) == first[1:]


def test_promises_and_votes_stand_before_what_says_them() -> None:
    network = three()
    one = agreement(network, 1)
    one.start()
    assert kinds(one.propose(0, b"body")) == [RecordVote, Propose, VoteNotice]
    assert kinds(agreement(network, 0).examined(0, b"body")) == [RecordVote, VoteNotice]
    assert kinds(agreement(network, 2).enter(1)) == [RecordPromise, Prepare]
    assert kinds(agreement(network, 0).on_prepare(network.roster[2], 1)) == [RecordPromise, Promise]


def test_after_a_restart_a_used_view_is_not_proposed_in_again() -> None:
    network = three()
    voted = agreement(network, 1, VoteRecord(0, 0, b"body"))
    assert Free not in kinds(voted.start())
    with pytest.raises(LocalProtocolError):
        voted.propose(0, b"other")
    assert kinds(voted.ask_again()) == [VoteNotice, Propose]
    prepared = agreement(network, 2, VoteRecord(1))
    assert prepared.start() == [] and prepared.enter(1) == []
    assert prepared.on_promise(network.roster[0], promise(1)) == []
    with pytest.raises(LocalProtocolError):
        prepared.propose(1, b"body")


def test_a_right_to_propose_ends_when_a_later_view_begins() -> None:
    network = three()
    one = agreement(network, 1)
    one.start()
    one.on_prepare(one.proposer(1), 1)
    assert one.propose(0, b"body") == []
    other = agreement(network, 1)
    other.start()
    other.on_refusal(2)
    assert other.view == 2 and other.propose(0, b"body") == []


def test_one_broker_alone_decides_by_itself() -> None:
    network = Network(1, ROUND)
    one = agreement(network, 0)
    assert one.start() == [Free(0)]
    assert [type(effect) for effect in one.propose(0, b"body")] == [RecordVote, ToAll, ToAll, Decided]
    late = agreement(network, 0)
    assert [type(effect) for effect in late.enter(1)] == [RecordPromise, ToAll, Free]


@pytest.mark.parametrize("brokers", [2, 3, 4, 5])
def test_no_two_bodies_are_decided_whatever_happens_and_one_is_when_faults_stop(brokers: int) -> None:
    decided_in_trouble = 0
    for seed in range(RUNS // 4):
        network = run(Agreement, brokers, seed)
        assert not network.findings, (seed, network.findings)
        decided_in_trouble += bool(network.decided)
        settle(network)
        assert not network.findings, (seed, network.findings)
        assert len(network.decided) == 1 and all(machine.decided for machine in network.machines.values()), seed
    # The runs are no use if trouble always or never keeps a body from being decided.
    assert RUNS // 40 < decided_in_trouble < RUNS // 4


class IgnoresPromise(Agreement):
    """Votes in a view below its promise."""

    def on_propose(self, node_id: str, view: int, ref: BlobRef) -> list[object]:
        return [Consider(view, ref, node_id)] if node_id == self.proposer(view) and view > self._voted_view else []

    def examined(self, view: int, body: bytes) -> list[object]:
        self._promised = min(self._promised, view)
        return super().examined(view, body)


class AdoptsNothing(Agreement):
    """Proposes what it likes although others had voted."""

    def on_promise(self, node_id: str, promise: Promise) -> list[object]:
        effects = super().on_promise(node_id, promise)
        return [Free(effect.view) if isinstance(effect, Bound) else effect for effect in effects]


class AdoptsLowest(Agreement):
    """Proposes again the lowest vote among the promises."""

    def on_promise(self, node_id: str, promise: Promise) -> list[object]:
        effects = super().on_promise(node_id, promise)
        voted = [(one.voted_view, node, one.body) for node, one in self._promises.items() if one.body is not None]
        if effects and voted:
            _, node, body = min(voted, key=lambda one: one[0])
            return [Bound(self.view, body, (node,))]
        return effects


class SaysFirst(Agreement):
    """Says a vote before it is recorded."""

    def examined(self, view: int, body: bytes) -> list[object]:
        return last_what_is_recorded(super().examined(view, body))

    def propose(self, view: int, body: bytes) -> list[object]:
        return last_what_is_recorded(super().propose(view, body))


class PromisesFirst(Agreement):
    """Says a promise before it is recorded."""

    def on_prepare(self, node_id: str, view: int) -> list[object]:
        return last_what_is_recorded(super().on_prepare(node_id, view))


class UsesAgain(Agreement):
    """Proposes anew in a view that it used before a restart."""

    def start(self) -> list[object]:
        if self.proposer(self.view) != self._me:
            return super().start()
        self._may_propose = True
        return [Free(self.view)]


class VotesAgain(UsesAgain):
    """And votes a second time in a view."""

    def on_propose(self, node_id: str, view: int, ref: BlobRef) -> list[object]:
        self._voted_view = min(self._voted_view, view - 1)
        return super().on_propose(node_id, view, ref)


class CountsHalf(Agreement):
    """Takes half of the roster for a majority."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._majority = max(1, len(self._roster) // 2)


def last_what_is_recorded(effects: list[object]) -> list[object]:
    recorded = [effect for effect in effects if isinstance(effect, (RecordPromise, RecordVote))]
    return [effect for effect in effects if effect not in recorded] + recorded


@pytest.mark.parametrize(
    "broken", [IgnoresPromise, AdoptsNothing, AdoptsLowest, SaysFirst, UsesAgain, VotesAgain, CountsHalf]
)
def test_an_agreement_that_breaks_a_rule_is_found_out_by_two_decided_bodies(broken: type[Agreement]) -> None:
    for seed in range(4 * RUNS):
        network = run(broken, 3 + 2 * (seed % 2), seed)
        if "two bodies decided" not in network.findings:
            settle(network)
        if "two bodies decided" in network.findings:
            return
    pytest.fail(f"{broken.__name__} was not found out")


@pytest.mark.parametrize(
    ("broken", "finding"), [(SaysFirst, "vote not recorded"), (PromisesFirst, "promise not recorded")]
)
def test_what_is_said_before_it_is_recorded_is_seen_at_once(broken: type[Agreement], finding: str) -> None:
    assert any(finding in run(broken, 3, seed).findings for seed in range(50))
