"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ravnest_fed.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


def debug_option(command: F) -> F:
    """`--debug`."""
    return click.option("--debug", is_flag=True, help="Show tracebacks.")(command)


def set_option(command: F) -> F:
    """`--set KEY=VALUE`, many times."""
    return click.option(
        "--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Any federation setting, such as codecs.up=fp32."
    )(command)


def folder_argument(command: F) -> F:
    """The folder of a federation or a broker."""
    return click.argument("folder", type=click.Path(path_type=Path))(command)


def settings_from(pairs: tuple[str, ...]) -> dict[str, str]:
    """The settings in `--set` options. Raises UsageError for one without an equals sign."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {pair!r} sets nothing", "write --set KEY=VALUE")
        settings[key.strip()] = value.strip()
    return settings
