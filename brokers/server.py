"""The broker's shell: sockets, disk, threads and the clock around `brokers.core`. Decides nothing.

Effects are carried out strictly in order. Those that must be durable are written by a thread of their own, and what
stands behind them waits; heavy calculations run on the workbench's thread and come back as events.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import structlog

from brokers import effects as fx
from brokers import events as ev
from brokers.consolidation import Consolidation, update_bytes
from brokers.core import BrokerCore
from brokers.fetching import Fetching
from brokers.pace import RECENT, Pace
from brokers.workbench import Workbench
from ravnest_fed.blobs import MemoryBlobs
from ravnest_fed.decree import weighted_means
from ravnest_fed.errors import LedgerError, RavnestError, RemoteProtocolError, UsageError
from ravnest_fed.facts import BlobRef, Evaluation, decode, encode
from ravnest_fed.federation import FILE_NAME, INITIAL_MODEL, BrokerEntry, Federation
from ravnest_fed.framing import pack
from ravnest_fed.identity import Identity
from ravnest_fed.ledger import Ledger, is_full
from ravnest_fed.messages import (
    Absent,
    CheckpointNotice,
    Chunk,
    ClientRow,
    CommitNotice,
    Goodbye,
    Message,
    Status,
    StatusRequest,
    Want,
    decode_to_broker,
    decode_to_peer,
)
from ravnest_fed.net.sockets import GOODBYE_LINGER_MS, AllowList, Line, Port, make_context
from ravnest_fed.restoring import restore
from ravnest_fed.roster import load_changes, with_changes
from ravnest_fed.transfer import serve

KEY_FILE = "broker.key"
TICK_SECONDS = 0.2
ROOM_SECONDS = 1.0
"""How often a write is tried again while the disk is full."""
COMMITS_AT_ONCE = 16
CACHED_BLOBS = 64
STATUS_NAMES = 6000
"""About how many names of clients a status may hold over all its rows, to stay within one message."""
DURABLE = (
    fx.SaveBlob,
    fx.SavePromise,
    fx.SaveVote,
    fx.SaveContribution,
    fx.SaveEquivocation,
    fx.SaveEvaluation,
    fx.SaveCommit,
    fx.SaveCheckpoint,
    fx.SaveAdopted,
)


class BrokerServer:
    """One broker on the directory `folder`, which `ravnest-fed init` made. Raises RavnestError where that cannot be."""

    def __init__(self, folder: Path, client_bind: str, peer_bind: str, log: Any = None) -> None:
        founding = Federation.load(folder / FILE_NAME)
        # What this folder was told of the roster when it was made; the ledger may know more.
        self.federation = with_changes(founding, load_changes(folder))
        self.identity = Identity.load(folder / KEY_FILE)
        self.log = log or structlog.get_logger()
        self._binds = (client_bind, peer_bind)
        self.ledger = Ledger(folder, self.federation.fingerprint)
        self.replica = restore(
            self.ledger, founding, lambda finding: self.log.warning("checkpoint passed over", finding=finding)
        )
        if len(self.replica.head.changes) >= len(load_changes(folder)):
            self.federation = self.replica.federation
        if self.identity.node_id not in self.federation.broker_by_id:
            raise UsageError(
                f"the key in {folder} belongs to no broker of {FILE_NAME} or its roster", "copy the whole broker folder"
            )
        self.entry = self.federation.broker_by_id[self.identity.node_id]
        self.bench = Workbench(self.replica, self.ledger.blobs, self.ledger.spool)
        self._welcome = (
            self.ledger.blobs.put((folder / FILE_NAME).read_bytes()),
            self.ledger.blobs.put((folder / INITIAL_MODEL).read_bytes()).bare(),
        )
        head = self.replica.head
        checkpoints = self.ledger.checkpoints()
        oldest = checkpoints[0][0] if checkpoints else 0
        sizes = {body.server_round: update_bytes(body) for _, body in self.ledger.commits(oldest)}
        self.ledger.sweep(self._welcome)
        self.core = BrokerCore(
            self.replica.federation,
            self.identity,
            head,
            self.ledger.vote_record(head.server_round + 1),
            self.ledger.contributions(head.server_round - self.federation.rounds.max_staleness),
            self.ledger.evaluations(head.server_round),
            {member: self.ledger.highest_sequence(member) for member in self.federation.member_by_id},
            self._welcome,
            Consolidation(self.federation.checkpoints, checkpoints, sizes),
            Pace(self.federation.rounds, [row.seconds for row in self.ledger.rows(max(0, head.server_round - RECENT))]),
            time.monotonic(),
        )
        self._memory = MemoryBlobs()
        self._cached: OrderedDict[bytes, None] = OrderedDict()
        self._queue: deque[fx.Effect] = deque()
        self._writing = False
        self._lines: dict[str, Line] = {}
        self._dialled: dict[str, BrokerEntry] = {}
        self._keys: dict[str, str] = {}
        self._up: defaultdict[int, int] = defaultdict(int)
        self._down: defaultdict[int, int] = defaultdict(int)
        self._traffic = {client: list(both) for client, both in self.ledger.traffic().items()}
        self._failed: RavnestError | None = None
        self._crowded = False
        self._stopped = asyncio.Event()
        self._process = psutil.Process()

    async def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until cancelled; `ready` is called once both addresses are bound."""
        self._loop = asyncio.get_running_loop()
        self._disk = ThreadPoolExecutor(1, "disk")
        self._bench_thread = ThreadPoolExecutor(1, "workbench")
        self._fetching = Fetching(
            {"ledger": self.ledger.blobs, "spool": self.ledger.spool, "memory": self._memory},
            self._ask,
            self._handle,
            self._fail,
            self._disk,
        )
        self._context = make_context()
        self._allow = allow = AllowList(self._context)
        allow.start()
        members = {member.curve_key for member in self.federation.members} | {self.federation.operator.curve_key}
        allow.allow("clients", members)
        self._clients = self._peers = None
        try:
            self._clients = Port(
                self._context, self._binds[0], self.identity, "clients", False, self._from_client, self._session_lost
            )
            self._peers = Port(
                self._context, self._binds[1], self.identity, "brokers", True, self._from_peer, lambda session: None
            )
            self._reconnect((*self.federation.brokers, *self.replica.federation.brokers))
            self.log.info(
                "broker runs", broker=self.entry.name, round=self.core.head.server_round, address=self._binds[0]
            )
            self._apply(self.core.start(time.monotonic()))
            if ready:
                ready()
            while not self._stopped.is_set():
                self._tick()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), TICK_SECONDS)
            if self._failed:
                raise self._failed
        finally:
            self._farewell()
            await asyncio.sleep(0)
            for line in self._lines.values():
                line.close(GOODBYE_LINGER_MS)
            for port in (self._clients, self._peers):
                if port is not None:
                    port.close(GOODBYE_LINGER_MS)
            allow.stop()
            self._bench_thread.shutdown()
            self._disk.shutdown()
            self.ledger.save_traffic({client: (both[0], both[1]) for client, both in self._traffic.items()})
            self.ledger.close()
            self._context.term()

    def drain(self) -> None:
        """Stop once nothing is lost by it: clients are sent elsewhere, and what they handed in here is passed on."""
        self._handle(ev.Drain())

    # --- messages ----------------------------------------------------------------------------------------------------

    def _reconnect(self, brokers: tuple[BrokerEntry, ...]) -> None:
        """Admit and dial exactly these brokers. Who moved is dialled anew."""
        wanted = {broker.node_id: broker for broker in reversed(brokers)}
        self._keys = {broker.curve_key: node_id for node_id, broker in wanted.items()}
        self._allow.allow("brokers", set(self._keys))
        for node_id in [node for node in self._lines if node not in wanted or self._dialled[node] != wanted[node]]:
            self._fetching.donor_gone(node_id)
            self._lines.pop(node_id).close()
            self._handle(ev.PeerDown(node_id))
        for node_id, broker in wanted.items():
            if node_id != self.identity.node_id and node_id not in self._lines:
                self._dialled[node_id] = broker
                self._lines[node_id] = self._dial(node_id, broker.peer_address, broker.curve_key)

    def _dial(self, node_id: str, address: str, key: str) -> Line:
        def state(text: str) -> None:
            if text == "up":
                self._handle(ev.PeerUp(node_id))
            elif text == "down":
                self._fetching.donor_gone(node_id)
                self._handle(ev.PeerDown(node_id))

        return Line(self._context, address, key, self.identity, True, lambda raw: None, state)

    def _from_peer(self, session: str, curve_key: str, raw: bytes) -> None:
        node_id = self._keys.get(curve_key)
        if node_id is None:
            return  # it was removed from the roster a moment ago
        try:
            message = decode_to_peer(raw)
        except RemoteProtocolError as error:
            self.log.warning("peer's message dropped", peer=self.federation.name_of(node_id), finding=str(error))
            return
        if not self._transfer(node_id, message, lambda answer: self._send_peer(node_id, answer)):
            self._handle(ev.FromPeer(node_id, message))

    def _from_client(self, session: str, curve_key: str, raw: bytes) -> None:
        self._count(session, len(raw), up=True)
        try:
            message = decode_to_broker(raw)
        except RemoteProtocolError as error:
            self.log.warning("client's message dropped", session=session, finding=str(error))
            return
        known = self.core.sessions.by_session.get(session)
        if isinstance(message, StatusRequest):
            if known is not None and known.operator:
                self._send_client(session, self._status(max(0, min(message.server_round, 2**48))))
        elif known is None or not self._transfer(session, message, lambda answer: self._send_client(session, answer)):
            self._handle(ev.FromClient(session, curve_key, message))

    def _session_lost(self, session: str) -> None:
        self._fetching.donor_gone(session)
        self._handle(ev.SessionLost(session))

    def _transfer(self, donor: str, message: Message, answer: Callable[[Message], None]) -> bool:
        match message:
            case Want():
                for part in serve(message, self):
                    answer(part)
            case Chunk() | Absent():
                self._fetching.take(donor, message)
            case _:
                return False
        return True

    def read_chunk(self, blob: bytes, index: int) -> bytes | None:
        """A chunk to serve, from wherever this broker keeps the blob."""
        for store in (self._memory, self.ledger.blobs, self.ledger.spool):
            if store.has(blob):
                return store.read_chunk(blob, index)
        return None

    def _ask(self, donor: str, want: Want) -> None:
        if donor in self._lines:
            self._send_peer(donor, want)
        else:
            self._send_client(donor, want)

    def _send_peer(self, node_id: str, message: Message) -> None:
        if node_id in self._lines:
            self._lines[node_id].send(encode(message))

    def _send_client(self, session: str, message: Message) -> None:
        raw = encode(message)
        if self._clients is not None and self._clients.send(session, raw):
            self._count(session, len(raw), up=False)
        else:
            self._loop.call_soon(self._session_lost, session)

    def _farewell(self) -> None:
        leaving = Goodbye("this broker stops")
        for session in list(self.core.sessions.by_session):
            if self._clients is not None:
                self._clients.send(session, encode(leaving))

    # --- events and effects ------------------------------------------------------------------------------------------

    def _handle(self, event: ev.Event) -> None:
        if self._crowded and isinstance(event, ev.FromPeer | ev.FromClient | ev.Tick):
            return  # others say it again; effects that nothing carries out must not pile up
        if isinstance(event, ev.Fetched) and event.into == "memory":
            self._remember(event.blob)
        self._apply(self.core.handle(event, time.monotonic()))

    def _tick(self) -> None:
        self._fetching.tick()
        self._handle(ev.Tick(time.time(), psutil.disk_usage(str(self.ledger.path.parent)).free))

    def _apply(self, effects: list[fx.Effect]) -> None:
        self._queue.extend(effects)
        self._drain()

    def _drain(self) -> None:
        while self._queue and not self._writing and not self._stopped.is_set():
            effect = self._queue.popleft()
            if isinstance(effect, DURABLE):
                self._writing = True
                self._submit(effect)
            else:
                self._carry(effect)

    def _submit(self, effect: fx.Effect) -> None:
        if not self._stopped.is_set():
            future = self._disk.submit(self._save, effect)
            future.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._saved, done, effect))

    def _saved(self, done: "Future[None]", effect: fx.Effect) -> None:
        if (error := done.exception()) and is_full(error):
            self._wait_for_room(effect)
        elif error:
            self._fail(error)
        else:
            self._crowded = self._writing = False
            self._drain()

    def _wait_for_room(self, effect: fx.Effect) -> None:
        """What must be durable is written again until there is room; nothing that stands behind it is said before."""
        if not self._crowded:
            self.log.error("disk is full: this broker waits for room", folder=str(self.ledger.path.parent))
        self._crowded = True
        self._loop.call_later(ROOM_SECONDS, self._submit, effect)

    def _save(self, effect: fx.Effect) -> None:
        """On the disk's thread."""
        match effect:
            case fx.SaveBlob(blob):
                self.ledger.blobs.put(blob)
            case fx.SavePromise(server_round, view):
                self.ledger.save_promise(server_round, view)
            case fx.SaveVote(server_round, view, body):
                self.ledger.save_vote(server_round, view, body)
            case fx.SaveContribution(manifest, opened, shards):
                self.ledger.save_contribution(manifest, opened, shards)
            case fx.SaveEquivocation(client, base_round, first, second):
                self.ledger.save_equivocation(client, base_round, first, second)
            case fx.SaveEvaluation(server_round, client, signed):
                self.ledger.save_evaluation(server_round, client, signed)
            case fx.SaveCommit(commit, body, seconds, kept):
                row = self.bench.row(body, seconds)
                row = msgspec.structs.replace(row, bytes_up=self._up[row.server_round])
                self.ledger.save_commit(commit, row)
                self.ledger.save_bytes_down(row.server_round - 1, self._down[row.server_round - 1])
                self._forget_bytes(row.server_round - 1)
                counted = [one.manifest_hash for one in body.counted]
                self._tidy_spool(body.server_round, counted, kept)
            case fx.SaveCheckpoint(server_round, ref, keep):
                self.ledger.save_checkpoint(server_round, ref, keep)
                self.ledger.sweep(self._welcome)
            case fx.SaveAdopted(commit, server_round, ref, kept):
                self.ledger.adopt_checkpoint(commit, server_round, ref)
                self._tidy_spool(server_round, (), kept)

    def _tidy_spool(self, head_round: int, counted: Iterable[bytes], kept: frozenset[bytes]) -> None:
        oldest = head_round - self.federation.rounds.max_staleness
        self.ledger.spool.retain(self.ledger.drop_contributions(oldest, counted) | kept)

    def _carry(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendPeer(node_id, message):
                self._send_peer(node_id, message)
            case fx.SendClient(session, message):
                self._send_client(session, message)
            case fx.EndSession():
                pass
            case fx.SendCommits():
                self._send_commits(effect)
            case fx.SendCheckpoint():
                self._send_checkpoint(effect)
            case fx.Fetch():
                self._fetching.fetch(effect)
            case fx.Abandon(into, keep):
                self._fetching.abandon(into, keep)
            case fx.Cache(blob):
                self._cache(blob)
            case fx.Fold(commit, body):
                self._work(lambda: self.bench.fold(commit, body), None)
                self._log_round(body)
            case fx.WriteCheckpoint():
                self._work(lambda: self.bench.write_checkpoint(effect), self._handle)
            case fx.Adopt():
                self._work(lambda: self.bench.adopt(effect), self._handle)
            case fx.TakeUp():
                self._work(lambda: self.bench.take_up(effect), None)
            case fx.Inspect():
                self._work(lambda: self.bench.inspect(effect), self._handle)
            case fx.Accumulate():
                self._work(lambda: self.bench.accumulate(effect), None)
            case fx.Reduce():
                self._work(lambda: self.bench.reduce(effect), self._handle)
            case fx.Preview():
                self._work(lambda: self.bench.preview(effect), self._handle)
            case fx.Examine():
                self._work(lambda: self.bench.examine(effect), self._handle)
            case fx.Damaged(finding):
                self._fail(
                    LedgerError(
                        f"this broker's model differs from what a majority committed: {finding}",
                        "start it again; it is then built anew from its ledger",
                    )
                )
            case fx.Reconnect(brokers):
                self.federation = self.federation.with_brokers(brokers)
                self._loop.call_soon(self._reconnect, brokers)
            case fx.Stop():
                self._stopped.set()
            case fx.Say(event, fields, warning):
                (self.log.warning if warning else self.log.info)(event, **fields)

    def _work(self, task: Callable[[], Any], then: Callable[[Any], None] | None) -> None:
        def done(future: "Future[Any]") -> None:
            self._loop.call_soon_threadsafe(finished, future)

        def finished(future: "Future[Any]") -> None:
            if error := future.exception():
                self._fail(error)
            elif then is not None and (result := future.result()) is not None:
                then(result)

        self._bench_thread.submit(task).add_done_callback(done)

    def _fail(self, error: BaseException) -> None:
        """What cannot be written or folded ends this broker; the others go on."""
        if isinstance(error, RavnestError):
            self._failed = error
        else:
            self._failed = LedgerError(f"{type(error).__name__}: {error}", "see the log")
            self._failed.__cause__ = error
        self._stopped.set()

    # --- blobs -------------------------------------------------------------------------------------------------------

    def _cache(self, blob: bytes) -> None:
        self._remember(self._memory.put(blob).hash)

    def _remember(self, blob: bytes) -> None:
        self._cached[blob] = None
        self._cached.move_to_end(blob)
        while len(self._cached) > CACHED_BLOBS:
            self._memory.remove(self._cached.popitem(last=False)[0])

    def _send_commits(self, effect: fx.SendCommits) -> None:
        for server_round in range(effect.after + 1, min(effect.after + COMMITS_AT_ONCE, self.ledger.last_round()) + 1):
            commit = self.ledger.commit(server_round)
            if commit is None:
                return
            record = pack(encode(commit))
            self._cache(record)
            notice = CommitNotice(server_round, BlobRef.of(record))
            if effect.peer:
                self._send_peer(effect.to, notice)
            else:
                self._send_client(effect.to, notice)

    def _send_checkpoint(self, effect: fx.SendCheckpoint) -> None:
        commit = self.ledger.commit(effect.server_round)
        if commit is None:
            return
        record = pack(encode(commit))
        self._cache(record)
        notice = CheckpointNotice(effect.server_round, BlobRef.of(record), effect.checkpoint, effect.changes)
        if effect.peer:
            self._send_peer(effect.to, notice)
        else:
            self._send_client(effect.to, notice)

    # --- what people see ---------------------------------------------------------------------------------------------

    def _count(self, session: str, size: int, up: bool) -> None:
        known = self.core.sessions.by_session.get(session)
        if known is None or known.operator:
            return
        totals = self._traffic.setdefault(known.node_id, [0, 0])
        head = self.core.head.server_round
        if up:
            totals[0] += size
            self._up[head + 1] += size
        else:
            totals[1] += size
            self._down[head] += size

    def _forget_bytes(self, before: int) -> None:
        """Rounds before this one are counted to the end, and what was counted is in the ledger."""
        for counted in (self._up, self._down):
            for server_round in [number for number in list(counted) if number < before]:
                del counted[server_round]

    def _status(self, after: int) -> Status:
        core = self.core
        rows = self.ledger.rows(after, most=max(1, STATUS_NAMES // (len(self.federation.members) + 8)))
        rows = tuple(
            msgspec.structs.replace(row, bytes_down=self._down.get(row.server_round, row.bytes_down)) for row in rows
        )
        evaluated = self.ledger.evaluated()
        rounds = [row.server_round for row in rows] or [core.head.server_round]
        metrics = {number: self._metrics(number) for number in rounds}
        return Status(
            broker=self.identity.node_id,
            server_round=core.head.server_round,
            model_hash=core.head.model_hash,
            stop=core.head.stop,
            waiting="" if core.head.stop else core.waiting(time.monotonic()).waiting,
            peers=core.peers(),
            rounds=rows,
            metrics={number: values for number, values in metrics.items() if values},
            clients=tuple(
                ClientRow(client, client in core.sessions.by_node, evaluated.get(client, -1), both[0], both[1])
                for client, both in sorted(self._traffic.items())
            ),
            refusals=dict(core.intake.refusals),
            memory_bytes=self._process.memory_info().rss,
            changes=core.head.changes,
            covered=core.head.deal.covered if core.head.deal is not None else 0,
            disk_free_bytes=psutil.disk_usage(str(self.ledger.path.parent)).free,
        )

    def _metrics(self, server_round: int) -> dict[str, float]:
        found = [decode(Evaluation, signed.payload) for signed in self.ledger.evaluations(server_round)]
        return weighted_means(found) if found else {}

    def _log_round(self, body: Any) -> None:
        metrics = {name: round(value, 4) for name, value in body.metrics.items()}
        self.log.info(
            "round committed",
            round=body.server_round,
            contributions=len(body.counted),
            before=metrics,
            stop=body.stop or None,
        )
