"""Sets a release of SGLang up without a GPU and without a model; runs inside the upstream environment.

Of the release: the methods of its encoder and receiver, its batching, its HTTP app, its engine wrapper. Ours: the
constructor of the encoder (it would load a model), preprocessing, and the vision tower. No protocol passes here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import importlib
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from epdlab.upstream.payload import ELEMENT_BYTES, WIDTH, parse, pattern
from epdlab.upstream.recorder import RecordedEngine, Recorder

HOST = "127.0.0.1"
MERGE = 2
"""Patches of one token along each side, as Qwen2-VL has it."""


@dataclass(frozen=True)
class Release:
    """The modules of one release, under the names that stayed while the files moved.

    `server` holds MMEncoder, `front` the HTTP app, `receiver` the receiver classes, `runtime` the batching scheduler.
    """

    version: str
    server: Any
    front: Any
    receiver: Any
    runtime: Any

    @property
    def new_layout(self) -> bool:
        """Whether the code lives in srt/disaggregation/encoder/ (0.5.23)."""
        return self.front is not self.server


@functools.cache
def load(version: str, folder: str) -> Release:
    """Imports the release unpacked in `folder`."""
    os.environ.update(SGLANG_HOST_IP=HOST, HOST_IP=HOST, MOONCAKE_PROTOCOL="tcp", GLOG_minloglevel="3")
    warnings.simplefilter("ignore")
    sys.path.insert(0, folder)
    _declare_torchvision_ops()
    base = "sglang.srt.disaggregation"
    if version.startswith(("0.5.16", "0.5.17")):
        server = front = runtime = importlib.import_module(f"{base}.encode_server")
        receiver = importlib.import_module(f"{base}.encode_receiver")
    else:
        names = ("server", "http_server", "runtime", "receiver")
        server, front, runtime, receiver = (importlib.import_module(f"{base}.encoder.{name}") for name in names)
    logging.disable(logging.CRITICAL)
    return Release(version, server, front, receiver, runtime)


def _declare_torchvision_ops() -> None:
    """PyPI's torchvision is a CUDA build: its operators do not load beside a CPU torch; their schemas are needed."""
    torch = importlib.import_module("torch")
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declare_torchvision_ops.library = library  # type: ignore[attr-defined]


def start_engine(recorder: Recorder) -> Any:
    """The release's shared engine over TCP, with the recorder beneath its wrapper."""
    path = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine"
    wrapper = importlib.import_module(path).init_mooncake_transfer_engine(hostname=HOST, gpu_id=0, ib_device=None)
    wrapper.engine = RecordedEngine(wrapper.engine, recorder)
    return wrapper


def server_args(**more: Any) -> Any:
    """The release's ServerArgs for the mooncake backend on this host; no model is read."""
    made = importlib.import_module("sglang.srt.server_args").ServerArgs
    common = {"model_path": "none", "encoder_transfer_backend": "mooncake", "device": "cpu"}
    return made(**common, host=HOST, port=30000, **more)


def publish(release: Release, args: Any, role: str, rank: int = 0) -> None:
    """Makes `args` the configuration of this process, as the release's launcher would."""
    if release.version.startswith("0.5.16"):
        importlib.import_module("sglang.srt.server_args").set_global_server_args_for_scheduler(args)
        return
    context = importlib.import_module("sglang.srt.runtime_context")
    ranks = {"ranks": context.SpawnRanks(world_rank=rank, gpu_id=0)} if release.new_layout else {}
    context.publish(args, role=role, **ranks)


