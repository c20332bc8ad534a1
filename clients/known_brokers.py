"""The brokers that a client learned of from the log: also after a restart it finds those that its link does not name."""

from pathlib import Path

import msgspec

from ravnest_fed.errors import RemoteProtocolError
from ravnest_fed.facts import decode, encode
from ravnest_fed.links import Link, LinkBroker
from ravnest_fed.model_files import write_durably

FILE_NAME = "brokers"


class KnownBrokers:
    """The roster that a client kept in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE_NAME

    def added_to(self, link: Link) -> Link:
        """`link` with the brokers kept, under the addresses kept, beside its own: any old address that answers will do."""
        try:
            kept = decode(tuple[LinkBroker, ...], self._file.read_bytes())
        except (OSError, RemoteProtocolError):
            return link
        by_name = {broker.name: broker for broker in (*link.brokers, *kept)}
        return msgspec.structs.replace(link, brokers=tuple(by_name.values()))

    def keep(self, brokers: tuple[LinkBroker, ...]) -> None:
        """Remember the roster in force, durably."""
        write_durably(self._file, encode(brokers))
