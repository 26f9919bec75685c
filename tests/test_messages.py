"""The wire: fields as upstream names them, versions, and bytes from anyone, which are refused and never run."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pickle  # noqa: TID251  # the attack, not the tool: nothing in the package may import it
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from handoff_world import encode_request, send_request
from hypothesis import given
from hypothesis import strategies as st

import epdlab
from epdlab.errors import MetadataMismatch
from epdlab.messages import (
    MAX_BODY_BYTES,
    MAX_FRAME_BYTES,
    VERSION,
    Ack,
    EncodeReply,
    EncodeRequest,
    ErrorReply,
    SendReply,
    SendRequest,
    from_frame,
    from_json,
    part_id,
    to_frame,
    to_json,
)
from epdlab.modality import Modality

ACK = Ack(
    req_id="q", part_idx=1, num_parts=2, modality=Modality.VIDEO, shape=(3, 4), dtype="float32", nbytes=48, digest="00"
)
REPLY = EncodeReply(
    req_id="q",
    encoder_idx=0,
    num_parts=1,
    part_idx=0,
    modality=Modality.IMAGE,
    embedding_size=64,
    embedding_len=4,
    embedding_dim=4,
    dtype="float32",
    grid=[(1, 2, 2)],
)
BODIES = [encode_request(), send_request(), REPLY, SendReply(req_id="q", part_idx=0), ErrorReply(kind="k", message="m")]
ENCODE_FIELDS = {"encoder_idx", "mm_items", "num_parts", "part_idx", "req_id", "modality", "prefill_host"}
SEND_FIELDS = {"req_id", "prefill_host", "embedding_port", "receive_count", "session_id", "buffer_address"}
REPLY_FIELDS = {"embedding_size", "embedding_len", "embedding_dim"}
DEEP = 20_000


def packed(**fields: Any) -> bytes:
    """An ack's frame with fields replaced, whether or not they make sense; None takes the field away."""
    whole = msgspec.to_builtins(ACK) | fields
    return msgspec.msgpack.encode({name: value for name, value in whole.items() if value is not None})


# ---- what is right ---------------------------------------------------------------------------------------------------


def test_an_ack_comes_back_as_it_was() -> None:
    assert from_frame(to_frame(ACK)) == ACK


@pytest.mark.parametrize("message", BODIES, ids=lambda message: type(message).__name__)
def test_a_body_comes_back_as_it_was(message: msgspec.Struct) -> None:
    assert from_json(to_json(message), type(message)) == message


def test_fields_bear_upstreams_names() -> None:
    encode, send, reply = (set(json.loads(to_json(message))) for message in BODIES[:3])
    assert ENCODE_FIELDS | {"embedding_port", "receive_count"} <= encode
    assert SEND_FIELDS | {"part_idx", "num_parts", "modality", "embedding_size"} <= send
    assert REPLY_FIELDS | (ENCODE_FIELDS - {"mm_items", "prefill_host"}) <= reply


def test_an_acks_frame_carries_no_embedding() -> None:
    large = msgspec.structs.replace(ACK, shape=(1 << 20, 8192), nbytes=1 << 35)
    assert len(to_frame(large)) < 256


def test_part_ids_differ_by_request_and_part() -> None:
    ids = {part_id(req, part) for req in ("a", "b", "a/part1") for part in (0, 1, 11)}
    assert len(ids) == 9


# ---- what is not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00",
        b"{}",
        b"\xc1",
        to_frame(ACK)[:-1],
        to_frame(ACK) + b"\x00",
        packed(type="hello"),
        packed(part_idx="1"),
        packed(part_idx=1.5),
        packed(part_idx=None),
        packed(modality="SMELL"),
        packed(shape=[1]),
        packed(shape=[1, 2, 3]),
        packed(nbytes=2**70 / 3),
        packed(req_id=b"\xff"),
        to_frame(ACK).replace(b"float32", b"floa\xff32"),
        b"\x82\xa4type\xa3ack\xa4more" + b"\x91" * DEEP + b"\xc0",
        b"\x91" * DEEP + b"\xc0",
    ],
)
def test_a_frame_that_is_no_ack(frame: bytes) -> None:
    with pytest.raises(MetadataMismatch, match="no ack"):
        from_frame(frame)


