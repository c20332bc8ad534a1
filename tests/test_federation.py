"""The signed federation file: what was saved is loaded, and what was changed or is malformed is refused by name."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from ravnest_fed.errors import FederationFileError
from ravnest_fed.federation import MAX_FILE_BYTES, Federation
from ravnest_fed.identity import node_id_of
from tests.building import identity, tiny

ONE = tiny(brokers=3, members=4)
TEXT = ONE.federation.signed_by(ONE.operator)


def refused(text: str | bytes, finding: str) -> FederationFileError:
    raw = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(FederationFileError, match=finding) as caught:
        Federation.parse(raw, "here.toml")
    assert "here.toml" in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def signed_anew(text: str) -> str:
    """`text` in the place of the signed part, under the operator's true signature."""
    signature = ONE.operator.sign("federation", text.encode()).signature.hex()
    return f'{text}\n[signature]\nvalue = "{signature}"\n'


def test_a_saved_file_is_loaded_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_bytes(TEXT.encode())
    loaded = Federation.load(file)
    assert loaded == ONE.federation
    assert loaded.fingerprint == ONE.federation.fingerprint
    assert loaded.signed_by(ONE.operator) == TEXT


@pytest.mark.parametrize(
    "settings",
    [
        {"stop.metric": "loss", "stop.at_most": "0.25"},
        {"stop.date": "2031-01-31T18:00:00+00:00", "stop.rounds": "9"},
        {"strategy.name": "fedavgm", "momentum": "0.9", "nesterov": "true", "clip_factor": "0"},
        {"up": "topk64", "warmup_rounds": "5"},
        {"up": "fp16", "down": "fp32", "federation.name": "two words", "rounds.grace_seconds": "0.125"},
    ],
)
def test_every_kind_of_setting_survives_the_file(settings: dict[str, str]) -> None:
    one = tiny(settings=settings)
    again = Federation.parse(one.federation.signed_by(one.operator).encode(), "here.toml")
    assert again == one.federation
    assert again.fingerprint == one.federation.fingerprint != ONE.federation.fingerprint


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("local_steps = 2", "local_steps = 3"),
        ('name = "tiny"', 'name = "Tiny"'),
        ('client_address = "tcp://127.0.0.1:7002"', 'client_address = "tcp://10.0.0.1:7002"'),
        (ONE.federation.members[0].public_key, identity("intruder").public_key.hex()),
        (ONE.federation.brokers[0].curve_key, identity("intruder").curve_public.hex()),
        ("learning_rate = 1.0", "learning_rate = 1.00"),
        ("\n[signature]", "\n\n[signature]"),
    ],
)
def test_a_file_that_was_changed_after_signing_is_refused(old: str, new: str) -> None:
    assert TEXT.count(old) == 1
    refused(TEXT.replace(old, new), "changed after the operator signed")


def test_another_signature_is_refused() -> None:
    intruder = identity("intruder")
    refused(ONE.federation.signed_by(intruder), "changed after the operator signed")
    wrong_domain = ONE.operator.sign("Vote", ONE.federation.text.encode()).signature.hex()
    refused(f'{ONE.federation.text}\n[signature]\nvalue = "{wrong_domain}"\n', "changed after")


def test_a_file_under_another_operator_is_another_federation() -> None:
    intruder = identity("intruder")
    text = TEXT.replace(ONE.operator.public_key.hex(), intruder.public_key.hex())
    text = text[: text.index("\n[signature]")]
    forged = f'{text}\n[signature]\nvalue = "{intruder.sign("federation", text.encode()).signature.hex()}"\n'
    assert Federation.parse(forged.encode(), "here.toml").fingerprint != ONE.federation.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: text.index("\n[signature]")],
        lambda text: text.replace("\n[signature]\n", "\n[signature] \n"),
        lambda text: text.replace('value = "', 'value = "zz'),
        lambda text: text.replace("value = ", "other = "),
        lambda text: text + "more = 1\n",
    ],
    ids=["no table", "other header", "no hex", "other key", "one key more"],
)
def test_a_file_without_a_proper_signature_is_refused(change: Callable[[str], str]) -> None:
    refused(change(TEXT), "carries no operator's signature")


