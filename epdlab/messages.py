"""What goes over the wire: versioned msgspec structs, and the codec that refuses everything else.

/encode and /send are JSON over HTTP with upstream's field names (SGLang 0.5.17 encode_receiver.py,
`_send_encode_and_rdma_request`). The ack is one msgpack frame and carries no embedding. No pickle.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from .errors import MetadataMismatch
from .modality import Modality

VERSION = 1
MAX_FRAME_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_PARTS = MAX_RANKS = 4096

ReqId = Annotated[str, Meta(min_length=1, max_length=256)]
Parts = Annotated[int, Meta(ge=1, le=MAX_PARTS)]
PartIndex = Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Positive = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


def part_id(req_id: str, part_idx: int) -> str:
    """The id under which an encoder keeps one part of a request."""
    return f"{req_id}/part{part_idx}"


class EncodeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /encode: make the embedding of one part.

    Attributes:
        mm_items: item references (path, data: URI, http(s) URL).
        num_parts, part_idx: how many parts the request has, and which this is.
        prefill_host, embedding_port: where the ack goes.
        receive_count: how many TP ranks will /send this part.
        tp_rank: which rank asks (for the trace; upstream has no such field).
    """

    req_id: ReqId
    encoder_idx: PartIndex
    mm_items: Annotated[list[str], Meta(min_length=1)]
    num_parts: Parts
    part_idx: PartIndex
    modality: Modality
    prefill_host: str
    embedding_port: Port
    receive_count: Ranks | None = None
    tp_rank: Rank = 0
    v: int = VERSION

    def __post_init__(self) -> None:
        _check_part(self.part_idx, self.num_parts)


class EncodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to /encode: where to send, and how large the embedding will be.

    Attributes:
        embedding_size: bytes; embedding_len: tokens; embedding_dim: columns.
        grid: one (t, h, w) patch grid per item.
        dtype: torch's name, such as `float32`.
    """

    req_id: str
    encoder_idx: int
    num_parts: int
    part_idx: int
    modality: Modality
    embedding_size: int
    embedding_len: int
    embedding_dim: int
    dtype: str
    grid: list[tuple[int, int, int]]
    v: int = VERSION


class SendRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /send: write one part's embedding to `buffer_address` at `session_id`, then ack."""

    req_id: ReqId
    part_idx: PartIndex
    num_parts: Parts
    modality: Modality
    prefill_host: str
    embedding_port: Port
    session_id: str
    buffer_address: Positive
    embedding_size: Positive
    receive_count: Ranks | None = None
    tp_rank: Rank = 0
    v: int = VERSION

    def __post_init__(self) -> None:
        _check_part(self.part_idx, self.num_parts)


class SendReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to /send once the write has ended and the ack is pushed."""

    req_id: str
    part_idx: int
    v: int = VERSION


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag="ack"):
    """EmbeddingData without the embedding: pushed to the rank after the write.

    Attributes:
        shape: [tokens, dim]; nbytes: bytes written; digest: checksum of the source, if the encoder keeps one.
        error: `kind: message` if the encoder failed; then the other fields describe nothing.
    """

    req_id: str
    part_idx: int
    num_parts: int
    modality: Modality
    shape: tuple[int, int]
    dtype: str
    nbytes: int
    grid: list[tuple[int, int, int]] = []
    digest: str | None = None
    error: str | None = None
    v: int = VERSION


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every HTTP answer that is not 200."""

    kind: str
    message: str
    status: str = "error"
    req_id: str | None = None
    v: int = VERSION


M = TypeVar("M", bound=msgspec.Struct)
_to_json = msgspec.json.Encoder()
_to_frame = msgspec.msgpack.Encoder()
_frame_decoder = msgspec.msgpack.Decoder(Ack)


def to_json(message: msgspec.Struct) -> bytes:
    """An HTTP body."""
    return _to_json.encode(message)


def from_json(body: bytes, kind: type[M]) -> M:
    """Decode an HTTP body.

    Raises:
        MetadataMismatch: not JSON, a field missing or of a wrong type, or another protocol version.
    """
    if len(body) > MAX_BODY_BYTES:
        raise MetadataMismatch(f"body of {len(body)} bytes is over {MAX_BODY_BYTES}; send items by reference")
    try:
        message = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MetadataMismatch(f"no {kind.__name__}: {error}; check the sender's version") from None
    return _of_our_version(message)


def to_frame(ack: Ack) -> bytes:
    """One ZMQ frame."""
    return _to_frame.encode(ack)


def from_frame(frame: bytes) -> Ack:
    """Decode one ack frame.

    Raises:
        MetadataMismatch: oversize, garbage, a wrong type, or another protocol version.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise MetadataMismatch(f"frame of {len(frame)} bytes is over {MAX_FRAME_BYTES}; an ack carries no embedding")
    try:
        ack = _frame_decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MetadataMismatch(f"no ack: {error}; is the peer an epdlab encoder?") from None
    return _of_our_version(ack)


def _check_part(part_idx: int, num_parts: int) -> None:
    if part_idx >= num_parts:
        raise ValueError(f"part_idx {part_idx} of num_parts {num_parts}")


def _of_our_version(message: M) -> M:
    version = getattr(message, "v", None)
    if version != VERSION:
        raise MetadataMismatch(f"protocol version {version}, ours is {VERSION}; run one epdlab release on all hosts")
    return message
