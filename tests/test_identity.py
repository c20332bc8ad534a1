"""Identities: signatures bound to their domain, and key files that only their owner can read."""

import os
import stat
from pathlib import Path

import msgspec
import pytest

from ravnest_fed.errors import IdentityError
from ravnest_fed.identity import SEED_SIZE, Identity, Signed, node_id_of, verify
from tests.building import identity

posix = pytest.mark.skipif(os.name != "posix", reason="file modes are a matter of POSIX")


def test_a_signature_holds_for_its_key_domain_and_bytes_only() -> None:
    one, other = identity("one"), identity("other")
    signed = one.sign("vote", b"payload")
    assert verify("vote", signed, one.public_key)
    assert not verify("manifest", signed, one.public_key)
    assert not verify("vote", signed, other.public_key)
    for wrong in (
        msgspec.structs.replace(signed, payload=b"Payload"),
        msgspec.structs.replace(signed, node_id=other.node_id),
        msgspec.structs.replace(signed, signature=signed.signature[::-1]),
        msgspec.structs.replace(signed, signature=b""),
        msgspec.structs.replace(signed, signature=other.sign("vote", b"payload").signature),
    ):
        assert not verify("vote", wrong, one.public_key)


@pytest.mark.parametrize("key", [b"", b"\1" * 31, b"\xff" * 32])
def test_an_impossible_public_key_verifies_nothing(key: bytes) -> None:
    assert not verify("vote", Signed(node_id_of(key), b"payload", b"\0" * 64), key)


def test_a_seed_gives_the_same_keys_always_and_each_seed_its_own() -> None:
    one, again, other = Identity(b"\1" * 32), Identity(b"\1" * 32), Identity(b"\2" * 32)
    keys = (one.public_key, one.curve_public, one.curve_secret, one.node_id)
    assert keys == (again.public_key, again.curve_public, again.curve_secret, again.node_id)
    assert (
        len({one.seed, one.public_key, one.curve_public, one.curve_secret, other.public_key, other.curve_public}) == 6
    )
    assert one.node_id == node_id_of(one.public_key)
    assert len(one.node_id) == 32
    assert Identity.generate().seed != Identity.generate().seed


def test_a_seed_of_another_length_is_refused() -> None:
    with pytest.raises(IdentityError, match="31 bytes"):
        Identity(b"\1" * (SEED_SIZE - 1))


def test_an_identity_shows_no_secret() -> None:
    one = identity("one")
    shown = f"{one!r} {one}"
    assert one.node_id in shown
    assert one.seed.hex() not in shown
    assert one.curve_secret.hex() not in shown


def test_a_key_file_gives_the_identity_back(tmp_path: Path) -> None:
    one = identity("one")
    one.save(tmp_path / "a.key")
    assert Identity.load(tmp_path / "a.key").seed == one.seed


@posix
def test_a_key_file_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        identity("one").save(tmp_path / "a.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.key").stat().st_mode) == 0o600


@posix
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_key_file_that_others_can_use_is_refused(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "a.key"
    identity("one").save(file)
    file.chmod(mode)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load(file)
    file.chmod(0o400)
    assert Identity.load(file).node_id == identity("one").node_id


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "a.key"
    identity("one").save(file)
    with pytest.raises(IdentityError, match="exists already"):
        identity("other").save(file)
    assert Identity.load(file).seed == identity("one").seed


@pytest.mark.parametrize(
    ("content", "finding"),
    [
        (b"", "no key file"),
        (b"ravnest-fed key 2 " + b"11" * 32, "no key file"),
        (b"\xff\xfe\x00", "no key file"),
        (b"ravnest-fed key 1 " + b"zz" * 32, "damaged"),
        (b"ravnest-fed key 1 " + b"11" * 31, "31 bytes"),
    ],
)
def test_a_damaged_key_file_is_refused(content: bytes, finding: str, tmp_path: Path) -> None:
    file = tmp_path / "a.key"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(IdentityError, match=finding):
        Identity.load(file)


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match=r"a\.key"):
        Identity.load(tmp_path / "a.key")