def test_a_signed_file_in_another_form_is_refused() -> None:
    refused(signed_anew("# a comment\n" + ONE.federation.text), "not in canonical form")
    refused(signed_anew(ONE.federation.text.replace("local_steps = 2", "local_steps = +2")), "not in canonical form")


def test_bytes_that_are_no_toml_are_refused() -> None:
    refused(b"\xff\xfe", "not UTF-8")
    refused(TEXT + "= =", "not valid TOML")
    refused("", "missing")


def test_an_unknown_setting_is_named() -> None:
    text = ONE.federation.text.replace("local_steps = 2", "local_steps = 2\nlocal_stepz = 2")
    assert "rounds" in refused(signed_anew(text), "unknown setting `local_stepz`").what
    refused(signed_anew(ONE.federation.text.replace("[limits]", "[limit]\n[limits]")), "unknown setting `limit`")


def test_a_value_of_the_wrong_type_names_its_setting() -> None:
    text = ONE.federation.text.replace("local_steps = 2", 'local_steps = "many"')
    refused(signed_anew(text), r"rounds\.local_steps")
    text = ONE.federation.text.replace('topology = "butterfly"', 'topology = "ring"')
    refused(signed_anew(text), r"federation\.topology")


def test_a_missing_table_or_key_is_named() -> None:
    tables = tomllib.loads(ONE.federation.text)
    assert "operator" in tables
    text = ONE.federation.text.replace("[operator]", "[operators]")
    refused(signed_anew(text), "operator")
    lines = [line for line in ONE.federation.text.splitlines(keepends=True) if not line.startswith("recipe_hash")]
    refused(signed_anew("".join(lines)), "missing.*recipe_hash")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FederationFileError, match=r"nowhere\.toml"):
        Federation.load(tmp_path / "nowhere.toml")
    with pytest.raises(FederationFileError, match="cannot be read"):
        Federation.load(tmp_path)
    large = tmp_path / "large.toml"
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(FederationFileError, match="larger than"):
        Federation.load(large)


def test_nodes_are_found_by_their_ids() -> None:
    federation = ONE.federation
    assert federation.roster == tuple(broker.node_id for broker in ONE.brokers)
    assert set(federation.member_by_id) == {member.node_id for member in ONE.members}
    for node in (*ONE.brokers, *ONE.members, ONE.operator):
        assert federation.public_key(node.node_id) == node.public_key
    stranger = identity("stranger").node_id
    assert federation.public_key(stranger) is None
    assert federation.name_of(ONE.brokers[1].node_id) == "b2"
    assert federation.name_of(ONE.members[3].node_id) == "c4"
    assert federation.name_of(stranger) == stranger[:8]
    assert node_id_of(ONE.operator.public_key) not in (*federation.broker_by_id, *federation.member_by_id)


@pytest.mark.parametrize(("brokers", "majority"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (7, 4)])
def test_a_majority_is_more_than_half(brokers: int, majority: int) -> None:
    assert tiny(brokers=brokers).federation.majority == majority


@pytest.mark.parametrize(
    ("settings", "codecs"),
    [
        ({"up": "int8"}, ["int8"] * 5),
        ({"up": "sign"}, ["sign"] * 5),
        ({"up": "topk64"}, ["int4", "int4", "int4", "topk64", "topk64"]),
        ({"up": "topk64", "warmup_rounds": "0"}, ["topk64"] * 5),
        ({"up": "sign", "warmup_rounds": "1"}, ["int4", "sign", "sign", "sign", "sign"]),
    ],
)
def test_the_codec_of_a_round_follows_from_the_file(settings: dict[str, str], codecs: list[str]) -> None:
    federation = tiny(settings=settings).federation
    assert [federation.codec_up(server_round) for server_round in range(1, 6)] == codecs


def test_an_order_asks_for_steps_times_batches() -> None:
    one = tiny(settings={"local_steps": "3", "micro_batch": "5", "accumulation": "7"})
    assert one.federation.max_examples == 105
