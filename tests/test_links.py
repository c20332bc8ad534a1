"""Links: what a member needs in one line of text, and nothing taken from a damaged one."""

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest_fed.errors import UsageError
from ravnest_fed.identity import Identity
from ravnest_fed.links import FORMAT, MAX_LINK, PREFIX, Link, link_for, parse_link
from tests.building import tiny

ONE = tiny(brokers=3)
LINK = link_for(ONE.federation, ONE.members[0])


def test_a_link_names_the_federation_its_brokers_and_the_member() -> None:
    link = parse_link(LINK.text())
    assert link == LINK
    assert link.fingerprint == ONE.federation.fingerprint
    assert [(one.name, one.address) for one in link.brokers] == [
        (entry.name, entry.client_address) for entry in ONE.federation.brokers
    ]
    assert [one.curve_key for one in link.brokers] == [broker.curve_public for broker in ONE.brokers]
    assert Identity(link.seed).node_id == ONE.federation.members[0].node_id


def test_a_link_is_one_line_that_survives_pasting() -> None:
    text = LINK.text()
    assert text.startswith(PREFIX)
    assert not set(text) & set(" \n\t+/=") - set(PREFIX)
    assert parse_link(f"  {text}\n") == LINK


def test_a_link_holds_no_secret_but_the_members_seed() -> None:
    raw = base64.urlsafe_b64decode(LINK.text().removeprefix(PREFIX) + "==")
    assert ONE.members[0].seed in raw
    for other in (*ONE.brokers, ONE.operator, *ONE.members[1:]):
        assert other.seed not in raw
        assert other.curve_secret not in raw


@pytest.mark.parametrize("text", ["", "ravnest", "http://x", LINK.text()[1:], PREFIX + "A" * MAX_LINK])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=PREFIX):
        parse_link(text)


@given(st.integers(len(PREFIX), len(LINK.text()) - 1))
def test_a_link_that_was_cut_off_is_refused(length: int) -> None:
    with pytest.raises(UsageError, match="damaged"):
        parse_link(LINK.text()[:length])


@given(st.text(max_size=200))
def test_random_text_after_the_prefix_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_link(PREFIX + text)


@given(st.binary(max_size=200))
def test_random_bytes_in_a_link_are_refused(raw: bytes) -> None:
    with pytest.raises(UsageError):
        parse_link(PREFIX + base64.urlsafe_b64encode(raw).decode())


@pytest.mark.parametrize(
    "wrong",
    [
        msgspec.structs.replace(LINK, format=FORMAT + 1),
        msgspec.structs.replace(LINK, brokers=()),
        msgspec.structs.replace(LINK, seed=LINK.seed[:-1]),
        msgspec.structs.replace(LINK, fingerprint=b""),
        msgspec.structs.replace(LINK, brokers=(msgspec.structs.replace(LINK.brokers[0], curve_key=b"\1" * 33),)),
    ],
    ids=["format", "no broker", "seed", "fingerprint", "curve key"],
)
def test_a_link_of_impossible_parts_is_refused(wrong: Link) -> None:
    with pytest.raises(UsageError, match="damaged or of another version"):
        parse_link(wrong.text())
