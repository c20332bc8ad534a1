"""How a command fails: one line on the error stream, and the exit status of the error's class.

What no class foresees, such as a full disk, ends with status 1.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

import click

from ravnest_fed.errors import RavnestError

P = ParamSpec("P")
T = TypeVar("T")
INTERRUPTED = 130


def failing_cleanly(command: Callable[P, T]) -> Callable[P, T]:
    """Turn a RavnestError into one line and its exit status, and Ctrl-C into status 130; `--debug` keeps tracebacks."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except RavnestError as error:
            if kwargs.get("debug"):
                raise
            _end(error)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            # The reader of our output went away; there is nobody left to tell.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except OSError as error:
            if kwargs.get("debug"):
                raise
            place = f"{error.filename}: " if error.filename else ""
            _end(RavnestError(f"{place}{error.strerror or error}", "check the path, its permissions and the disk"))
        except Exception as error:
            if kwargs.get("debug"):
                raise
            _end(RavnestError(f"{type(error).__name__}: {error}", "run it again with --debug to see where"))

    return wrapper


def _end(error: RavnestError) -> NoReturn:
    click.echo(f"error: {error}", err=True)
    sys.exit(error.exit_status)
