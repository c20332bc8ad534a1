"""Checkpoints: the same bytes everywhere, proof in the commit alone, bounded disks, and no moment at which a kill hurts."""

import os
import pathlib
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from ravnest_fed.checkpoints import checkpoint_pieces, read_checkpoint
from ravnest_fed.errors import LedgerError, VerificationError
from ravnest_fed.facts import BlobRef
from ravnest_fed.federation import FILE_NAME, INITIAL_MODEL
from ravnest_fed.identity import Identity
from ravnest_fed.ledger import Ledger
from ravnest_fed.model_files import write_durably
from ravnest_fed.replica import Replica
from ravnest_fed.restoring import restore
from ravnest_fed.verification import prove
from tests.building import Contribution, Decided, contribution, decide, evaluation, initial_state, row_of, tiny

ONE = tiny(settings={"strategy.name": "fedavgm", "momentum": "0.9", "learning_rate": "0.5"})


def rounds_of(count: int) -> Iterator[tuple[Decided, list[Contribution], Replica]]:
    """Rounds, each with the replica after it, which goes on afterwards."""
    replica = ONE.replica()
    for _ in range(count):
        offers = [contribution(ONE, replica.head, member) for member in (0, 1, 2)]
        decided = decide(ONE, replica, offers, [evaluation(ONE, replica.head, 0, {"loss": 1.0})])
        replica.fold(decided.body, decided.raw, decided.read_update)
        yield decided, offers, replica


def bytes_of(replica: Replica) -> bytes:
    return b"".join(checkpoint_pieces(replica))


*_, (LAST, _, AFTER) = rounds_of(4)
WRITTEN = bytes_of(AFTER)


def test_a_checkpoint_gives_the_same_replica_and_is_written_alike_by_it() -> None:
    read = read_checkpoint(memoryview(WRITTEN), ONE.federation, LAST.raw)
    assert read.hashes() == AFTER.hashes()
    assert read.head == AFTER.head
    assert bytes_of(read) == WRITTEN


def test_a_replica_from_a_checkpoint_folds_on_to_the_same_state() -> None:
    read = read_checkpoint(memoryview(WRITTEN), ONE.federation, LAST.raw)
    offers = [contribution(ONE, read.head, member) for member in (1, 2)]
    following = decide(ONE, read, offers)
    read.fold(following.body, following.raw, following.read_update)
    *_, (_, _, other) = rounds_of(4)
    other.fold(following.body, following.raw, following.read_update)
    assert read.hashes() == other.hashes()


def test_an_adaptive_strategy_s_running_products_are_in_the_checkpoint_and_proven() -> None:
    one = tiny(settings={"strategy.name": "fedadam", "momentum": "0.9", "learning_rate": "0.01"})
    replica = one.replica()
    for _ in range(3):
        decided = decide(one, replica, [contribution(one, replica.head, member) for member in (0, 1, 2)])
        replica.fold(decided.body, decided.raw, decided.read_update)
    assert 0.0 < replica.head.scalars[0] < 0.9**2
    written = bytes_of(replica)
    assert {"outer_state.first_moment", "outer_state.second_moment"} <= set(safetensors.numpy.load(written))
    read = read_checkpoint(memoryview(written), one.federation, decided.raw)
    assert read.head.scalars == replica.head.scalars
    following = decide(one, read, [contribution(one, read.head, member) for member in (0, 2)])
    for either in (read, replica):
        either.fold(following.body, following.raw, following.read_update)
    assert read.hashes() == replica.hashes()
    replica.head = msgspec.structs.replace(replica.head, scalars=(0.5, 0.5))
    with pytest.raises(VerificationError, match="holds another state"):
        read_checkpoint(memoryview(bytes_of(replica)), one.federation, following.raw)


def test_a_checkpoint_is_a_safetensors_file_of_the_models_tensors_and_the_outer_state() -> None:
    tensors = safetensors.numpy.load(WRITTEN)
    names = {"weight", "bias", "norm.running_var", "norm.num_batches_tracked", "outer_state.velocity"}
    assert set(tensors) == names
    assert np.array_equal(tensors["bias"], AFTER.state.view(ONE.federation.schema, "bias"))
    assert tensors["norm.num_batches_tracked"].dtype == np.int64


