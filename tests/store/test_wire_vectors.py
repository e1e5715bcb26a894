"""docs/wire-vectors.json, read in both directions: what other languages rely on."""

import json
import struct
from binascii import crc_hqx
from typing import Any

import msgspec
import pytest

from mainspring.model.delivery import Body
from mainspring.model.ids import idempotency_key, idh_in_lane, idh_of
from mainspring.model.schedule.chain import ChainState
from mainspring.store import codec
from mainspring.store.keys import Address, Keyspace, Slice, meta_key, partition_of, r_of, score_of, slot_of, tags
from tests.support.paths import ROOT

VECTORS: dict[str, Any] = json.loads((ROOT / "docs" / "wire-vectors.json").read_text(encoding="utf-8"))


def each(part: str, name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", VECTORS[part], ids=lambda row: ascii(row[name])[:40])


@each("crc16", "hex")
def test_partitions_are_chosen_by_the_crc16_of_redis_cluster(row: dict[str, Any]) -> None:
    data = bytes.fromhex(row["hex"])
    assert crc_hqx(data, 0) == row["crc"] == crc16_by_the_book(data)


def crc16_by_the_book(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc


@each("tags", "namespace")
def test_tags_fall_into_even_stripes_of_slots(row: dict[str, Any]) -> None:
    count = row["partitions"]
    assert list(tags(row["namespace"], count)) == row["tags"]
    assert [slot_of(tag) for tag in row["tags"]] == row["slots"]
    for p, slot in enumerate(row["slots"]):
        assert p * 16384 // count <= slot < (p + 1) * 16384 // count


def test_keys_are_spelled_as_documented() -> None:
    spelled = dict(VECTORS["keys"])
    names = Keyspace("main", 8).partitions[0]
    entries, fired, done, cancelled = names.slice_keys("1000.1800000000000")
    assert spelled == {
        "tag": names.tag,
        "meta": meta_key("main"),
        "slices": names.slices,
        "entries": entries,
        "fired": fired,
        "done": done,
        "cancelled": cancelled,
        "index": names.ids,
        "lanes_of_an_id": names.lanes_of(idh_of("order-42")),
        "counters": names.n,
        "wake": names.wake,
        "dead": names.dead,
        "dead_times": names.dead_times,
        "schedules": names.sched,
        "chains": names.next,
        "revisions": names.revisions("nightly"),
    }


@each("partitions_of_names", "name")
def test_a_lane_or_an_id_chooses_its_partition(row: dict[str, Any]) -> None:
    assert partition_of(row["name"], row["partitions"]) == row["partition"]


@each("partitions_of_generated_ids", "idh")
def test_a_generated_id_chooses_its_partition_by_its_raw_bytes(row: dict[str, Any]) -> None:
    assert crc_hqx(bytes.fromhex(row["idh"]), 0) % row["partitions"] == row["partition"]


@each("ids", "id")
def test_an_id_has_its_hash(row: dict[str, Any]) -> None:
    assert idh_of(row["id"]).hex() == row["idh"]


@each("ids_in_lanes", "lane")
def test_an_id_in_a_lane_has_a_hash_of_its_own(row: dict[str, Any]) -> None:
    assert idh_in_lane(idh_of(row["id"]), row["lane"]).hex() == row["idh"]


@each("slices", "name")
def test_a_due_time_has_its_slice_and_its_offset(row: dict[str, Any]) -> None:
    place = Slice.at(row["due_ms"], row["width_ms"])
    assert (place.name, row["due_ms"] - place.start_ms) == (row["name"], row["offset_ms"])
    assert Slice.parse(row["name"]) == place


@each("scores", "score")
def test_a_score_holds_start_and_incarnation_exactly(row: dict[str, Any]) -> None:
    assert repr(score_of(row["start_ms"], row["r"])) == row["score"]
    assert r_of(float(row["score"])) == row["r"]
    assert int(float(row["score"])) == row["start_ms"] // 1000


@each("addresses", "text")
def test_an_address_packs_and_reads_the_same(row: dict[str, Any]) -> None:
    address = Address(row["partition"], Slice.parse(row["slice"]), row["r"], row["index"])
    assert (address.pack().hex(), address.text()) == (row["packed"], row["text"])
    assert Address.unpack(row["partition"], bytes.fromhex(row["packed"])) == address
    assert Address.parse(row["text"]) == address


@each("entries", "says")
def test_an_entry_is_written_as_documented(row: dict[str, Any]) -> None:
    assert codec.entry(row["offset_ms"], row["flags"], bytes.fromhex(row["idh"]), _body(row)).hex() == row["hex"]


@each("entries", "says")
def test_an_entry_is_read_as_documented(row: dict[str, Any]) -> None:
    data = bytes.fromhex(row["hex"])
    assert int.from_bytes(data[:4], "big") == row["offset_ms"]
    assert (data[4], data[5:21].hex()) == (row["flags"], row["idh"])
    body = codec.decode(data)
    assert body == _body(row)
    assert not codec.is_tombstone(data)
    stands = Slice.parse(row["slice"]).start_ms + row["offset_ms"]
    assert (stands if body.due_ms is None else body.due_ms) == row["due_ms"]


@each("entries", "says")
def test_an_entry_can_be_read_with_nothing_but_a_table_of_msgpack(row: dict[str, Any]) -> None:
    fields, rest = unpack(bytes.fromhex(row["hex"])[21:])
    assert rest == b""
    names = (
        "target", "payload", "id", "lane", "due_ms", "original_due_ms", "attempt", "expires_ms", "raw", "errors",
        "retry", "occurrence", "timeout_ms", "lane_in_key", "by",
    )  # fmt: skip
    said = dict(zip(names, fields, strict=False))
    meant = {**row["body"], "payload": bytes.fromhex(row["body"]["payload"])}
    assert said == {name: meant[name] for name in said}
    assert 2 <= len(fields) <= len(names)


def _body(row: dict[str, Any]) -> Body:
    says = row["body"]
    run = tuple(says["occurrence"]) if says.get("occurrence") else None
    return Body(
        **{**says, "payload": bytes.fromhex(says["payload"]), "errors": tuple(says["errors"]), "occurrence": run}
    )


@each("chains", "says")
def test_the_state_of_a_chain_is_written_as_documented(row: dict[str, Any]) -> None:
    data = bytes.fromhex(row["hex"])
    link = ChainState.unpack(data)
    assert (link.generation, link.planned_ms, link.idh.hex()) == (row["generation"], row["planned_ms"], row["idh"])
    assert link.pack() == data
    assert data[:12] == link.claim == struct.pack(">IQ", row["generation"], row["planned_ms"])
    memory = msgspec.msgpack.decode(data[28:])
    if "l" in memory:
        memory["l"] = memory["l"].hex()
    assert memory == row["memory"]


def unpack(data: bytes) -> tuple[Any, bytes]:
    """As much of msgpack as entries need, from its specification."""
    first, rest = data[0], data[1:]
    if first < 0x80:
        return first, rest
    if 0x90 <= first < 0xA0:
        items = []
        for _ in range(first & 15):
            item, rest = unpack(rest)
            items.append(item)
        return items, rest
    if 0xA0 <= first < 0xC0:
        size = first & 31
        return rest[:size].decode(), rest[size:]
    constants = {0xC0: None, 0xC2: False, 0xC3: True}
    if first in constants:
        return constants[first], rest
    if first in (0xCD, 0xCE, 0xCF):
        size = {0xCD: 2, 0xCE: 4, 0xCF: 8}[first]
        return int.from_bytes(rest[:size], "big"), rest[size:]
    wide = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2}[first]
    size, rest = int.from_bytes(rest[:wide], "big"), rest[wide:]
    return (rest[:size] if first < 0xD0 else rest[:size].decode()), rest[size:]


@each("tombstones", "says")
def test_a_tombstone_is_recognised_and_still_proves_which_entry_it_replaced(row: dict[str, Any]) -> None:
    was, stub = bytes.fromhex(row["was"]), bytes.fromhex(row["hex"])
    assert codec.is_tombstone(stub)
    assert codec.header(stub) in (codec.header(was), codec.header(was)[4:8])
    if row["moved_to"] is not None:
        assert stub[4] & codec.FORWARD
        assert stub[codec.HEADER_BYTES :].hex() == row["moved_to"]
        assert codec.forward_mark(was) + bytes.fromhex(row["moved_to"]) == stub


@each("idempotency_keys", "id")
def test_the_idempotency_key_is_safe_in_a_header(row: dict[str, Any]) -> None:
    key = idempotency_key(row["namespace"], row["id"], row["original_due_ms"], row.get("lane"))
    assert key == row["key"]
    assert key.isascii()
    assert key.count("/") == (3 if "lane" in row else 2)


FLAGS = [("INDEXED", 1), ("LANE", 2), ("RESENT", 4), ("TOMBSTONE", 8), ("FORWARD", 16)]


@pytest.mark.parametrize(("name", "value"), FLAGS)
def test_flags_have_their_documented_values(name: str, value: int) -> None:
    assert getattr(codec, name) == value
