"""The order in which a broker hears of a connection's last messages and of its end."""

import asyncio
import time

from ravnest_fed.cluster import free_addresses
from ravnest_fed.identity import Identity
from ravnest_fed.net.sockets import DRAIN_AT_ONCE, AllowList, Line, Port, make_context

MESSAGES = DRAIN_AT_ONCE + 40


def test_what_a_client_sent_before_its_connection_ended_is_heard_before_the_end() -> None:
    async def story() -> list[str]:
        broker, client = Identity.generate(), Identity.generate()
        (place,) = free_addresses(1)
        address = place.bind(place.client_port)
        context = make_context()
        allow = AllowList(context)
        allow.start()
        allow.allow("clients", {client.curve_public.hex()})
        heard: list[str] = []
        up, gone = asyncio.Event(), asyncio.Event()

        def ended(session: str) -> None:
            heard.append("gone")
            gone.set()

        port = Port(
            context, address, broker, "clients", True, lambda session, key, raw: heard.append(raw.decode()), ended
        )
        line = Line(context, address, broker.curve_public.hex(), client, True, lambda raw: None, lambda state: up.set())
        try:
            await asyncio.wait_for(up.wait(), 10.0)
            assert all(line.send(str(number).encode()) for number in range(MESSAGES))
            line.close(5_000)
            # The loop is busy, as by folding a commit, until all has arrived.
            time.sleep(0.5)
            await asyncio.wait_for(gone.wait(), 10.0)
        finally:
            line.close()
            port.close()
            allow.stop()
            context.term()
        return heard

    assert asyncio.run(story()) == [*(str(number) for number in range(MESSAGES)), "gone"]
