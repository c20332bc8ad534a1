"""Links: one line of text that lets a machine take part. It holds a secret; treat it like a password.

`ravnest://` and the base64url form of a MessagePack array: format, fingerprint of the federation, the brokers' names,
addresses and CURVE keys, and the member's key seed.
"""

import base64
import binascii

import msgspec

from ravnest_fed.errors import UsageError
from ravnest_fed.federation import Federation
from ravnest_fed.identity import SEED_SIZE, Identity

PREFIX = "ravnest://"
FORMAT = 1
MAX_LINK = 16_384


class LinkBroker(msgspec.Struct, frozen=True, array_like=True):
    """Where a broker is reached by clients, and the CURVE key (32 bytes) that it must prove."""

    name: str
    address: str
    curve_key: bytes


class Link(msgspec.Struct, frozen=True, array_like=True):
    """What a link says."""

    format: int
    fingerprint: bytes
    brokers: tuple[LinkBroker, ...]
    seed: bytes

    def text(self) -> str:
        """The link as one line of text."""
        return PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")


def link_for(federation: Federation, member: Identity) -> Link:
    """The link that lets `member` join `federation`."""
    return Link(FORMAT, federation.fingerprint, link_brokers(federation), member.seed)


def link_brokers(federation: Federation) -> tuple[LinkBroker, ...]:
    """The brokers of the roster in force, as clients reach them."""
    return tuple(
        LinkBroker(broker.name, broker.client_address, bytes.fromhex(broker.curve_key)) for broker in federation.brokers
    )


def parse_link(text: str) -> Link:
    """The link in `text`. Raises UsageError if it is damaged."""
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > MAX_LINK:
        raise UsageError(f"a link begins with {PREFIX}", "paste the whole line that the operator sent")
    encoded = text.removeprefix(PREFIX)
    try:
        raw = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
        link = msgspec.msgpack.decode(raw, type=Link)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise UsageError("the link is damaged", "paste the whole line that the operator sent") from None
    lengths = {len(broker.curve_key) for broker in link.brokers} | {len(link.fingerprint), len(link.seed)}
    if link.format != FORMAT or not link.brokers or lengths != {SEED_SIZE}:
        raise UsageError("the link is damaged or of another version", "ask the operator for a new one")
    return link
