"""What a run gave, gathered from the brokers' own words: rounds, brokers, clients, as rows and as JSON."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from ravnest_fed.chaos import Kill
from ravnest_fed.federation import Federation
from ravnest_fed.messages import ClientRow, RoundRow, Status


@dataclass
class Summary:
    """Everything that the brokers of `federation` said so far. Rounds are merged over brokers."""

    federation: Federation
    rows: dict[int, dict[str, RoundRow]] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    latest: dict[str, Status] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    kills: list[Kill] = field(default_factory=list)

    def take(self, answers: dict[str, Status | str]) -> None:
        """Take in the brokers' answers, by broker name."""
        for name, answer in answers.items():
            if isinstance(answer, str):
                continue
            self.latest[name] = answer
            for row in answer.rounds:
                self.rows.setdefault(row.server_round, {})[name] = row
            for server_round, metrics in answer.metrics.items():
                self.metrics[server_round] = metrics

    def known(self) -> dict[str, int]:
        """The round after which each broker's rows are wanted: the last two again, since bytes still arrive for them."""
        return {name: max(0, status.server_round - 2) for name, status in self.latest.items()}

    @property
    def server_round(self) -> int:
        """The newest committed round that a broker told of."""
        return max((status.server_round for status in self.latest.values()), default=0)

    @property
    def stop(self) -> str:
        """Why training ended; empty while it goes on."""
        return next((status.stop for status in self.latest.values() if status.stop), "")

    def round_entry(self, server_round: int) -> dict[str, Any]:
        """One round's entry of the JSON form. Its `seconds` are the middle broker's: who caught up saw another time."""
        rows = list(self.rows.get(server_round, {}).values())
        return {
            "server_round": server_round,
            "contributions": max((row.contributions for row in rows), default=0),
            "model_hash": rows[0].model_hash.hex() if rows else "",
            "seconds": round(statistics.median_high([row.seconds for row in rows] or [0.0]), 4),
            "training_seconds": round(max((row.training_seconds for row in rows), default=0.0), 4),
            "bytes_up": sum(row.bytes_up for row in rows),
            "bytes_down": sum(row.bytes_down for row in rows),
            "metrics": self.metrics.get(server_round, {}),
        }

    def client_rows(self) -> dict[str, list[ClientRow]]:
        """Every broker's row of each client, by the client's name."""
        found: dict[str, list[ClientRow]] = {member.name: [] for member in self.federation.members}
        for status in self.latest.values():
            for row in status.clients:
                found.setdefault(self.federation.name_of(row.client), []).append(row)
        return found

    def told(self) -> dict[int, set[bytes]]:
        """Hashes of the models that brokers told of as committed, by round: one each, unless something is badly wrong."""
        return {number: {row.model_hash for row in rows.values()} for number, rows in self.rows.items()}

    def holding(self, server_round: int) -> set[str]:
        """Names of the clients that proved to hold the model of `server_round`."""
        return {
            name for name, rows in self.client_rows().items() if any(row.server_round >= server_round for row in rows)
        }

    def json(self) -> dict[str, Any]:
        """The summary as plain data."""
        last = self.server_round
        final = self.round_entry(last)
        return {
            "final": {"server_round": last, "model_hash": final["model_hash"], "metrics": final["metrics"]},
            "stop": self.stop,
            "brokers": {broker.name: self._broker(broker.name) for broker in self.federation.brokers},
            "rounds": [self.round_entry(number) for number in sorted(self.rows)],
            "clients": {name: self._client(name, rows) for name, rows in self.client_rows().items()},
            "chaos": [_kill(kill) for kill in self.kills],
        }

    def _broker(self, name: str) -> dict[str, Any]:
        status = self.latest.get(name)
        return {
            "server_round": status.server_round if status else 0,
            "model_hash": status.model_hash.hex() if status else "",
            "died": name in self.dead,
        }

    def _client(self, name: str, rows: list[ClientRow]) -> dict[str, Any]:
        examples = steps = contributions = 0
        for by_broker in self.rows.values():
            row = next(iter(by_broker.values()))
            for client, count, done in zip(row.clients, row.num_examples, row.local_steps, strict=True):
                if self.federation.name_of(client) == name:
                    examples, steps, contributions = examples + count, steps + done, contributions + 1
        held = max((row.server_round for row in rows), default=-1)
        at_round = self.rows.get(held, {})
        return {
            "num_examples": examples,
            "local_steps": steps,
            "contributions": contributions,
            "bytes_up": sum(row.bytes_up for row in rows),
            "bytes_down": sum(row.bytes_down for row in rows),
            "server_round": max(held, 0),
            "model_hash": next(iter(at_round.values())).model_hash.hex() if at_round else "",
            "died": name in self.dead,
        }


def _kill(kill: Kill) -> dict[str, Any]:
    return {
        "node": kill.strike.node,
        "server_round": kill.server_round,
        "down_seconds": kill.strike.down_seconds,
        "back_after_seconds": None if kill.back_at is None else round(kill.back_at - kill.at, 3),
        "back_in_round": kill.back_in_round,
    }