def test_padding_stays_zero_whatever_an_update_says_there() -> None:
    schema = ONE.federation.schema
    assert not AFTER.state.vector[schema.parameter_count : schema.parameter_stop].any()
    assert not AFTER.outer_state["velocity"][schema.parameter_count :].any()


def test_a_checkpoint_of_another_round_or_federation_is_no_proof() -> None:
    (first, _, _), *_ = rounds_of(1)
    with pytest.raises(VerificationError, match="holds another state"):
        read_checkpoint(memoryview(WRITTEN), ONE.federation, first.raw)
    with pytest.raises(VerificationError, match="another federation"):
        read_checkpoint(memoryview(WRITTEN), tiny(members=5).federation, LAST.raw)


@given(position=st.integers(0, len(WRITTEN) - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found_out_or_says_nothing_of_the_state(position: int, bit: int) -> None:
    damaged = bytearray(WRITTEN)
    damaged[position] ^= 1 << bit
    try:
        read = read_checkpoint(memoryview(damaged), ONE.federation, LAST.raw)
    except VerificationError:
        return
    # What names the recipe, for people, is proven by the federation file and not by the state.
    assert read.hashes() == AFTER.hashes() and read.head == AFTER.head


@given(length=st.integers(0, len(WRITTEN) - 1))
def test_a_checkpoint_cut_short_is_refused(length: int) -> None:
    with pytest.raises(VerificationError):
        read_checkpoint(memoryview(WRITTEN[:length]), ONE.federation, LAST.raw)


# --- in the ledger ---------------------------------------------------------------------------------------------------


def founded(folder: Path) -> Path:
    """A broker's folder, ready for a ledger."""
    folder.mkdir(parents=True, exist_ok=True)
    operator: Identity = ONE.operator
    write_durably(folder / FILE_NAME, ONE.federation.signed_by(operator).encode())
    state = initial_state(ONE.federation.schema)
    tensors = {name: state.view(ONE.federation.schema, name) for name in ONE.federation.schema.offsets}
    (folder / INITIAL_MODEL).write_bytes(safetensors.numpy.save(tensors))
    return folder


def save(ledger: Ledger, decided: Decided, offers: list[Contribution]) -> None:
    for blob in (decided.evidence, *decided.updates):
        ledger.blobs.put(blob)
    ledger.save_commit(decided.commit, row_of(decided, offers))


def consolidate(ledger: Ledger, replica: Replica, keep: int) -> None:
    ref = ledger.blobs.put_pieces(checkpoint_pieces(replica))
    ledger.save_checkpoint(replica.head.server_round, ref, keep)
    ledger.sweep(())


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / "blobs").iterdir())


def test_disk_use_stays_bounded_and_the_ledger_is_proven_from_its_oldest_checkpoint(tmp_path: Path) -> None:
    folder = founded(tmp_path)
    ledger = Ledger(folder, ONE.federation.fingerprint)
    sizes = []
    for decided, offers, replica in rounds_of(16):
        save(ledger, decided, offers)
        if replica.head.server_round % 2 == 0:
            consolidate(ledger, replica, keep=2)
            sizes.append(size_of(folder))
    assert [at for at, _ in ledger.checkpoints()] == [14, 16]
    assert [body.server_round for _, body in ledger.commits(14)] == [15, 16]
    assert ledger.commit(13) is None and ledger.commit(14) is not None
    assert len(ledger.rows(0)) == 16
    assert max(sizes[4:]) <= 1.01 * sizes[4]
    ledger.close()
    proven = prove(folder)
    assert (proven.began, proven.replica.head) == (14, replica.head)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    folder = founded(tmp_path)
    ledger = Ledger(folder, ONE.federation.fingerprint)
    for decided, offers, replica in rounds_of(5):
        save(ledger, decided, offers)
        if replica.head.server_round in (2, 4):
            consolidate(ledger, replica, keep=2)
    newest = ledger.checkpoints()[-1][1]
    damage(folder / "blobs" / newest.hash.hex())
    findings: list[str] = []
    assert restore(ledger, ONE.federation, findings.append).head == replica.head
    assert len(findings) == 1 and "round 4" in findings[0]
    damage(folder / "blobs" / ledger.checkpoints()[0][1].hash.hex())
    with pytest.raises(LedgerError, match="no checkpoint can be read"):
        restore(ledger, ONE.federation, findings.append)
    ledger.close()
    with pytest.raises(VerificationError, match="round 2"):
        prove(folder)


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_blobs_touched_since_the_last_sweep_stay_though_nothing_names_them(tmp_path: Path) -> None:
    ledger = Ledger(founded(tmp_path), ONE.federation.fingerprint)
    early = ledger.blobs.put(b"of a plan that lost")
    ledger.sweep(())
    late = ledger.blobs.put(b"of the open round")
    ledger.sweep(())
    assert not ledger.blobs.has(early.hash) and ledger.blobs.has(late.hash)


