"""Importing a recipe's source: only what its hash covers, under names of its own.

Byte code in `__pycache__` is never read, since the hash does not cover it. A recipe that is a folder may import its
neighbours by their plain names at the top of its files; these modules leave `sys.modules` once the recipe is loaded, so
that two recipes with a neighbour of the same name do not meet.
"""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType


class _SourceOnly(SourceFileLoader):
    """Compiles the source each time and neither reads nor writes byte code."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


class _Neighbours(MetaPathFinder):
    """Finds the modules and packages that lie in `folder`, before any installed module of the same name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None:
            if fullname in sys.stdlib_module_names:
                return None
            places = [str(self._folder)]
        else:
            places = [place for place in path if Path(place).is_relative_to(self._folder)]
        for place in places:
            spec = FileFinder(place, (_SourceOnly, [".py"])).find_spec(fullname, target)
            if spec is not None and spec.loader is not None:
                return spec
        return None

    def names(self) -> set[str]:
        """Top-level names that this folder gives."""
        found = {entry.stem for entry in self._folder.glob("*.py")}
        found |= {entry.name for entry in self._folder.iterdir() if (entry / "__init__.py").is_file()}
        return found - set(sys.stdlib_module_names)


@contextmanager
def _neighbours_importable(folder: Path) -> Iterator[None]:
    finder = _Neighbours(folder)
    names = finder.names()

    def taken() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}

    outer = taken()
    for name in outer:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in taken():
            del sys.modules[name]
        sys.modules.update(outer)


def import_source(path: Path, name: str, neighbours: bool) -> ModuleType:
    """Run the file `path` as module `name` and return it; with `neighbours`, its folder's modules can be imported.

    Lets whatever the file raises through.
    """
    spec = importlib.util.spec_from_loader(name, _SourceOnly(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        if neighbours:
            with _neighbours_importable(path.parent):
                spec.loader.exec_module(module)
        else:
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
