"""A client's progress on disk, so that one that was stopped goes on with the same data and the same optimiser.

One file a base round, `progress-<round>.safetensors`: tensors of the local optimiser's state, and as metadata the rest in
JSON with the commit that training was based on. A round is trained with the progress of an earlier base only, and the two
last files are kept. So whenever a client dies, training the same base again gives the same bits, whether its progress on
that base had reached the disk already or not.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from clients.feed import Position
from clients.trainer import Progress
from ravnest_fed.errors import RavnestError
from ravnest_fed.model_files import write_durably

_NAME = re.compile(r"progress-(\d+)\.safetensors")
_FORMAT = 1


class ProgressUnreadable(RavnestError):
    """A progress file is damaged, or of another federation."""


class StateNotKept(RavnestError):
    """An optimiser's state holds something that no file keeps."""


class _Facts(msgspec.Struct, frozen=True):
    """What a file says beside its tensors; `base_hash` is the hash of the commit of `base_round`, all hashes in hex."""

    format: int
    federation: str
    base_round: int
    base_hash: str
    epoch: int
    drawn: int
    optimizer: Any


class ProgressFiles:
    """The progress of one member of the federation `fingerprint` in `folder`, which exists."""

    def __init__(self, folder: Path, fingerprint: bytes) -> None:
        self._folder = folder
        self._federation = fingerprint.hex()

    def save(self, base_round: int, base_hash: bytes, progress: Progress) -> None:
        """Keep the progress after training on the model of `base_round`, durably.

        Raises StateNotKept for an optimiser's state of other things than tensors, numbers and texts in lists and dicts.
        """
        tensors: dict[str, torch.Tensor] = {}
        tree = _to_plain(progress.optimizer_state, tensors)
        facts = _Facts(_FORMAT, self._federation, base_round, base_hash.hex(), *progress.position, tree)
        text = json.dumps(msgspec.to_builtins(facts))
        try:
            data = safetensors.torch.save(tensors, {"progress": text})
        except (RuntimeError, ValueError, KeyError, SafetensorError) as error:
            raise StateNotKept(f"the optimiser's state cannot be written: {error}", _REMEDY) from None
        write_durably(self._file(base_round), data)
        before = max((number for number in self._rounds() if number < base_round), default=base_round)
        for number in self._rounds() - {before, base_round}:
            self._file(number).unlink()

    def before(self, base_round: int) -> Progress | None:
        """The progress with which a client trains on the model of `base_round`; None if it begins there.

        Raises ProgressUnreadable for a file that is damaged.
        """
        number = max((number for number in self._rounds() if number < base_round), default=None)
        if number is None:
            return None
        facts, tensors = self._read(number)
        return Progress(Position(facts.epoch, facts.drawn), _from_plain(facts.optimizer, tensors))

    def check(self, base_round: int, base_hash: bytes) -> None:
        """The commit of `base_round` is known to be `base_hash`: progress made on another one is removed.

        Raises ProgressUnreadable for a file that is damaged, and removes that one too.
        """
        if base_round not in self._rounds():
            return
        try:
            facts, _ = self._read(base_round, tensors=False)
        except ProgressUnreadable:
            self._file(base_round).unlink()
            raise
        if facts.base_hash != base_hash.hex():
            self._file(base_round).unlink()

    def _read(self, number: int, tensors: bool = True) -> tuple[_Facts, dict[str, torch.Tensor]]:
        file = self._file(number)
        try:
            with safe_open(file, framework="pt") as opened:
                facts = msgspec.convert(json.loads(opened.metadata()["progress"]), _Facts)
                # Copies: the file may be removed while its pages are still in use.
                found = {name: opened.get_tensor(name).clone() for name in opened.keys()} if tensors else {}  # noqa: SIM118
        except (
            OSError,
            SafetensorError,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
            msgspec.MsgspecError,
        ) as error:
            raise ProgressUnreadable(f"{file} cannot be read: {error}", "training goes on without it") from None
        if (facts.format, facts.federation, facts.base_round) != (_FORMAT, self._federation, number):
            raise ProgressUnreadable(f"{file} is of another federation", "training goes on without it")
        return facts, found

    def _rounds(self) -> set[int]:
        names = (_NAME.fullmatch(file.name) for file in self._folder.iterdir())
        return {int(name[1]) for name in names if name}

    def _file(self, base_round: int) -> Path:
        return self._folder / f"progress-{base_round}.safetensors"


_REMEDY = "with keep_optimizer, after a restart this optimiser begins anew"


def _to_plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON; its tensors are put into `tensors`, on the CPU, and named in their place."""
    match value:
        case None | bool() | str() | int() | float():
            return value
        case torch.Tensor():
            name = f"t{len(tensors)}"
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {"tensor": name}
        case list():
            return [_to_plain(one, tensors) for one in value]
        case tuple():
            return {"tuple": [_to_plain(one, tensors) for one in value]}
        case dict():
            return {"dict": [[_to_plain(one, tensors) for one in pair] for pair in value.items()]}
    raise StateNotKept(f"the optimiser's state holds a {type(value).__name__}", _REMEDY)


def _from_plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    match value:
        case {"tensor": name}:
            return tensors[name]
        case {"tuple": [*items]}:
            return tuple(_from_plain(one, tensors) for one in items)
        case {"dict": [*pairs]}:
            return {_from_plain(key, tensors): _from_plain(one, tensors) for key, one in pairs}
        case [*items]:
            return [_from_plain(one, tensors) for one in items]
    return value