class Tower:
    """Stands for preprocessing and the vision tower: one seeded embedding for each item.

    Attributes:
        before: called with the address and bytes of the next embedding, once (a scenario's other owner).
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._torch = importlib.import_module("torch")
        self._made: list[weakref.ref[Any]] = []
        self.before: Callable[[int, int], None] | None = None

    def inputs(self, items: list[str], modality: Any) -> dict[str, Any]:
        """What the processor would give: `pixel_values*` of one column, and the patch grid of each item."""
        rows = [parse(item)[0] for item in items]
        grid = self._torch.tensor([[1, MERGE, MERGE * count] for count in rows])
        pixels = self._torch.zeros(MERGE * MERGE * sum(rows), 1)
        if modality.name == "VIDEO":
            return {"pixel_values_videos": pixels, "video_grid_thw": grid}
        return {"pixel_values": pixels, "image_grid_thw": grid}

    def features(self, items: list[str]) -> Any:
        """float32[rows, WIDTH]; the memory of a single item is watched until it is freed."""
        words = [pattern(*parse(item)) for item in items]
        numpy = importlib.import_module("numpy")
        whole = words[0] if len(words) == 1 else numpy.concatenate(words)
        self._made.append(weakref.ref(whole))
        tensor = self._torch.from_numpy(whole.view(numpy.float32)).reshape(-1, WIDTH)
        self._recorder.note("encode", address=tensor.data_ptr(), bytes=tensor.nbytes, rc=None)
        before, self.before = self.before, None
        if before is not None:
            before(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def held(self) -> int:
        """How many embeddings still have their memory."""
        gc.collect()
        self._made = [made for made in self._made if made() is not None]
        return len(self._made)


class AckContext:
    """Stands before the encoder's ZMQ context: notes what each acknowledgement consists of, changes nothing."""

    def __init__(self, context: Any, recorder: Recorder) -> None:
        self._context = context
        self._recorder = recorder

    def socket(self, kind: int) -> AckSocket:
        """A socket of the real context, watched."""
        return AckSocket(self._context.socket(kind), self._recorder)


class AckSocket:
    """A PUSH socket of the encoder, watched."""

    def __init__(self, socket: Any, recorder: Recorder) -> None:
        self._socket = socket
        self._recorder = recorder
        self._endpoint = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def connect(self, endpoint: str) -> None:
        """Remembers whom the acknowledgement is for."""
        self._endpoint = endpoint
        self._socket.connect(endpoint)

    def send_multipart(self, frames: list[Any], **options: Any) -> Any:
        """Notes the frames, then sends them."""
        sizes = [len(frame) for frame in frames]
        port = int(self._endpoint.rpartition(":")[2])
        self._recorder.note("ack", port=port, frames=len(sizes), bytes=sum(sizes), rc=None)
        return self._socket.send_multipart(frames, **options)


def watch_drops(release: Release, recorder: Recorder) -> None:
    """Notes `pop` when the object that carries a request's embedding lets it go, whoever else holds the memory."""
    carrier = release.server.ReqState if release.new_layout else release.receiver.EmbeddingData

    def carried(thing: Any) -> Any:
        if release.new_layout:
            thing = getattr(thing, "embedding_data", None)
        kept = (getattr(thing, name, None) for name in ("embedding", "cached_embedding"))
        return next((tensor for tensor in kept if tensor is not None), None)

    def assign(self: Any, name: str, value: Any) -> None:
        before = carried(self)
        object.__setattr__(self, name, value)
        if before is not None and carried(self) is None:
            recorder.note("pop", address=before.data_ptr(), bytes=before.nbytes, rc=None)

    carrier.__setattr__ = assign


def build_encoder(release: Release, engine: Any, tower: Tower, recorder: Recorder) -> Any:
    """An MMEncoder of the release whose constructor did not run; its attributes are as that would leave them."""
    server = release.server
    args = server_args(encoder_only=True)
    publish(release, args, "encoder")
    encoder = object.__new__(server.MMEncoder)
    zmq = importlib.import_module("zmq")
    asyncio_zmq = importlib.import_module("zmq.asyncio")
    vars(encoder).update(
        server_args=args,
        rank=0,
        dp_rank=0,
        profiler=None,
        model_type="qwen2_vl",
        engine=engine,
        context=asyncio_zmq.Context(2),
        sync_context=AckContext(zmq.Context(), recorder),
        scheduler_send_sockets={},
        scheduler_send_locks={},
        executor=concurrent.futures.ThreadPoolExecutor(max_workers=10),
        mm_cache_lock=asyncio.Lock(),
        send_timeout=server.envs.SGLANG_ENCODER_SEND_TIMEOUT.get(),
        background_tasks=set(),
        encode_dispatch_lock=asyncio.Lock(),
        mm_global_cache=None,
        _embedding_dtype=importlib.import_module("torch").float32,
        _element_size=ELEMENT_BYTES,
        _embedding_dims=dict.fromkeys(server.Modality, WIDTH),
    )
    (_complete_new if release.new_layout else _complete_old)(release, encoder, tower)
    watch_drops(release, recorder)
    gc.freeze()
    return encoder


