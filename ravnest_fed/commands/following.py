"""Following a cluster to the end of its training: rounds as they are committed, nodes as they die and come back."""

import asyncio
import statistics
import time

from ravnest_fed.chaos import Chaos, Kill
from ravnest_fed.cluster import Cluster
from ravnest_fed.commands import chaos_report
from ravnest_fed.commands.round_table import RoundView
from ravnest_fed.commands.summary import Summary
from ravnest_fed.errors import ClusterError
from ravnest_fed.messages import Status

POLL_SECONDS, ANSWER_SECONDS, FINAL_SECONDS = 0.25, 1.0, 10.0
CHAOS_POLL_SECONDS, CHAOS_ANSWER_SECONDS = 0.05, 0.3
"""Kills fall at parts of rounds, so the round is looked up more often, and the dead are not waited for."""
CHAOS_FINAL_SECONDS = 60.0
"""How long nodes that were killed are waited for at the end: a client on a slow machine takes a while to start."""


async def follow(cluster: Cluster, view: RoundView, chaos: Chaos | None = None) -> Summary:
    """Show the rounds of a cluster in `view` until its training has ended and every living node is known to hold the model.

    With `chaos`, nodes die and come back on the way; those that it killed are waited for. Raises ClusterError where no
    majority of the brokers or no client is left.
    """
    from ravnest_fed.founding import OPERATOR_KEY
    from ravnest_fed.identity import Identity
    from ravnest_fed.net.asking import Asker

    federation = cluster.founded.federation
    operator = Identity.load(cluster.founded.folder / OPERATOR_KEY)
    result = Summary(federation)
    if chaos is not None:
        result.kills = chaos.kills
    patience = CHAOS_ANSWER_SECONDS if chaos else ANSWER_SECONDS
    final_seconds = CHAOS_FINAL_SECONDS if chaos else FINAL_SECONDS
    shown = 0
    ended_at: float | None = None
    async with Asker(federation, operator) as asker:
        while True:
            answers = await asker.ask(result.known(), patience)
            result.take(answers)
            down = chaos.down if chaos else set()
            _note_deaths(cluster, result, view, down)
            cluster.check_brokers()
            if chaos is not None:
                _disturb(chaos, cluster, result, view, _at_work(cluster, answers))
            done = _complete(cluster, result) and not (chaos and chaos.restoring)
            while shown < result.server_round and (shown + 1 < result.server_round or done):
                shown += 1
                view.add(result.round_entry(shown))
            if done:
                view.state("training has ended")
                return result
            if result.stop and ended_at is None:
                ended_at = time.monotonic()
            if ended_at is not None and time.monotonic() - ended_at > final_seconds:
                laggards = sorted(set(cluster.clients) - result.holding(result.server_round) - result.dead)
                view.note(f"not waited for any longer: {', '.join(laggards) or 'a broker'}")
                for late in range(shown + 1, result.server_round + 1):
                    view.add(result.round_entry(late))
                return result
            view.state(next((f"{name}: {status.waiting}" for name, status in result.latest.items()), "starting"))
            await asyncio.sleep(CHAOS_POLL_SECONDS if chaos else POLL_SECONDS)


def _at_work(cluster: Cluster, answers: dict[str, Status | str]) -> set[str]:
    """The nodes that brokers which answer now are connected to, those brokers, and the clients that ended well."""
    names = {name for name, node in cluster.clients.items() if node.process.poll() == 0}
    for name, answer in answers.items():
        if not isinstance(answer, str):
            live = [row.client for row in answer.clients if row.live]
            names |= {name, *map(cluster.founded.federation.name_of, (*answer.peers, *live))}
    return names


def _disturb(chaos: Chaos, cluster: Cluster, result: Summary, view: RoundView, at_work: set[str]) -> None:
    """Carry out what the schedule asks for at this moment."""
    now = time.monotonic()
    for kill in chaos.observe(result.server_round + 1, at_work, now):
        view.note(chaos_report.note(kill))
    seconds = [result.round_entry(number)["seconds"] for number in result.rows if number > 1]
    # A kill in the last round would mostly fall after its end.
    last = cluster.founded.federation.stop.rounds
    ended = bool(result.stop) or result.server_round + 1 == last
    for action in chaos.act(statistics.median(seconds) if seconds else 0.0, at_work, ended, now):
        if isinstance(action, Kill):
            cluster.kill(action.strike.node)
            view.note(chaos_report.note(action))
        elif action.node in cluster.brokers:
            cluster.start_broker(action.node)
        else:
            cluster.start_client(action.node)


def _complete(cluster: Cluster, result: Summary) -> bool:
    """Whether every living node is known to stand at the last round of a training that ended."""
    if not result.stop:
        return False
    last = result.server_round
    living = [name for name, node in cluster.brokers.items() if node.alive]
    level = all(name in result.latest and result.latest[name].server_round == last for name in living)
    return level and set(cluster.clients) - result.dead <= result.holding(last)


def _note_deaths(cluster: Cluster, result: Summary, view: RoundView, killed: set[str]) -> None:
    for name, node in (cluster.brokers | cluster.clients).items():
        if name in killed:
            continue
        died = not node.alive and (node.process.returncode != 0 or name in cluster.brokers)
        if died and name not in result.dead:
            result.dead.add(name)
            view.note(f"{name} died (status {node.process.returncode}): {node.last_words()}")
    if cluster.clients and all(name in result.dead for name in cluster.clients) and not result.stop:
        node = next(iter(cluster.clients.values()))
        raise ClusterError(f"every client died; {node.name}: {node.last_words()}", f"see {node.log.parent}")
