"""Who a node is: Ed25519 signing keys, CURVE keys, node ids, key files and signed bytes.

A node keeps one secret seed of 32 bytes. Its Ed25519 key (RFC 8032) and its CURVE key (RFC 7748, as ZeroMQ's
CurveZMQ uses it) are both derived from that seed by BLAKE3 in its key-derivation mode, so that a key file or a link
carries one secret only.
"""

import os
import secrets
import stat
from functools import lru_cache
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ravnest_fed.errors import IdentityError
from ravnest_fed.hashing import digest

SEED_SIZE = 32


def node_id_of(public_key: bytes) -> str:
    """The node id: the first 128 bits of the fingerprint of the Ed25519 public key, as 32 hex digits."""
    return digest("node id", public_key)[:16].hex()


class Signed(msgspec.Struct, frozen=True, array_like=True):
    """Bytes and the Ed25519 signature that `node_id` put under them, within the domain of their kind."""

    node_id: str
    payload: bytes
    signature: bytes


class Identity:
    """A node's secret keys, derived from one seed. Never printed, never logged."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_SIZE:
            raise IdentityError(f"a key seed has {len(seed)} bytes, not {SEED_SIZE}", "use the key file as it was made")
        self.seed = seed
        self._signing = Ed25519PrivateKey.from_private_bytes(digest("ed25519 seed", seed))
        self.public_key = self._signing.public_key().public_bytes_raw()
        self.node_id = node_id_of(self.public_key)
        curve = X25519PrivateKey.from_private_bytes(digest("curve seed", seed))
        self.curve_secret = curve.private_bytes_raw()
        self.curve_public = curve.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"Identity({self.node_id})"

    @classmethod
    def generate(cls) -> "Identity":
        """A fresh identity from the operating system's random source."""
        return cls(secrets.token_bytes(SEED_SIZE))

    def sign(self, domain: str, payload: bytes) -> Signed:
        """Sign `payload` within `domain`."""
        return Signed(self.node_id, payload, self._signing.sign(_tagged(domain, payload)))

    def save(self, path: Path) -> None:
        """Write the seed to `path`, readable by its owner only; an existing file is never overwritten.

        Raises IdentityError if the file exists.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise IdentityError(f"key file {path} exists already", "choose another directory") from None
        with os.fdopen(descriptor, "w") as file:
            file.write(f"ravnest-fed key 1 {self.seed.hex()}\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """Read a key file. Raises IdentityError if it is missing, damaged or readable by others."""
        try:
            if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise IdentityError(f"key file {path} can be read by others", f"run: chmod 600 {path}")
            words = path.read_text().split()
        except OSError as error:
            raise IdentityError(f"key file {path} cannot be read ({error.strerror})", "copy the whole folder") from None
        except UnicodeDecodeError:
            words = []
        if len(words) != 4 or words[:3] != ["ravnest-fed", "key", "1"]:
            raise IdentityError(f"{path} is no key file of this project", "copy the whole folder again")
        try:
            return cls(bytes.fromhex(words[3]))
        except ValueError:
            raise IdentityError(f"key file {path} is damaged", "copy the whole folder again") from None


def _tagged(domain: str, payload: bytes) -> bytes:
    return digest(f"signature {domain}", payload)


@lru_cache(maxsize=16384)
def _public(public_key: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key)


def verify(domain: str, signed: Signed, public_key: bytes) -> bool:
    """Whether `signed` carries a valid signature by `public_key` within `domain`, and names that key's node id."""
    if node_id_of(public_key) != signed.node_id:
        return False
    try:
        _public(public_key).verify(signed.signature, _tagged(domain, signed.payload))
    except (InvalidSignature, ValueError):
        return False
    return True
