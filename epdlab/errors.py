"""The error tree: one class per kind of failure. Every message is one line that names the mend.

    EpdLabError
    ├── UsageError             what was asked for cannot be done (exit code 2)
    │   ├── MediaError         an image or video was refused
    │   │   └── MediaNotFound, MediaForbidden, MediaTooLarge, MediaUnsupported, MediaFetchFailed (`media`)
    │   └── PromptError (`vlm`), TraceTooLarge (`trace.render`)
    ├── EngineError            Mooncake answered with a code, see `engine.CODES`
    │   └── RegistrationRefused, DeregistrationRefused, TransferFailed, EngineNotReady, BadBuffer
    ├── SourceUncovered        the RDMA guard: a write without a live source region (strict mode)
    ├── HandoffError           a request failed, with the reason
    │   └── LostEmbedding, EncodeFailed, DeadlineExceeded, LandingFull, MetadataMismatch, PeerLost
    ├── ModelError             a checkpoint cannot be loaded (`checkpoint`)
    ├── StoreUnavailable       no Mooncake Store answers (`store_client`)
    ├── DotMissing, DrawingFailed   a diagram cannot be drawn (`trace.render`)
    ├── StateError             a lifecycle was asked for a transition it does not have
    ├── StepFault              a fault was injected at a step
    └── LabError               a process of the lab did not start, answer or end
        └── MasterFailed (`master`)
"""

from __future__ import annotations


class EpdLabError(Exception):
    """Base of every error raised on purpose.

    Attributes:
        kind: a stable word for JSON, traces and the wire.
        http_status: what an HTTP front answers when the error leaves a handler.
    """

    kind = "error"
    http_status = 500


class UsageError(EpdLabError):
    """The caller asked for something that cannot be done; the message names what can."""

    kind = "usage"
    http_status = 400


class MediaError(UsageError):
    """An image or video reference was refused: missing, too large, of a wrong type, or not allowed."""

    kind = "media"


class EngineError(EpdLabError):
    """The transfer engine answered with a non-zero code (kept in `code`)."""

    kind = "engine"

    def __init__(self, message: str, code: int = -1) -> None:
        super().__init__(message)
        self.code = code


class RegistrationRefused(EngineError):
    """register_memory did not answer 0."""

    kind = "registration_refused"


class DeregistrationRefused(EngineError):
    """unregister_memory did not answer 0."""

    kind = "deregistration_refused"


class TransferFailed(EngineError):
    """A one-sided write answered a negative status."""

    kind = "transfer_failed"


class EngineNotReady(EngineError):
    """An engine call before initialize or after close (Mooncake itself would crash the process)."""

    kind = "engine_not_ready"


class BadBuffer(EngineError):
    """A buffer the engine cannot use: empty, negative length, freed, or not contiguous."""

    kind = "bad_buffer"


class SourceUncovered(EpdLabError):
    """A write's source is not covered by one live registration: an RDMA NIC would reject it."""

    kind = "source_uncovered"


class HandoffError(EpdLabError):
    """A request failed on its way from encoder to prefill."""

    kind = "handoff"


class LostEmbedding(HandoffError):
    """A rank asked for a part whose embedding is gone."""

    kind = "lost_embedding"
    http_status = 404


class EncodeFailed(HandoffError):
    """The encoder could not make the embedding."""

    kind = "encode_failed"


class DeadlineExceeded(HandoffError):
    """The request did not end before its deadline."""

    kind = "deadline"
    http_status = 504


class LandingFull(HandoffError):
    """No landing memory came free in time."""

    kind = "landing_full"
    http_status = 503


class MetadataMismatch(HandoffError):
    """A message does not describe what was asked for, or is none of ours."""

    kind = "metadata_mismatch"
    http_status = 400


class PeerLost(HandoffError):
    """The process at the other end is gone."""

    kind = "peer_lost"
    http_status = 503


class StateError(EpdLabError):
    """A lifecycle was asked for a transition it does not have."""

    kind = "state"


class StepFault(EpdLabError):
    """A fault injected at a step that has no failure code of its own."""

    kind = "step_fault"


class LabError(EpdLabError):
    """A process of the lab did not start, did not answer, or ended by itself."""

    kind = "lab"


def error_of(kind: str, message: str, otherwise: type[EpdLabError] = HandoffError) -> EpdLabError:
    """The error a peer reported, as the same type it was raised with there."""
    kinds = {found.kind: found for found in _subclasses(EpdLabError)}
    found = kinds.get(kind)
    return found(message) if found is not None else otherwise(f"{kind}: {message}")


def _subclasses(base: type[EpdLabError]) -> list[type[EpdLabError]]:
    return [base, *(found for sub in base.__subclasses__() for found in _subclasses(sub))]


def one_line(error: BaseException) -> str:
    """`kind: message` on one line, for stderr, the wire and traces."""
    kind = getattr(error, "kind", type(error).__name__)
    return f"{kind}: {' '.join(str(error).split())}" if str(error) else kind
