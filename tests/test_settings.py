"""Settings: how a person names and gives them, and every one that cannot work refused with its name."""

from typing import Any

import pytest

from ravnest_fed.errors import FederationFileError
from ravnest_fed.federation import from_tables, known_settings, with_settings
from tests.building import identity, tables, tiny


def changed(path: str, value: Any, brokers: int = 3) -> dict[str, Any]:
    """The tables with `value` at a dotted path; None takes the key away."""
    found = tables(brokers)
    *parents, last = path.split(".")
    place: Any = found
    for step in parents:
        place = place[int(step)] if step.isdigit() else place.setdefault(step, {})
    if value is None:
        del place[last]
    else:
        place[last] = value
    return found


REFUSED = [
    ("federation.format", 2, "federation.format is 2"),
    ("rounds.local_steps", 0, "rounds.local_steps is 0"),
    ("rounds.local_steps", 2**31 + 1, "rounds.local_steps"),
    ("rounds.micro_batch", 0, "rounds.micro_batch is 0"),
    ("rounds.accumulation", -1, "rounds.accumulation is -1"),
    ("rounds.min_contributions", 0, "rounds.min_contributions is 0"),
    ("rounds.grace_seconds", -0.5, "rounds.grace_seconds is -0.5"),
    ("rounds.grace_seconds", float("nan"), "rounds.grace_seconds is nan"),
    ("rounds.deadline_seconds", float("inf"), "rounds.deadline_seconds is inf"),
    ("rounds.deadline_seconds", -1.0, "rounds.deadline_seconds"),
    ("limits.max_contributions", 0, "limits.max_contributions is 0"),
    ("limits.max_contributions", 2**20 + 1, "limits.max_contributions is 1048577"),
    ("strategy.max_weight", 0, "strategy.max_weight is 0"),
    ("strategy.max_weight", 65537, "strategy.max_weight is 65537"),
    ("strategy.learning_rate", 0.0, "diverges"),
    ("strategy.learning_rate", 10.5, "diverges"),
    ("strategy.learning_rate", float("nan"), "diverges"),
    ("strategy.momentum", 1.0, "diverges"),
    ("strategy.momentum", -0.1, "diverges"),
    ("strategy.momentum", 0.5, "strategy.momentum is set, but fedavg has none"),
    ("strategy.nesterov", True, "strategy.momentum is set, but fedavg has none"),
    ("strategy.clip_factor", -1.0, "strategy.clip_factor"),
    ("strategy.clip_factor", float("nan"), "strategy.clip_factor"),
    ("strategy.norm_history", 0, "strategy.norm_history"),
    ("strategy.norm_history", 65537, "strategy.norm_history"),
    ("strategy.beta2", 0.9, "strategy.beta2 is set, but fedavg has none"),
    ("strategy.epsilon", 0.1, "strategy.epsilon is set, but fedavg has none"),
    ("strategy.name", "fedadam", "strategy.learning_rate is 1.0, which diverges with fedadam"),
    ("strategy.proximal", -0.1, "strategy.proximal is -0.1"),
    ("strategy.proximal", 1001.0, "strategy.proximal is 1001.0"),
    ("strategy.proximal", float("nan"), "strategy.proximal is nan"),
    ("codecs.up", "int7", "codecs.up is 'int7'"),
    ("codecs.down", "", "codecs.down is ''"),
    ("codecs.down", "sign", "codecs.down is 'sign', which diverges without error feedback"),
    ("codecs.down", "topk64", "codecs.down is 'topk64', which diverges without error feedback"),
    ("codecs.warmup_rounds", 3, "codecs.warmup_rounds is 3, but int8 needs no warm-up"),
    ("codecs.warmup_rounds", -1, "codecs.warmup_rounds is -1"),
    ("codecs.warmup_rounds", 2**31 + 1, "codecs.warmup_rounds is 2147483649"),
    ("stop.date", "tomorrow", "stop.date 'tomorrow' is no date"),
    ("stop.date", "2030-01-31T18:00:00", "names no time zone"),
    ("stop.metric", "loss", "stop.metric needs a bound"),
    ("stop.at_least", 0.5, "stop.metric needs a bound"),
    ("stop.rounds", -1, "stop.rounds is -1"),
    ("brokers", [], "brokers is empty"),
    ("federation.topology", "parameter-server", "federation.topology parameter-server has one broker"),
    ("members.0.name", "b1", "hold a name or a key twice"),
    ("members.0.public_key", identity("b1").public_key.hex(), "hold a name or a key twice"),
    ("members.0.public_key", "zz" * 32, "a key 'zzzz"),
    ("members.0.curve_key", "11" * 31, "a key '1111"),
    ("brokers.1.public_key", "", "a key ''"),
    ("operator.public_key", "22" * 33, "a key '2222"),
    ("operator.curve_key", "no hex", "a key 'no hex'"),
    ("schema.parameters", [], "no trainable parameter"),
    ("schema.shard_size", 4095, "schema.shard_size is 4095"),
    ("schema.shard_size", 0, "schema.shard_size is 0"),
    ("schema.shard_size", 2**21, "schema.shard_size is 2097152"),
    ("schema.parameters", [["w", [-1], "float32"]], "tensor w has the shape"),
    ("federation.recipe_hash", None, "missing.*recipe_hash"),
    ("rounds.typo", 1, "unknown setting `typo`.*rounds"),
]


