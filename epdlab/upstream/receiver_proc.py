"""One receiving rank of a release: its real MMReceiverHTTP and waiting requests; runs inside the upstream environment.

Argument: JSON, see `Wanted`. It reads one JSON line per command and answers with one. The release's code decodes the
acknowledgements here, in the release's own process.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from epdlab.upstream import stage
from epdlab.upstream.payload import WIDTH, pattern
from epdlab.upstream.recorder import Recorder

TICK_S = 0.002
ALONE_S = 6.0
"""How long a rank that is alone runs for a request; ranks of a group run in step, until the release ends it."""


@dataclass(frozen=True)
class Wanted:
    """What to set up: the release, the rank of how many, a file for the gloo store, the encoder, pool and deadlines."""

    version: str
    folder: str
    rank: int
    tp: int
    store: str
    url: str
    pool_mib: int
    wait_timeout: float
    http_timeout: float


class CpuTorch:
    """`torch` as the receiver module sees it: a landing buffer asked for on the GPU comes from the host."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, *shape: Any, device: Any = None, **options: Any) -> Any:
        """`torch.empty` on the CPU."""
        return self._torch.empty(*shape, device="cpu", **options)


class Processor:
    """Stands for the model's processor: gives back the embedding it is handed."""

    prefer_tokenized_input = False

    def get_mm_data(self, prompt: Any, embedding: Any, **more: Any) -> Any:
        """The embedding, in a shape the release can go on with."""
        return MultimodalInputs(embedding)

    get_validated_mm_data = get_mm_data


class MultimodalInputs:
    """What the release hands to the scheduler; its end of life gives the landing slot back."""

    def __init__(self, embedding: Any) -> None:
        self.embedding = embedding
        self.input_ids = [1, 2, 3]
        self.mm_items: list[Any] = []


