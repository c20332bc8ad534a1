"""Simulated signatures: a keyless hash in the place of Ed25519, so that thousands of runs take a minute.

What a signature covers and who checks it stay the same; only forging is not simulated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from ravnest_fed import facts, identity
from ravnest_fed.hashing import digest
from ravnest_fed.identity import Identity, Signed, node_id_of


def _mark(domain: str, public_key: bytes, payload: bytes) -> bytes:
    return digest(f"simulated {domain}", public_key, payload)


def _sign(self: Identity, domain: str, payload: bytes) -> Signed:
    return Signed(self.node_id, payload, _mark(domain, self.public_key, payload))


def _verify(domain: str, signed: Signed, public_key: bytes) -> bool:
    known = _ids.get(public_key)
    if known is None:
        known = _ids[public_key] = node_id_of(public_key)
    return known == signed.node_id and signed.signature == _mark(domain, public_key, signed.payload)


_ids: dict[bytes, str] = {}


@contextmanager
def simulated_signatures() -> Iterator[None]:
    """Within this context, every signature of the process is a simulated one."""
    with (
        mock.patch.object(Identity, "sign", _sign),
        mock.patch.object(identity, "verify", _verify),
        mock.patch.object(facts, "verify", _verify),
    ):
        yield
