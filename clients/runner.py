"""The client's shell: sockets, threads and the clock around `clients.session`. Decides nothing.

Training runs on a thread of its own, folding and encoding on another, and the event loop is left to the sockets.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch

from clients import effects as fx
from clients import events as ev
from clients.control import Controls
from clients.devices import describe, limit_gpu_memory, overlooked_gpus
from clients.fetched import FetchedBlobs
from clients.known_brokers import KnownBrokers
from clients.outbox import Outbox
from clients.politeness import Manners, rest_factor
from clients.probe_process import ProbeFailed, probe_apart
from clients.progress import ProgressFiles, ProgressUnreadable, StateNotKept
from clients.residual import ErrorFeedback
from clients.session import ClientSession
from clients.trainer import LocalResult, LocalWork, Progress, RoundAbandoned, RoundYielded, Trainer
from clients.uploads import Uploads
from clients.watch import StepBoundary, Watch
from ravnest_fed import codecs
from ravnest_fed.aggregation.outer import CONTROL
from ravnest_fed.capability import Capability
from ravnest_fed.checkpoints import checkpoint_pieces, read_checkpoint
from ravnest_fed.decree import check_votes, open_commit
from ravnest_fed.encoding import encode_delta
from ravnest_fed.errors import RavnestError, RemoteProtocolError, SchemaMismatch, WrongFederation
from ravnest_fed.facts import BlobRef, Body, Commit, WorkOrder, decode, encode
from ravnest_fed.federation import Federation
from ravnest_fed.identity import Identity
from ravnest_fed.links import Link, LinkBroker
from ravnest_fed.messages import Absent, Chunk, Message, Want, decode_to_client
from ravnest_fed.model_files import read_model
from ravnest_fed.net.sockets import CLIENT_HEARTBEAT, GOODBYE_LINGER_MS, Line, make_context
from ravnest_fed.parameters import Float32
from ravnest_fed.partition import Partition
from ravnest_fed.recipe import LoadedRecipe
from ravnest_fed.replica import Replica, updates_of
from ravnest_fed.roster import Changes, roster_for
from ravnest_fed.slices import Slice
from ravnest_fed.transfer import Ask, Downloads, Drop, Fetched, FetchFailed, Keep, TransferEffect, serve

TICK_SECONDS = 0.1
YIELD_LOOK_SECONDS = 0.2
MAX_FETCH_BYTES = 2**36
Tell = Callable[[fx.Tell], None]


class ClientRunner:
    """Takes part with `loaded` through `link` until training ends.

    `tell` shows what happens to the machine's owner; `state` is the directory for what must survive a kill, `probes` the
    one where measurements are remembered, `state` too by default. `heartbeat` is that of the lines to the brokers, in
    milliseconds. `manners` is what the owner allows; by default everything, always.
    """

    def __init__(
        self,
        link: Link,
        loaded: LoadedRecipe,
        tell: Tell,
        state: Path,
        device: str = "auto",
        heartbeat: tuple[int, int] = CLIENT_HEARTBEAT,
        probes: Path | None = None,
        manners: Manners | None = None,
    ) -> None:
        self._roster = KnownBrokers(state)
        self.link = link = self._roster.added_to(link)
        self.identity = Identity(link.seed)
        self.replica: Replica | None = None
        self._outbox = Outbox(state, link.fingerprint, self.identity.node_id)
        self._progress = ProgressFiles(state, link.fingerprint)
        self._resumed = False
        self.session = ClientSession(link, self.identity, loaded.hash, time.monotonic(), self._outbox.standing)
        self._loaded = loaded
        self._tell = tell
        self._device = device
        self._heartbeat = heartbeat
        self._probes = probes or state
        self._manners = manners or Manners()
        self._watch = Watch(self._manners.when, device, self._needed_later)
        self._uploads = Uploads(self._manners.upload_limit) if self._manners.upload_limit else None
        self._uploading: asyncio.TimerHandle | None = None
        self._trainer: Trainer | None = None
        self._blobs = FetchedBlobs(state / "fetched")
        self._initial = b""
        self._vectors_folder = state / "outer_state"
        self._downloads = Downloads()
        self._lines: dict[str, Line] = {}
        self._dialled: dict[str, LinkBroker] = {}
        self._commits: dict[int, tuple[Commit, Body]] = {}
        self._abandoned = threading.Event()
        self._vectors = threading.Lock()
        self._finished: LocalResult | None = None
        self._controls: Controls | None = None
        self._outcome: fx.End | None = None

    async def run(self) -> str:
        """Take part; why it ended. Raises the RavnestError that ended it otherwise."""
        self._loop = asyncio.get_running_loop()
        self._watch.start()
        self._training = ThreadPoolExecutor(1, "training")
        self._folding = ThreadPoolExecutor(1, "folding")
        self._ended = asyncio.Event()
        self._context = context = make_context()
        self._reconnect(self.link.brokers)
        try:
            while not self._ended.is_set():
                self._apply_transfer(self._downloads.tick(time.monotonic()))
                self._handle(ev.Tick())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), TICK_SECONDS)
        finally:
            self._abandoned.set()
            if self._uploading:
                self._uploading.cancel()
            await asyncio.sleep(0)
            for line in self._lines.values():
                line.close(GOODBYE_LINGER_MS)
            await asyncio.to_thread(self._training.shutdown)
            await asyncio.to_thread(self._folding.shutdown)
            await asyncio.to_thread(self._watch.stop)
            context.term()
        assert self._outcome is not None
        if self._outcome.error:
            raise self._outcome.error
        return self._outcome.reason

    def leave(self, finish: bool = False) -> None:
        """The owner wants to stop: say goodbye and end, with `finish` once the round is handed in."""
        self._handle(ev.Leave(finish))

    # --- messages ----------------------------------------------------------------------------------------------------

    def _reconnect(self, brokers: tuple[LinkBroker, ...]) -> None:
        """Keep lines to exactly these brokers. Who moved is dialled anew."""
        if self._outcome is not None:
            return
        wanted = {broker.name: broker for broker in brokers}
        for name in [name for name in self._lines if self._dialled[name] != wanted.get(name)]:
            self._lines.pop(name).close()
            self._apply_transfer(self._downloads.donor_gone(name, time.monotonic()))
            self._handle(ev.Line(name, "down"))
        for name, broker in wanted.items():
            if name not in self._lines:
                self._dialled[name] = broker
                self._lines[name] = self._dial(self._context, name, broker.address, broker.curve_key.hex())

    def _dial(self, context: Any, name: str, address: str, key: str) -> Line:
        def state(text: Any) -> None:
            if text != "up":
                if self._uploads:
                    self._uploads.forget(name)
                self._apply_transfer(self._downloads.donor_gone(name, time.monotonic()))
            self._handle(ev.Line(name, text))

        def received(raw: bytes) -> None:
            self._received(name, raw)

        return Line(context, address, key, self.identity, False, received, state, self._heartbeat)

    def _send(self, broker: str, raw: bytes) -> None:
        if broker in self._lines:
            self._lines[broker].send(raw)

    def _received(self, broker: str, raw: bytes) -> None:
        now = time.monotonic()
        try:
            message: Message = decode_to_client(raw)
        except RemoteProtocolError as error:
            self._tell(fx.Tell("message dropped", {"broker": broker, "finding": str(error)}, warning=True))
            return
        match message:
            case Want() if self._uploads is not None:
                self._uploads.ask(broker, message)
                self._upload(self._uploads)
                self._handle(ev.Pulled(broker))
            case Want():
                for part in serve(message, self._outbox):
                    self._send(broker, encode(part))
                self._handle(ev.Pulled(broker))
            case Chunk():
                self._apply_transfer(self._downloads.on_chunk(broker, message, now))
            case Absent():
                self._apply_transfer(self._downloads.on_absent(broker, message, now))
            case _:
                self._handle(ev.FromBroker(broker, message))

    def _upload(self, uploads: Uploads) -> None:
        """Answer what the upload limit allows now, and come back when it allows more."""
        while (following := uploads.next(time.monotonic())) is not None:
            broker, want = following
            for part in serve(want, self._outbox):
                raw = encode(part)
                uploads.sent(len(raw), time.monotonic())
                if line := self._lines.get(broker):
                    line.send(raw)
            self._handle(ev.Pulled(broker))
        if self._uploading:
            self._uploading.cancel()
        wait = uploads.wait(time.monotonic())
        self._uploading = None
        if wait is not None and self._outcome is None:
            self._uploading = self._loop.call_later(wait, self._upload, uploads)

    # --- events and effects ------------------------------------------------------------------------------------------

    def _handle(self, event: ev.Event) -> None:
        if self._outcome is None:
            for effect in self.session.handle(event, time.monotonic()):
                self._carry(effect)

    def _carry(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Send(broker, message):
                self._send(broker, encode(message))
            case fx.Fetch(ref, broker, also):
                if ref.length > MAX_FETCH_BYTES:
                    self._loop.call_soon(self._handle, ev.Missed(ref.hash))
                elif self._blobs.has(ref.hash):
                    self._loop.call_soon(self._handle, ev.Fetched(ref.hash))
                else:
                    self._apply_transfer(self._downloads.start(ref, [broker, *also], time.monotonic()))
            case fx.ReadFederation(ref):
                self._work(self._folding, lambda: self._read_federation(ref))
            case fx.Prepare(ref):
                self._work(self._training, lambda: self._prepare(ref))
            case fx.OpenCommit(ref, _, changes):
                self._work(self._folding, lambda: self._open_commit(ref, changes))
            case fx.Reconnect(brokers):
                self._roster.keep(brokers)
                self._loop.call_soon(self._reconnect, brokers)
            case fx.Fold(server_round):
                self._work(self._fold_pool, lambda: self._fold(server_round))
            case fx.TakeUp(server_round, ref):
                self._work(self._fold_pool, lambda: self._take_up(server_round, ref))
            case fx.Evaluate(server_round):
                self._work(self._training, lambda: self._evaluate(server_round))
            case fx.Train(order, slice):
                self._abandoned = abandoned = threading.Event()
                self._work(self._training, lambda: self._train(order, slice, abandoned))
            case fx.Encode(order):
                self._work(self._training, lambda: self._encode_finished(order))
            case fx.AbandonTraining():
                self._abandoned.set()
            case fx.Keep(offer, residual, control):
                self._outbox.keep(offer, residual, control)
            case fx.Forget(counted):
                self._outbox.forget(counted)
            case fx.Tell():
                self._tell(effect)
            case fx.End():
                self._outcome = effect
                self._ended.set()

    def _apply_transfer(self, effects: list[TransferEffect]) -> None:
        for effect in effects:
            match effect:
                case Ask(donor, want):
                    self._send(donor, encode(want))
                case Keep(ref, index, data):
                    self._blobs.keep_chunk(ref, index, data)
                case Fetched(ref):
                    self._blobs.finish(ref)
                    self._loop.call_soon(self._handle, ev.Fetched(ref.hash))
                case Drop(ref):
                    self._blobs.discard(ref.hash)
                case FetchFailed(ref, _, resumable):
                    if not resumable:
                        self._blobs.discard(ref.hash)
                    self._loop.call_soon(self._handle, ev.Missed(ref.hash))

    @property
    def _fold_pool(self) -> ThreadPoolExecutor:
        """Training reads the vectors that folding changes: they take turns, unless training has a copy of its base."""
        return self._folding if self._max_staleness else self._training

    @property
    def _max_staleness(self) -> int:
        return self.replica.federation.rounds.max_staleness if self.replica is not None else 0

    def _work(self, pool: ThreadPoolExecutor, task: Callable[[], ev.Event | None]) -> None:
        def done(future: "Future[ev.Event | None]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed by the time a training step has ended
                self._loop.call_soon_threadsafe(finished, future)

        def finished(future: "Future[ev.Event | None]") -> None:
            if error := future.exception():
                known = error if isinstance(error, RavnestError) else RavnestError(f"{type(error).__name__}: {error}")
                known.__cause__ = error if known is not error else known.__cause__
                self._carry(fx.End("failed", known))
            elif (event := future.result()) is not None:
                self._handle(event)

        pool.submit(task).add_done_callback(done)

    # --- on the folding thread ---------------------------------------------------------------------------------------

    def _read_federation(self, ref: BlobRef) -> ev.Event:
        federation = Federation.parse(self._blobs.read(ref.hash), "the broker's federation.toml")
        if federation.fingerprint != self.link.fingerprint:
            raise WrongFederation(
                "the broker's federation file is not the one that the link names", "ask for a new link"
            )
        return ev.FederationRead(federation)

    def _open_commit(self, ref: BlobRef, changes: Changes | None) -> ev.Event:
        assert self.replica is not None
        federation = self.replica.federation
        record = self._blobs.read(ref.hash)
        self._blobs.forget(ref.hash)
        try:
            commit = open_commit(record)
            body = decode(Body, commit.body)
            ruling = federation if changes is None else roster_for(federation, changes, body.server_round)
            check_votes(ruling, commit)
        except RavnestError as error:
            return ev.CommitRefused(str(error))
        self._commits = {body.server_round: (commit, body)}
        return ev.CommitOpened(body.server_round, body.updates)

    # --- on the training thread --------------------------------------------------------------------------------------

    def _prepare(self, ref: BlobRef) -> ev.Event:
        federation = self.session.federation
        assert federation is not None
        with TemporaryDirectory() as folder:
            file = Path(folder) / "model.safetensors"
            file.write_bytes(self._blobs.read(ref.hash))
            self._blobs.forget(ref.hash)
            self._initial = ref.hash
            self.replica = Replica(federation, read_model(file, federation.schema), self._outer_vector)
            if self.replica.head.model_hash.hex() != federation.federation.model_hash:
                raise SchemaMismatch("the broker's initial model is not the one that the federation signs")
            members = [member.node_id for member in federation.members]
            seed = federation.federation.seed
            partition = Partition(members.index(self.identity.node_id), len(members), seed)
            limit_gpu_memory(self._device, self._manners.max_gpu_memory)
            capability = self._measure(partition) if federation.rounds.target_seconds else None
            samples = federation.data.samples
            self._trainer = Trainer(self._loaded, federation.schema, partition, self._device, seed, file, samples)
        self._trainer.load_data()
        self._trainer.warm_up()
        self._check_progress()
        device = self._trainer.device
        self._tell_later(fx.Tell("trains on", {"device": describe(device)}))
        if hint := overlooked_gpus(device):
            self._tell_later(fx.Tell("hint", {"gpu": hint}, warning=True))
        return ev.Prepared(self.replica.head, capability)

    def _outer_vector(self, name: str, size: int) -> Float32:
        """A vector of the outer state, on disk: between folds its memory is the system's to take back."""
        self._vectors_folder.mkdir(parents=True, exist_ok=True)
        return np.memmap(self._vectors_folder / name, np.float32, "w+", shape=(size,))

    def _measure(self, partition: Partition) -> Capability | None:
        """Probe before the model takes its memory; what fails here costs the first round's size, nothing more."""
        threads = torch.get_num_threads()
        while self._watch.because and self._outcome is None:
            time.sleep(YIELD_LOOK_SECONDS)
        try:
            return probe_apart(
                self._loaded.path,
                partition,
                self._device,
                threads,
                self._probes,
                lambda: self._outcome is not None,
                max_gpu_memory=self._manners.max_gpu_memory,
            )
        except (ProbeFailed, OSError) as error:
            self._tell_later(fx.Tell("not measured", {"reason": str(error)}, warning=True))
            return None

    def _needed_later(self, because: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed by the time the machine was looked at
            self._loop.call_soon_threadsafe(self._handle, ev.Needed(because))

    def _tell_later(self, told: fx.Tell) -> None:
        self._loop.call_soon_threadsafe(self._tell, told)

    def _fold(self, server_round: int) -> ev.Event:
        assert self.replica is not None
        commit, body = self._commits.pop(server_round)
        with self._vectors:
            self.replica.fold(body, commit.body, updates_of(body, self._blobs))
            for ref in body.updates:
                self._blobs.drop(ref.hash)
            every = self.replica.federation.checkpoints.checkpoint_every
            if every and server_round % every == 0:
                self._keep_checkpoint()
            self._check_progress()
            return ev.Folded(self.replica.head)

    def _keep_checkpoint(self) -> None:
        """Write what a broker would offer to this client after a restart: it is then here already."""
        assert self.replica is not None
        try:
            ref = self._blobs.put_pieces(checkpoint_pieces(self.replica))
        except OSError as error:
            self._tell_later(fx.Tell("no checkpoint", {"reason": str(error)}, warning=True))
            return
        self._blobs.retain({self._initial, ref.hash})

    def _take_up(self, server_round: int, ref: BlobRef) -> ev.Event:
        assert self.replica is not None
        commit, _ = self._commits.pop(server_round)
        try:
            read = read_checkpoint(self._blobs.view(ref.hash), self.replica.federation, commit.body)
        except RavnestError as error:
            self._blobs.retain({self._initial})
            return ev.CommitRefused(str(error))
        with self._vectors:
            self.replica.take(read)
            self._blobs.forget(ref.hash)
            self._blobs.retain({self._initial, ref.hash})
            self._check_progress()
            return ev.Folded(self.replica.head)

    def _evaluate(self, server_round: int) -> ev.Event | None:
        assert self.replica is not None and self._trainer is not None
        with self._vectors:
            if self.replica.head.server_round != server_round:
                return None
            if self._watch.because:
                # Others measure the same model; what ends with this round ends here too.
                return ev.Evaluated(server_round, {}, 0)
            try:
                measured = self._trainer.evaluate(self.replica.state)
            except RavnestError as error:
                # What the recipe cannot measure costs the numbers, not the training.
                self._tell_later(fx.Tell("not evaluated", {"round": server_round, "reason": str(error)}, warning=True))
                measured = None
        metrics, examples = measured if measured is not None else ({}, 0)
        return ev.Evaluated(server_round, metrics, examples)

    def _train(self, order: WorkOrder, slice: Slice, abandoned: threading.Event) -> ev.Event | None:
        assert self.replica is not None and self._trainer is not None
        if abandoned.is_set():
            return None
        with self._vectors:
            if self.replica.head.server_round != order.base_round:
                return ev.Overtaken(order.base_round)
            # Where a round may end while this one is trained, folding must not change what it is trained on.
            base = self.replica.state.copy() if self._max_staleness else self.replica.state
        self._trainer.repartition(
            Partition(order.partition_index, order.partition_count, self.replica.federation.federation.seed)
        )
        if not self._resumed:
            self._resume(order.base_round)
        factor = rest_factor(self._manners.max_cpu, psutil.cpu_count() or 1, torch.get_num_threads())
        boundary = StepBoundary(factor, lambda: self._watch.because, abandoned.wait)
        deadline = time.monotonic() + order.deadline_seconds
        work = LocalWork.ordered(order, self.replica.federation.strategy.proximal, slice)
        self._controls = self._read_controls()
        try:
            result = self._trainer.train(
                work,
                base,
                lambda: abandoned.is_set() or time.monotonic() > deadline,
                boundary,
                self._controls.correction() if self._controls is not None else None,
            )
            if self._watch.because:
                self._trainer.make_room()
            if self._max_staleness and self._outbox.standing.offer is not None:
                # What is owed after the earlier contribution is part of what this one sends.
                self._finished = result.kept(self.replica.schema)
                return ev.Finished(order.base_round)
            return self._encoded(order, result)
        except RoundYielded:
            self._trainer.make_room()
            return ev.Yielded(order.base_round)
        except RoundAbandoned:
            if abandoned.is_set():
                return None
            late = RavnestError(f"the work order's {order.deadline_seconds:g} s are over", "lower rounds.local_steps")
            return ev.TrainingFailed(order.base_round, late)
        except RavnestError as error:
            return ev.TrainingFailed(order.base_round, error)

    def _encoded(self, order: WorkOrder, result: LocalResult) -> ev.Event:
        trained = self._encode(order, result)
        self._save_progress(order)
        return trained

    def _encode_finished(self, order: WorkOrder) -> ev.Event:
        result, self._finished = self._finished, None
        assert result is not None
        try:
            return self._encoded(order, result)
        except RavnestError as error:
            return ev.TrainingFailed(order.base_round, error)

    def _resume(self, base_round: int) -> None:
        """Take up the progress of an earlier life of this client."""
        assert self._trainer is not None
        self._resumed = True
        try:
            self._trainer.progress = self._progress.before(base_round) or Progress()
        except ProgressUnreadable as error:
            self._tell_later(fx.Tell("progress lost", {"reason": str(error)}, warning=True))

    def _check_progress(self) -> None:
        assert self.replica is not None
        head = self.replica.head
        try:
            self._progress.check(head.server_round, head.commit_hash)
        except ProgressUnreadable as error:
            self._tell_later(fx.Tell("progress lost", {"reason": str(error)}, warning=True))

    def _save_progress(self, order: WorkOrder) -> None:
        assert self._trainer is not None
        progress = self._trainer.progress
        try:
            self._progress.save(order.base_round, order.base_hash, progress)
        except StateNotKept as error:
            self._tell_later(fx.Tell("optimiser not kept", {"reason": str(error)}, warning=True))
            self._progress.save(order.base_round, order.base_hash, Progress(progress.position))

    def _read_controls(self) -> Controls | None:
        assert self.replica is not None
        common = self.replica.outer_state.get(CONTROL)
        if common is None:
            return None
        controls = Controls(self.replica.schema, self._outbox.standing, common, self._outbox.read)
        if controls.lost:
            self._tell_later(fx.Tell("control lost", {"shards": len(controls.lost)}, warning=True))
        return controls

    def _encode(self, order: WorkOrder, result: LocalResult) -> ev.Event:
        assert self.replica is not None
        schema, codec, outbox = self.replica.schema, codecs.get(order.codec), self._outbox
        feedback = renewal = None
        if codec.feedback_decay is not None:
            feedback = ErrorFeedback(schema, codec, outbox.standing, outbox.read, outbox.put)
        elif self._controls is not None:
            renewal = self._controls.renewal(outbox.put)
        steps = self.replica.federation.steps_counted(result.local_steps)
        encoded = encode_delta(schema, codec.name, result.delta, feedback or renewal, steps, outbox.put)
        if feedback and feedback.lost:
            self._tell_later(fx.Tell("residual lost", {"shards": len(feedback.lost)}, warning=True))
        return ev.Trained(
            order.base_round,
            encoded.payloads,
            encoded.norm,
            encoded.max_abs,
            result.num_examples,
            result.local_steps,
            result.metrics,
            result.seconds,
            tuple(feedback.left) if feedback else None,
            tuple(renewal.renewed) if renewal else None,
        )