def test_the_tables_as_they_are_are_accepted() -> None:
    assert from_tables(tables(), "here") == tiny().federation


@pytest.mark.parametrize(
    ("path", "value", "finding"), REFUSED, ids=[f"{path}={value}"[:40] for path, value, _ in REFUSED]
)
def test_what_cannot_work_is_refused_by_name(path: str, value: Any, finding: str) -> None:
    with pytest.raises(FederationFileError, match=finding):
        from_tables(changed(path, value), "here")


@pytest.mark.parametrize(
    ("settings", "finding"),
    [
        ({"target_contributions": "2", "min_contributions": "3"}, "target_contributions is below"),
        ({"max_contributions": "2", "min_contributions": "3"}, "max_contributions is below what a round needs"),
        ({"max_contributions": "2", "target_contributions": "3"}, "max_contributions is below what a round needs"),
        *(
            ({"strategy.name": "fedavgm", "momentum": "0.51", "up": up}, f"0.51, which diverges with codecs.up = {up}")
            for up in ("sign", "topk128", "topk64", "topk40")
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, str], finding: str) -> None:
    with pytest.raises(FederationFileError, match=finding):
        tiny(settings=settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_contributions": "3", "min_contributions": "3", "max_contributions": "3"},
        {"strategy.name": "fedavgm", "momentum": "0.99", "nesterov": "true", "learning_rate": "10"},
        {"clip_factor": "0", "norm_history": "65536", "max_weight": "1"},
        {"stop.metric": "loss", "at_least": "1", "at_most": "0"},
        {"grace_seconds": "0", "deadline_seconds": "0"},
        {"strategy.name": "fedavgm", "momentum": "0.5", "up": "topk40", "warmup_rounds": "0"},
        {"strategy.name": "fedavgm", "momentum": "0.9", "up": "int4", "down": "int4", "warmup_rounds": "0"},
        {"up": "sign", "warmup_rounds": "2147483648"},
    ],
)
def test_settings_at_their_edges_are_accepted(settings: dict[str, str]) -> None:
    tiny(settings=settings)


def test_one_broker_may_be_either_topology() -> None:
    assert tiny(brokers=1).federation.federation.topology == "parameter-server"
    from_tables(changed("federation.topology", "butterfly", brokers=1), "here")


def test_a_setting_goes_by_its_full_name_or_a_key_of_one_table() -> None:
    found: dict[str, Any] = {"rounds": {"local_steps": 1, "micro_batch": 9}}
    with_settings(found, {"rounds.local_steps": "5", "momentum": "0.5", "up": "int8", "rounds": "8"})
    assert found["rounds"] == {"local_steps": 5, "micro_batch": 9}
    assert found["strategy"] == {"momentum": 0.5}
    assert found["codecs"] == {"up": "int8"}
    assert found["stop"] == {"rounds": 8}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("0.5", 0.5),
        ("true", True),
        ("word", "word"),
        ('"quoted"', "quoted"),
        ("two words", "two words"),
        ("2030-01-31T18:00:00+00:00", "2030-01-31T18:00:00+00:00"),
        ("[1, 2]", "[1, 2]"),
    ],
)
def test_the_text_of_a_setting_is_read_as_a_value(text: str, value: Any) -> None:
    found: dict[str, Any] = {}
    with_settings(found, {"federation.name": text})
    assert found == {"federation": {"name": value}}


@pytest.mark.parametrize("name", ["typo", "rounds.typo", "limits", "", "federation.recipe_hash", "operator.public_key"])
def test_an_unknown_setting_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(FederationFileError, match=f"unknown setting '{name}'") as caught:
        with_settings({}, {name: "1"})
    assert "rounds.local_steps" in caught.value.remedy


def test_a_key_of_two_tables_is_ambiguous_and_both_are_named() -> None:
    with pytest.raises(FederationFileError, match="ambiguous setting 'name'") as caught:
        with_settings({}, {"name": "x"})
    assert "federation.name" in caught.value.remedy
    assert "strategy.name" in caught.value.remedy
    assert "rounds.local_steps" not in caught.value.remedy


def test_every_known_setting_is_known_by_its_full_name() -> None:
    for name in known_settings():
        found: dict[str, Any] = {}
        with_settings(found, {name: "1"})
        table, _, key = name.partition(".")
        assert found == {table: {key: 1}}
