"""What the kills of a demo cost, in words."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ravnest_fed.chaos import Kill


def note(kill: Kill) -> str:
    """A kill as it happens, or its node as it comes back."""
    if kill.back_at is None:
        return f"{kill.strike.node} killed in round {kill.server_round}"
    return f"{kill.strike.node} is back after {kill.back_at - kill.at:.1f} s"


def disturbed_rounds(kills: Sequence[Mapping[str, Any]]) -> set[int]:
    """The rounds that a summary's `chaos` disturbed: those with a kill, the ones after, and those with a return."""
    touched = [(one["server_round"], one["server_round"] + 1, one["back_in_round"]) for one in kills]
    return {number for numbers in touched for number in numbers if number is not None}


def cost(summary: Mapping[str, Any], lost: Sequence[int]) -> list[str]:
    """Lines about the kills in a summary's JSON form and the rounds in which they fell; `lost` names lost rounds.

    Round 1 stands for itself, since it contains the start of all processes.
    """
    kills = summary["chaos"]
    if not kills:
        return ["nothing was killed: training ended before"]
    told = ", ".join(f"{one['node']} in round {one['server_round']} ({_back(one)})" for one in kills)
    disturbed = disturbed_rounds(kills)
    seconds = {one["server_round"]: one["seconds"] for one in summary["rounds"] if one["server_round"] > 1}
    calm = [value for number, value in seconds.items() if number not in disturbed]
    rough = [value for number, value in seconds.items() if number in disturbed]
    gone = ", ".join(str(number) for number in lost) or "none"
    return [
        f"killed: {told}",
        f"a round took {_median(calm)} undisturbed and {_median(rough)} around a kill, in the median"
        f"{f' (at most {max(rough):.2f} s)' if rough else ''}; rounds lost: {gone}",
    ]


def _back(kill: Mapping[str, Any]) -> str:
    after = kill["back_after_seconds"]
    return "not back" if after is None else f"back after {after:.1f} s"


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} s" if seconds else "no measured time"