def _complete_old(release: Release, encoder: Any, tower: Tower) -> None:
    """0.5.16 and 0.5.17: their dictionaries; `_process_mm_items` is ours."""

    async def process(items: list[str], modality: Any, log_metrics: bool = True) -> tuple[dict[str, Any], Any]:
        return tower.inputs(items, modality), lambda _: tower.features(items)

    vars(encoder).update(
        embedding_to_send={},
        _forward_ready_events={},
        _forward_results={},
        _inflight_encode_lock=asyncio.Lock(),
        _inflight_encode_events={},
        _inflight_encode_meta={},
        _inflight_encode_cleanup_tasks={},
        _encode_fn=encoder.encode_with_mooncake,
        image_processor=SimpleNamespace(merge_size=MERGE),
        model_config=None,
        _process_mm_items=process,
    )
    release.server.encoder = encoder


def _complete_new(release: Release, encoder: Any, tower: Tower) -> None:
    """0.5.23: its request states, delivery, runtime; the preprocessor and the model are ours."""
    server, context = release.server, importlib.import_module("sglang.srt.runtime_context")
    result_type = importlib.import_module("sglang.srt.disaggregation.encoder.preprocessor").EncoderPreprocessResult
    pending: list[str] = []

    async def process(requests: list[dict[str, Any]], modality: Any) -> tuple[Any, list[int]]:
        pending[:] = [item for request in requests for item in request["mm_items"]]
        inputs = tower.inputs(pending, modality)
        grid = next(value for name, value in inputs.items() if name.endswith("grid_thw"))
        counts = [parse(item)[0] for item in pending]
        return result_type(mm_inputs=inputs, grid_thw=grid, token_counts=counts), [len(r["mm_items"]) for r in requests]

    def forward(_: Any) -> Any:
        return tower.features(list(pending))

    context.get_parallel().override_permanently(tp_group=SimpleNamespace(world_size=1))
    vars(encoder).update(
        transfer_backend="mooncake",
        use_mooncake=True,
        req_states={},
        abandoned_req_ids=set(),
        delivery=server.MooncakeDelivery(encoder),
        preprocessor=SimpleNamespace(
            process_batch_mm_items=process,
            supports_modality=lambda _: True,
            get_num_patches=lambda grid, _: int(grid[0] * grid[1] * grid[2]),
        ),
        model=SimpleNamespace(get_image_feature=forward, get_video_feature=forward),
    )
    server.meta_registry.on_release = encoder.release_request
    scheduler = release.runtime.EncoderScheduler(encoder, send_sockets=[], max_batch_size=server.ENCODER_MAX_BATCH_SIZE)
    release.front.encoder, release.front.encoder_scheduler = encoder, scheduler
    release.front.local_runtime = release.runtime.EncoderRuntime(
        encoder=encoder, scheduler=scheduler, send_sockets=[], zmq_context=None, tp_processes=[]
    )


def set_send_timeout(release: Release, encoder: Any, seconds: float) -> None:
    """The age at which the release's clean-up timer takes an unreleased request."""
    encoder.send_timeout = seconds
    if release.new_layout:
        release.server.meta_registry.sweep_timeout = seconds


def set_global_cache(release: Release, encoder: Any, on: bool) -> None:
    """0.5.23: the path of cached embeddings; look-up and assembly, which need CUDA, are ours, staging and /send not."""
    if not release.new_layout:
        raise ValueError("the global cache is played for 0.5.23 only")

    async def assemble(ctx: Any, *, keep_on_gpu: bool) -> Any:
        return ctx.get_feature_fn(None)

    encoder.mm_global_cache = object() if on else None
    encoder._calculate_hashes_from_features = lambda *_: [0]
    encoder._compute_global_cache_embedding = assemble


def cleaned_up(release: Release, encoder: Any, request: str, done: bool) -> bool:
    """Whether the release has begun to clean `request` up (`done`: whether it is through), or never knew it."""
    if not release.new_layout:
        return request not in encoder.embedding_to_send
    state = encoder.req_states.get(request)
    return state is None or (state.release_requested and not done)
