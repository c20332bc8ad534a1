"""Planned stops and full disks: what was handed in is passed on, clients go elsewhere, and it is all said."""

import errno
import sqlite3

import numpy as np
import pytest

from brokers import events as ev
from brokers.core import DRAIN_SECONDS
from brokers.room import LEAST_RESERVE
from ravnest_fed.ledger import is_full
from ravnest_fed.messages import Announcement, Goodbye, ReceiptNotice, Refused
from tests.joined import Joined


def stopped(joined: Joined, name: str) -> bool:
    """Whether a broker's core has told its shell to end. Joined brokers note what they carry out."""
    return joined.brokers[name].core._stopped


def test_a_drained_broker_sends_its_clients_elsewhere_and_ends_once_others_hold_what_it_took_in() -> None:
    joined = Joined.started(3, 3)
    joined.dropping = lambda source, target, message: isinstance(message, Announcement)
    joined.clients["c1"].contribute("b1")
    joined.deliver()
    assert joined.clients["c1"].receipts() == 1
    joined.brokers["b1"].handle(ev.Drain())
    assert any(isinstance(message, Goodbye) for message in joined.clients["c1"].received)
    assert not stopped(joined, "b1")
    joined.dropping = lambda source, target, message: False
    joined.pass_time(6.0)
    assert stopped(joined, "b1")


def test_a_drained_broker_with_nothing_of_its_own_ends_at_once_and_greets_nobody() -> None:
    joined = Joined.started(3, 3)
    joined.brokers["b2"].handle(ev.Drain())
    assert stopped(joined, "b2")
    joined.deliver()
    id_b2 = joined.brokers["b2"].identity.node_id
    assert id_b2 not in joined.brokers["b1"].core.peers()
    joined.clients["c2"].join("b2")
    assert isinstance(joined.clients["c2"].received[-1], Goodbye)


def test_draining_does_not_last_for_ever() -> None:
    joined = Joined.started(3, 3)
    joined.dropping = lambda source, target, message: isinstance(message, Announcement)
    joined.clients["c1"].contribute("b1")
    joined.deliver()
    joined.brokers["b1"].handle(ev.Drain())
    joined.pass_time(DRAIN_SECONDS + 1.0)
    assert stopped(joined, "b1")


def test_a_contribution_offered_again_to_another_broker_lets_the_drained_one_go_and_is_counted() -> None:
    joined = Joined.started(3, 3)
    client = joined.clients["c1"]
    offer = client.offer(np.full(joined.federation.schema.parameter_stop, 0.01, np.float32))
    client.say("b1", offer)
    joined.deliver()
    joined.brokers["b1"].handle(ev.Drain())
    assert not stopped(joined, "b1")
    client.join("b2")
    client.say("b2", offer)
    joined.deliver()
    joined.pass_time(1.0)
    assert stopped(joined, "b1")
    joined.kill("b1")
    joined.clients["c2"].contribute("b2")
    joined.clients["c3"].contribute("b3")
    joined.pass_time(20.0)
    assert joined.rounds() == {1}
    assert len(joined.heads()["b2"].last_clients) == 3


def test_a_broker_without_room_takes_nothing_says_so_and_recovers() -> None:
    joined = Joined.started(1, 2)
    broker = joined.brokers["b1"]
    broker.handle(ev.Tick(0.0, LEAST_RESERVE // 2))
    joined.clients["c1"].contribute("b1")
    joined.deliver()
    refusals = [message for message in joined.clients["c1"].received if isinstance(message, Refused)]
    assert [one.reason for one in refusals] == ["no-room"]
    assert broker.core.waiting(0.0).waiting == "disk is full: takes no contributions"
    assert any("disk is full" in line for line in broker.said)
    # A little more than before is not enough to begin again: it would stop after the next round.
    broker.handle(ev.Tick(1.0, broker.core._room.reserve + 1))
    assert "full" in broker.core.waiting(1.0).waiting
    broker.handle(ev.Tick(2.0, 2 * broker.core._room.reserve))
    joined.contribute("c1", "c2")
    joined.pass_time(1.0)
    assert joined.clients["c1"].receipts() == 1 and joined.rounds() == {1}


def test_receipts_are_still_given_for_what_is_here_when_the_room_ends() -> None:
    joined = Joined.started(1, 2)
    joined.contribute("c1")
    joined.brokers["b1"].handle(ev.Tick(0.0, 0))
    joined.clients["c2"].contribute("b1")
    assert joined.clients["c1"].receipts() == 1
    assert not any(isinstance(message, ReceiptNotice) for message in joined.clients["c2"].received)


def test_full_disks_are_told_from_broken_ones() -> None:
    assert is_full(OSError(errno.ENOSPC, "No space left on device"))
    assert not is_full(OSError(errno.EIO, "Input/output error"))
    database = sqlite3.connect(":memory:")
    database.execute("pragma max_page_count = 2")
    with pytest.raises(sqlite3.OperationalError) as caught:
        database.execute("create table t as select randomblob(100000)")
    assert is_full(caught.value)