# --- killed between any two system calls -----------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone."""


@contextmanager
def killed_at(ledger: Ledger, step: int) -> Iterator[list[str]]:
    """Die before the call number `step` of those that change the disk."""
    calls: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if len(calls) == step:
                raise Killed
            calls.append(name)
            return real(*arguments, **options)

        return call

    class Database:
        def __init__(self, real: sqlite3.Connection) -> None:
            self._real = real

        def execute(self, *arguments: Any) -> Any:
            return counted("execute", self._real.execute)(*arguments)

        def __enter__(self) -> None:
            self._real.__enter__()

        def __exit__(self, *error: Any) -> Any:
            return counted("commit", self._real.__exit__)(*error) if error[0] is None else self._real.__exit__(*error)

        def close(self) -> None:
            self._real.close()

    real = ledger._db
    ledger._db = Database(real)  # type: ignore[assignment]
    with (
        mock.patch.object(os, "fsync", counted("fsync", os.fsync)),
        mock.patch.object(pathlib.Path, "replace", counted("rename", pathlib.Path.replace)),
        mock.patch.object(pathlib.Path, "unlink", counted("unlink", pathlib.Path.unlink)),
    ):
        try:
            yield calls
        except Killed:
            calls.append("killed")
        finally:
            if real.in_transaction:
                real.rollback()
            real.close()


def survives_every_kill(tmp_path: Path, prepare: Callable[[Ledger], Callable[[], None]], heads: set[int]) -> int:
    """Kill what `prepare` gives before every call that changes the disk; the ledger must be sound after each."""
    for step in range(1000):
        folder = founded(tmp_path / str(step))
        ledger = Ledger(folder, ONE.federation.fingerprint)
        task = prepare(ledger)
        with killed_at(ledger, step) as calls:
            task()
        again = Ledger(folder, ONE.federation.fingerprint)
        assert restore(again, ONE.federation).head.server_round in heads
        again.sweep(())
        again.close()
        assert prove(folder).replica.head.server_round in heads
        again = Ledger(folder, ONE.federation.fingerprint)
        replica = restore(again, ONE.federation)
        consolidate(again, replica, keep=1)
        again.close()
        assert prove(folder).began == replica.head.server_round
        if calls[-1] != "killed":
            return step
    raise AssertionError("it never came to its end")


def test_consolidation_survives_a_kill_between_any_two_system_calls(tmp_path: Path) -> None:
    def prepare(ledger: Ledger) -> Callable[[], None]:
        for decided, offers, replica in rounds_of(4):
            save(ledger, decided, offers)
            if replica.head.server_round == 2:
                consolidate(ledger, replica, keep=1)
        return lambda: consolidate(ledger, replica, keep=1)

    assert survives_every_kill(tmp_path, prepare, {4}) > 10


def test_adopting_a_checkpoint_survives_a_kill_between_any_two_system_calls(tmp_path: Path) -> None:
    def prepare(ledger: Ledger) -> Callable[[], None]:
        for decided, offers, replica in rounds_of(6):
            if replica.head.server_round <= 2:
                save(ledger, decided, offers)

        def adopt() -> None:
            data = bytes_of(replica)
            ref = BlobRef.of(data, inline=False)
            ledger.blobs.keep_chunk(ref, 0, data)
            ledger.blobs.finish(ref)
            ledger.adopt_checkpoint(decided.commit, 6, ref)
            ledger.sweep(())

        return adopt

    assert survives_every_kill(tmp_path, prepare, {2, 6}) > 6