@pytest.mark.parametrize("version", [VERSION + 1, 0, -1])
def test_another_version(version: int) -> None:
    with pytest.raises(MetadataMismatch, match=f"version {version}, ours is {VERSION}"):
        from_frame(packed(v=version))
    with pytest.raises(MetadataMismatch, match=f"version {version}, ours is {VERSION}"):
        from_json(to_json(encode_request(v=version)), EncodeRequest)


def test_an_oversize_frame_is_refused_before_it_is_read() -> None:
    with pytest.raises(MetadataMismatch, match="carries no embedding"):
        from_frame(bytes(MAX_FRAME_BYTES + 1))
    large = msgspec.structs.replace(ACK, req_id="q" * MAX_FRAME_BYTES)
    with pytest.raises(MetadataMismatch, match="carries no embedding"):
        from_frame(to_frame(large))


def test_an_oversize_body() -> None:
    with pytest.raises(MetadataMismatch, match="by reference"):
        from_json(bytes(MAX_BODY_BYTES + 1), EncodeRequest)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"req_id": "q"}',
        to_json(encode_request()).replace(b'"part_idx":0', b'"part_idx":"0"'),
        to_json(encode_request()).replace(b"IMAGE", b"SMELL"),
        to_json(encode_request())[:-1],
        b'{"more":' + b"[" * DEEP + b"]" * DEEP + b"}",
        b'{"a":' * DEEP,
    ],
)
@pytest.mark.parametrize("kind", [EncodeRequest, SendRequest])
def test_a_body_that_is_no_request(body: bytes, kind: type[msgspec.Struct]) -> None:
    with pytest.raises(MetadataMismatch, match=f"no {kind.__name__}"):
        from_json(body, kind)


@given(st.binary(max_size=512))
def test_any_bytes_are_an_ack_or_refused(frame: bytes) -> None:
    _only_refused(from_frame, frame)


@given(st.data())
def test_an_ack_with_a_few_bytes_changed_is_an_ack_or_refused(data: st.DataObject) -> None:
    frame = bytearray(to_frame(ACK))
    for at in data.draw(st.lists(st.integers(0, len(frame) - 1), min_size=1, max_size=4)):
        frame[at] = data.draw(st.integers(0, 255))
    _only_refused(from_frame, bytes(frame))


def _only_refused(decode: Callable[[bytes], object], frame: bytes) -> None:
    with contextlib.suppress(MetadataMismatch):
        assert isinstance(decode(frame), Ack)


# ---- nothing runs ----------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling this makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (self.path,)


def test_a_pickle_is_refused_and_never_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        payload = pickle.dumps(Bomb(str(mark)), protocol)
        with pytest.raises(MetadataMismatch):
            from_frame(payload)
        with pytest.raises(MetadataMismatch):
            from_json(payload, SendRequest)
        with pytest.raises(MetadataMismatch):
            from_frame(packed(req_id=payload))
    assert not mark.exists()
    pickle.loads(payload)  # noqa: S301  # the payload does what it says where one unpickles it
    assert mark.is_dir()


def test_nothing_in_the_package_can_unpickle() -> None:
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    found = []
    for source in Path(epdlab.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [node.attr] if isinstance(node, ast.Attribute) else []
            found += [(source.name, name) for name in names if name in banned | {"recv_pyobj", "send_pyobj"}]
    assert found == []


@pytest.mark.parametrize(
    ("request_", "wrong"),
    [
        (request_, wrong)
        for request_ in (encode_request(), send_request())
        for wrong in (
            {"num_parts": 0},
            {"num_parts": 10**9},
            {"part_idx": -1},
            {"part_idx": 7, "num_parts": 7},
            {"embedding_port": 0},
            {"embedding_port": 65536},
            {"receive_count": 0},
            {"receive_count": 10**6},
            {"tp_rank": -1},
            {"req_id": ""},
            {"req_id": "x" * 257},
            {"what_is_this": 1},
        )
    ]
    + [(encode_request(), {"mm_items": []}), (encode_request(), {"encoder_idx": -1})]
    + [(send_request(), {name: value}) for name in ("buffer_address", "embedding_size") for value in (0, -1, 1 << 64)],
)
def test_a_request_with_a_number_that_cannot_be_is_refused(request_: msgspec.Struct, wrong: dict[str, Any]) -> None:
    body = json.loads(to_json(request_)) | wrong
    with pytest.raises(MetadataMismatch, match=next(iter(wrong))):
        from_json(json.dumps(body).encode(), type(request_))