class Rank:
    """One receiver, its requests and what became of them."""

    def __init__(self, wanted: Wanted) -> None:
        os.environ.update(
            SGLANG_EMBEDDING_POOL_SIZE_MB=str(wanted.pool_mib),
            SGLANG_ENCODER_RECV_TIMEOUT=str(wanted.wait_timeout),
            SGLANG_ENCODER_HTTP_TIMEOUT=str(wanted.http_timeout),
        )
        self._wanted = wanted
        self._release = stage.load(wanted.version, wanted.folder)
        self._torch = importlib.import_module("torch")
        self.recorder = Recorder()
        self.acks: list[dict[str, Any]] = []
        self._release.receiver.torch = CpuTorch(self._torch)
        self._watch_acks()
        self.engine = stage.start_engine(self.recorder)
        self._receiver = self._build()
        self._new: list[Any] = []
        self._ready: dict[str, Any] = {}
        self._given_up: dict[str, str] = {}

    def _build(self) -> Any:
        """The release's MMReceiverHTTP through its own constructor."""
        wanted, release = self._wanted, self._release
        group = self._join_group()
        args = stage.server_args(language_only=True, encoder_urls=[wanted.url])
        stage.publish(release, args, "scheduler", wanted.rank if wanted.tp == 1 else 0)
        scheduler = SimpleNamespace(ps=SimpleNamespace(gpu_id=0))
        if release.new_layout:
            parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
            parallel.override_permanently(tp_group=group)
            made = release.receiver.MMReceiverHTTP(args, dtype=self._torch.float32, scheduler=scheduler)
            made.tp_rank = wanted.rank
        else:
            made = release.receiver.MMReceiverHTTP(
                args, dtype=self._torch.float32, tp_rank=wanted.rank, tp_group=group, scheduler=scheduler
            )
        made.tp_size, made.mm_processor, made.create_req = wanted.tp, Processor(), lambda request: request
        return made

    def _join_group(self) -> Any:
        """A gloo group of all ranks, in the shape of the release's group coordinator."""
        distributed = self._torch.distributed
        store = f"file://{self._wanted.store}"
        distributed.init_process_group("gloo", init_method=store, rank=self._wanted.rank, world_size=self._wanted.tp)

        def gather(thing: Any) -> list[Any]:
            out: list[Any] = [None] * self._wanted.tp
            distributed.all_gather_object(out, thing)
            return out

        return SimpleNamespace(cpu_group=distributed.group.WORLD, all_gather_object=gather)

    def _watch_acks(self) -> None:
        """Notes what each acknowledgement holds once the release's own loader has read it."""
        module = self._release.receiver
        load: Callable[[Any], Any] = module.safe_pickle_loads

        def watched(frame: Any) -> Any:
            thing = load(frame)
            size = len(frame) if isinstance(frame, bytes | bytearray) else len(memoryview(frame))
            fields = {name: _described(value) for name, value in vars(thing).items()}
            self.acks.append({"frame_bytes": size, "class": type(thing).__name__, "fields": fields})
            return thing

        module.safe_pickle_loads = watched

    def ask(self, request: str, items: list[str], parts: list[int]) -> dict[str, Any]:
        """`request` reaches this rank's scheduler, which runs one tick; in 0.5.23 rank 0 is the tokenizer, too."""
        modality = self._release.receiver.Modality.IMAGE
        urls = [self._wanted.url] * len(parts)
        self._new.append(self._tokenized(request, items, {modality: parts}, urls))
        if self._release.new_layout and self._wanted.rank == 0:
            data = [{"url": item, "modality": modality} for item in items]
            words = {"num_items_assigned": {modality: parts}, "encode_urls": urls}
            coroutine = self._receiver.encode(request, data, None, "encode", **words)
            threading.Thread(target=asyncio.run, args=(coroutine,), daemon=True).start()
        self._tick()
        return {}

    def _tokenized(self, request: str, items: list[str], assigned: dict[Any, list[int]], urls: list[str]) -> Any:
        """The release's TokenizedGenerateReqInput, as its tokenizer manager sends it."""
        io_struct = importlib.import_module("sglang.srt.managers.io_struct")
        sampling = importlib.import_module("sglang.srt.sampling.sampling_params").SamplingParams()
        nothing = dict.fromkeys(("input_ids", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
        old = (
            {}
            if self._release.new_layout
            else {"mm_data_mooncake": [{"url": item, "modality": next(iter(assigned))} for item in items]}
        )
        return io_struct.TokenizedGenerateReqInput(
            rid=request,
            input_text="x",
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            stream=False,
            need_wait_for_mm_inputs=True,
            num_items_assigned=assigned,
            encoder_urls=urls,
            **nothing,
            **old,
        )

    def run(self, request: str) -> dict[str, Any]:
        """Runs the release's scheduler tick until `request` is ready or given up; a single rank stops after ALONE_S."""
        deadline = time.monotonic() + ALONE_S
        while request not in self._ready and request not in self._given_up:
            self._tick()
            if self._wanted.tp == 1 and time.monotonic() > deadline:
                return {"state": "waiting"}
            time.sleep(TICK_S)
        return {"state": "ready" if request in self._ready else "given up"}

    def _tick(self) -> None:
        fresh, self._new = self._new, []
        done, aborted = self._receiver.process_waiting_requests(fresh)
        self._ready.update({request.rid: request for request in done})
        self._given_up.update({entry[0].rid: str(entry[1]) for entry in aborted})

    def look(self, request: str, rows: int, seeds: list[int]) -> dict[str, Any]:
        """Whether `request` is ready, and holds the embeddings of `seeds`, `rows` rows each."""
        if request not in self._ready:
            return {"ready": False, "right": False}
        numpy = importlib.import_module("numpy")
        (embedding,) = self._ready[request].mm_inputs.embedding.values()
        want = numpy.concatenate([pattern(rows, seed) for seed in seeds])
        have = embedding.reshape(-1).numpy().view(numpy.uint32)
        shape = tuple(embedding.shape) == (rows * len(seeds), WIDTH)
        return {"ready": True, "right": shape and bool(numpy.array_equal(have, want))}

    def take(self) -> dict[str, Any]:
        """Events and acknowledgements so far."""
        pool = self._receiver.embedding_pool
        slots = None if pool is None else len(pool._inflight)
        return {"events": self.recorder.take(), "acks": self.acks, "slots": slots}


def _described(value: Any) -> Any:
    """A field of an acknowledgement: plain values as they are, everything else by its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list) and all(isinstance(entry, int) for entry in value):
        return value
    return f"<{type(value).__name__}>"


def main() -> None:
    """Answers one command a line until standard input closes."""
    rank = Rank(Wanted(**json.loads(sys.argv[1])))
    ports = {"session": str(rank.engine.session_id)}
    print(json.dumps(ports), flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        answer = getattr(rank, words.pop("do"))(**words)
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
