"""The embedding cache over a real Mooncake Store: what it saves, and that no failure costs more than a forward."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from store_world import KIB, MASTER_FLAGS, MIB, CountingTower, Encoder, Hook, World, encoders, plain, raw, until

from epdlab.cached_tower import CachedTower
from epdlab.child import Child, started_line
from epdlab.donor import Donor
from epdlab.engine import TensorBuffer
from epdlab.errors import BadBuffer, LabError, UsageError
from epdlab.labels import REQUEST_LABELS
from epdlab.master import MooncakeMaster
from epdlab.media import MediaPolicy
from epdlab.modality import Modality
from epdlab.steps import Decision, Steps
from epdlab.store import CacheConfig, EmbeddingCache
from epdlab.store_client import Outcome, StoreClient, StoreConfig, StoreUnavailable
from epdlab.store_object import cache_key
from epdlab.tower import SyntheticTower, VlmTower
from epdlab.vlm import load_vlm


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """For every test that breaks neither master nor donor. Keys differ by their seeds."""
    world = World(tmp_path_factory.mktemp("store"))
    asyncio.run(world.start(128 * MIB, clients=3))
    yield world
    asyncio.run(world.stop())


@pytest.fixture
async def master(tmp_path: Path) -> AsyncIterator[MooncakeMaster]:
    """A master of one's own."""
    async with MooncakeMaster(tmp_path / "master.log", flags=MASTER_FLAGS) as own:
        yield own


@pytest.fixture
async def donor(master: MooncakeMaster, tmp_path: Path) -> AsyncIterator[Donor]:
    """A donor of one's own at the master of one's own."""
    async with Donor(master.address, 32 * MIB, tmp_path / "donor.log") as own:
        yield own


# ---- what it saves ---------------------------------------------------------------------------------------------------


async def test_a_miss_is_computed_once_and_then_found_here_and_by_others(world: World) -> None:
    async with world.encoder() as first, world.encoder() as second:
        for _ in range(2):
            assert await first.right("bytes:300000:100")
        await first.settled()
        for _ in range(2):
            assert await second.right("bytes:300000:100")
    assert (first.computed, first.counts) == ([100], {"miss": 1, "local_hit": 1})
    assert (second.computed, second.counts) == ([], {"global_hit": 1, "local_hit": 1})


async def test_the_real_vision_tower_gives_the_same_bits_from_the_cache(world: World, tmp_path: Path) -> None:
    images = []
    for number, side in enumerate((56, 84)):
        images.append(str(tmp_path / f"{number}.png"))
        Image.radial_gradient("L").resize((side, side)).convert("RGB").rotate(90 * number).save(images[-1])
    inner = VlmTower(load_vlm("tiny", "cpu", "encoder"), MediaPolicy(allowed_root=tmp_path))
    prepared = await inner.prepare(images, Modality.IMAGE)
    [wanted] = await inner.forward([prepared])
    async with world.encoder() as first, world.encoder() as second:
        for enc in (first, second):
            enc.tower.inner = inner
            [made] = await enc.tower.forward([prepared])
            assert isinstance(made, TensorBuffer)
            assert isinstance(wanted, TensorBuffer)
            assert torch.equal(made.tensor, wanted.tensor)
            await enc.settled()
    assert (first.counts, second.counts) == ({"miss": 2}, {"global_hit": 2})


async def test_one_request_with_hits_and_misses_makes_one_lookup_one_get_one_forward(world: World) -> None:
    hits = ["bytes:70000:110", "bytes:1000:111"]
    async with world.encoder() as first, world.encoder() as second:
        await first.embed(*hits)
        await first.settled()
        second.events.clear()
        REQUEST_LABELS.set({"req": "r1", "part": 2})
        assert await second.right(hits[0], "bytes:5000:112", hits[1], "bytes:64:113")
        await second.settled()
        assert second.inner.forwards == [[112, 113]]
        assert {(event.req, event.part) for event in second.events} == {("r1", 2)}
        begun = [event.step for event in second.events if event.phase == "begin"]
        assert [begun.count(f"cache.{step}") for step in ("lookup", "get", "put")] == [1, 1, 1]
        assert [event.bytes for event in second.steps_of("cache.get")] == [71000 + 2 * 64]
    assert second.counts == {"miss": 2, "global_hit": 2}


async def test_a_batch_of_requests_is_one_forward_over_all_their_misses(world: World) -> None:
    async with world.encoder() as enc:
        await enc.embed("bytes:9000:120")
        batch = [["bytes:9000:120"], ["bytes:800:121", "bytes:9000:120"], ["bytes:700:122"]]
        prepared = [await enc.tower.prepare(items, Modality.IMAGE) for items in batch]
        buffers = await enc.tower.forward(prepared)
        assert [raw(buffer) for buffer in buffers] == [await plain(*items) for items in batch]
    assert enc.inner.forwards == [[120], [121, 122]]


async def test_two_requests_for_one_image_share_one_get(world: World) -> None:
    async with world.encoder() as first:
        await first.embed("bytes:200000:130")
        await first.settled()
        gate = Hook("cache.get", lambda: until(lambda: len(second.steps_of("cache.lookup", "end")) == 2))
        async with world.encoder(gate=gate) as second:
            assert await asyncio.gather(*(second.right("bytes:200000:130") for _ in range(2))) == [True, True]
            assert len(second.steps_of("cache.get")) == 1
    assert (second.computed, second.counts) == ([], {"global_hit": 1, "local_hit": 1})


async def test_models_never_mix(world: World) -> None:
    async with world.encoder(model="a") as first, world.encoder(model="b") as other:
        await first.embed("bytes:4096:140")
        await first.settled()
        await other.embed("bytes:4096:140")
    assert other.counts == {"miss": 1}


async def test_without_a_store_the_cache_is_local() -> None:
    cache = EmbeddingCache(Steps("enc"), None, CacheConfig(pool_bytes=MIB, page_bytes=64 * KIB))
    await cache.open()
    enc = Encoder(CachedTower(inner := CountingTower(), cache), inner, [])
    assert [await enc.right("bytes:100000:1") for _ in range(2)] == [True, True]
    assert enc.counts == {"miss": 1, "local_hit": 1}
    await cache.close()


# ---- the pool --------------------------------------------------------------------------------------------------------


async def test_eviction_under_pressure_never_mixes_bytes(world: World) -> None:
    items = [f"bytes:{40000 + 30000 * (seed % 3)}:{seed}" for seed in range(150, 162)]
    async with world.encoder(pool=512 * KIB) as enc:
        for _ in range(2):
            for pair in itertools.pairwise(items):
                assert await enc.right(*pair)
        await enc.settled()
        pool = enc.tower.cache.pool
        assert sum(entry.pages for entry in pool.entries) + pool.free_pages == pool.pages == 8
        assert enc.counts["evicted"] > 10
        assert enc.counts["global_hit"] > 0
    assert sum(enc.counts[word] for word in ("local_hit", "global_hit", "miss")) == 4 * (len(items) - 1)


async def test_a_hit_is_pinned_from_the_lookup_on(world: World) -> None:
    async with world.encoder(pool=128 * KIB) as enc:
        await enc.embed("bytes:65536:170")
        await enc.settled()
        prepared = await enc.tower.prepare(["bytes:65536:170"], Modality.IMAGE)
        hold = await enc.tower.cache.lookup(enc.tower._items(prepared))
        for seed in (171, 172, 173):
            assert await enc.right(f"bytes:65536:{seed}")
            await enc.settled()
        into = torch.zeros(65536, dtype=torch.uint8)
        assert await enc.tower.cache.read(hold, 0, into)
        assert into.numpy().tobytes() == await plain("bytes:65536:170")
        hold.release()
        hold.release()


async def test_what_is_larger_than_the_pool_is_served_and_refused(world: World) -> None:
    async with world.encoder(pool=128 * KIB) as enc:
        assert await enc.right("bytes:200000:180", "bytes:100:181")
    assert enc.counts == {"miss": 2, "refused": 1}


@pytest.mark.parametrize(("pool", "page"), [(KIB, 4 * KIB), (MIB, 0), (MIB, 3000)])
def test_impossible_sizes_are_usage_errors(pool: int, page: int) -> None:
    with pytest.raises(UsageError, match="pages are a multiple of"):
        CacheConfig(pool_bytes=pool, page_bytes=page)


# ---- what it meets: each costs a forward, never a request ------------------------------------------------------------


async def test_master_dead_and_back(master: MooncakeMaster, donor: Donor) -> None:
    async with encoders(master.address, None, None) as (enc, other):
        await enc.embed("bytes:50000:1")
        await enc.settled()
        await master.kill()
        for seed in (1, 2, 3):
            assert await other.right(f"bytes:50000:{seed}")
        assert await enc.right("bytes:50000:1")
        assert other.computed == [1, 2, 3]
        assert other.reasons["exist:master_lost"] == 3
        await other.settled()
        await master.restart()
        await until(lambda: len(master.pages.segments()) == 1)
        await until(lambda: other.tower.cache.store is not None and not other.tower.cache.store.in_flight)
        assert await _shared_again(other, enc)


async def _shared_again(writer: Encoder, reader: Encoder) -> bool:
    """Whether an embedding of the one reaches the other, once the writer has noticed that the master is back."""
    for seed in range(10, 40):
        assert await writer.right(f"bytes:50000:{seed}")
        await writer.settled()
        before = reader.counts.get("global_hit", 0)
        assert await reader.right(f"bytes:50000:{seed}")
        if reader.counts.get("global_hit", 0) > before:
            return True
        await asyncio.sleep(0.1)
    return False


async def test_master_restarted_has_forgotten_everything(master: MooncakeMaster, donor: Donor) -> None:
    async with encoders(master.address, None, None) as (enc, other):
        await enc.embed("bytes:50000:1")
        await enc.settled()
        await master.restart()
        await until(lambda: len(master.pages.segments()) == 1)
        assert await other.right("bytes:50000:1")
        assert other.counts == {"miss": 1}
        await other.settled()
        assert await _shared_again(other, enc)


async def test_donor_killed(master: MooncakeMaster, donor: Donor) -> None:
    hook = Hook("cache.get", donor.child.kill)
    async with encoders(master.address, None, hook) as (enc, other):
        await enc.embed("bytes:900000:1")
        await enc.settled()
        assert await other.right("bytes:900000:1")
        assert other.counts == {"fallback": 1}
        assert await other.right("bytes:500:2")
        assert await enc.right("bytes:900000:1")


async def test_lease_expired_during_the_get(master: MooncakeMaster, donor: Donor) -> None:
    async def freeze() -> None:
        donor.child.freeze()
        asyncio.get_running_loop().call_later(1.2, donor.child.thaw)

    hook = Hook("cache.get", freeze)
    async with encoders(master.address, None, hook) as (enc, other):
        await enc.embed("bytes:3000000:1")
        await enc.settled()
        assert await other.right("bytes:3000000:1")
        assert await other.right("bytes:3000000:1")
    assert other.reasons == {"get:lease_expired": 1}
    assert other.counts == {"fallback": 1, "local_hit": 1}


async def test_object_evicted_between_lookup_and_get(world: World) -> None:
    async with world.encoder() as enc, world.client() as (store, _):
        item = "bytes:50000:200"
        await enc.embed(item)
        await enc.settled()
        [key] = [entry.key for entry in enc.tower.cache.pool.entries]

        async def evict() -> None:
            assert await store.remove(key, force=True) is Outcome.OK

        async with world.encoder(gate=Hook("cache.get", evict)) as other:
            assert await other.right(item)
            assert await other.right(item)
        assert other.reasons == {"get:missing": 1}
        assert other.counts == {"fallback": 1, "local_hit": 1}


async def test_put_of_an_existing_key_changes_nothing_and_harms_nobody(world: World) -> None:
    async with world.encoder(gate=Hook("cache.put", lambda: meet.wait())) as enc:
        meet = asyncio.Barrier(2)
        async with world.encoder(gate=Hook("cache.put", lambda: meet.wait())) as twin:
            assert await asyncio.gather(enc.right("bytes:50000:210"), twin.right("bytes:50000:210")) == [True, True]
            await asyncio.gather(enc.settled(), twin.settled())
        async with world.encoder() as third:
            assert await third.right("bytes:50000:210")
    assert [enc.counts, twin.counts, third.counts] == [{"miss": 1}, {"miss": 1}, {"global_hit": 1}]


@pytest.mark.parametrize("damage", ["short", "long", "flipped byte", "flipped header", "other item", "zeros"])
async def test_a_damaged_object_is_computed_anew_and_mended(world: World, damage: str) -> None:
    size, seed = 3 * 64 * KIB + 100, 220 + len(damage)
    item, stranger = f"bytes:{size}:{seed}", f"bytes:{size}:{seed + 30}"
    async with world.encoder() as enc, world.client() as (store, memory):
        await enc.embed(item)
        await enc.embed(stranger)
        await enc.settled()
        [key, other_key] = [entry.key for entry in enc.tower.cache.pool.entries]
        whole, view = [(memory.address, size + 64)], memory.tensor[: size + 64]
        assert await store.get([other_key if damage == "other item" else key], [whole]) == [Outcome.OK]
        if damage == "flipped byte":
            view[64 + size // 2] ^= 1
        elif damage == "flipped header":
            view[40] ^= 1
        elif damage == "zeros":
            view.zero_()
        length = {"short": size, "long": size + 4096}.get(damage, size + 64)
        assert await store.remove(key, force=True) is Outcome.OK
        assert await store.put([key], [[(memory.address, length)]]) == [Outcome.OK]
        async with world.encoder() as reader:
            assert await reader.right(item)
            assert (reader.computed, reader.counts) == ([seed], {"fallback": 1})
            assert reader.reasons["object:removed"] == 1
            await reader.settled()
        async with world.encoder() as next_reader:
            assert await next_reader.right(item)
        assert next_reader.counts == {"global_hit": 1}


async def test_full_segment_refuses_and_everything_is_served(master: MooncakeMaster, tmp_path: Path) -> None:
    item = f"bytes:{17 * MIB}:1"
    async with (
        Donor(master.address, 16 * MIB, tmp_path / "small.log"),
        encoders(master.address, None, pool=20 * MIB) as (enc,),
    ):
        assert await enc.right(item, "bytes:10:2")
        await enc.settled()
        assert await enc.right("bytes:10:2", item)
    assert enc.counts == {"miss": 2, "local_hit": 2, "refused": 1}
    assert enc.reasons == {"put:no_room": 2}


async def test_no_segment_at_all(master: MooncakeMaster) -> None:
    async with encoders(master.address, None) as (enc,):
        assert await enc.right("bytes:1000:1")
        await enc.settled()
        assert await enc.right("bytes:1000:1")
    assert enc.counts == {"miss": 1, "local_hit": 1, "refused": 1}


async def test_writer_killed_in_mid_put(tmp_path: Path) -> None:
    item, flags = "bytes:4000000:1", {"put_start_discard_timeout_sec": 500, "client_ttl": 60}
    async with (
        MooncakeMaster(tmp_path / "master.log", flags=flags) as master,
        Donor(master.address, 32 * MIB, tmp_path / "donor.log") as donor,
        encoders(master.address, None, None) as (enc, other),
    ):
        key = await donor_frozen_while_a_writer_dies(master, donor, tmp_path, item)
        for one in (enc, other):
            assert await one.right(item)
            await one.settled()
            assert one.counts == {"miss": 1}
        assert [entry.key for entry in enc.tower.cache.pool.entries] == [key]
        assert enc.tower.cache.store is not None
        into = [(enc.tower.cache.memory.buffer.address + 4 * MIB, 4000064)]
        assert await enc.tower.cache.store.get([key], [into]) == [Outcome.NOT_READY]


async def test_the_key_of_a_killed_writer_becomes_writable_again(
    master: MooncakeMaster, donor: Donor, tmp_path: Path
) -> None:
    item = "bytes:4000000:1"
    async with encoders(master.address, None, None) as (enc, other):
        await donor_frozen_while_a_writer_dies(master, donor, tmp_path, item)
        for _ in range(100):
            for one in (enc, other):
                for entry in one.tower.cache.pool.entries:
                    one.tower.cache.pool.evict(entry)
                assert await one.right(item)
                await one.settled()
            if other.counts.get("global_hit", 0):
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail("the key never became writable again")


async def donor_frozen_while_a_writer_dies(master: MooncakeMaster, donor: Donor, out: Path, item: str) -> str:
    """A writer begins to put the item's object and is killed before the donor takes the bytes; the key."""
    program = (
        "import sys\n"
        "from mooncake.store import MooncakeDistributedStore\n"
        "store = MooncakeDistributedStore()\n"
        "assert store.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 16 << 20, 'tcp', '', sys.argv[1]) == 0\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "store.put(sys.argv[2], bytes(4000064))\n"
    )
    prepared, begun = await SyntheticTower().prepare([item], Modality.IMAGE), _puts_begun(master)
    key = cache_key("synthetic", Modality.IMAGE, prepared.grid[0], prepared.keys[0])
    writer = Child([sys.executable, "-c", program, master.address, key], out / "writer.log", talks=True)
    assert await started_line(writer, 60) == b"ready\n"
    donor.child.freeze()
    writer.stdin.write(b"go\n")
    writer.stdin.flush()
    await until(lambda: _puts_begun(master) > begun)
    await writer.kill()
    donor.child.thaw()
    return key


def _puts_begun(master: MooncakeMaster) -> float:
    metrics = master.pages.metrics()
    names = ("master_put_start_requests_total", "master_batch_put_start_requests_total")
    return sum(metrics.get(name, 0) for name in names)


async def test_a_frozen_donor_delays_one_request_and_not_the_others(master: MooncakeMaster, tmp_path: Path) -> None:
    async with (
        Donor(master.address, 16 * MIB, tmp_path / "frozen.log") as frozen,
        encoders(master.address, None, None, wait_s=1.0, max_late=1) as (writer, reader),
    ):
        for seed in (1, 2):
            await writer.embed(f"bytes:2000000:{seed}")
        await writer.settled()
        frozen.child.freeze()
        assert await reader.right("bytes:2000000:1")
        assert reader.counts == {"fallback": 1}
        assert reader.reasons["get:timeout"] == 1
        assert await reader.right("bytes:2000000:1")
        assert await reader.right("bytes:2000000:2")
        assert reader.reasons["get:skipped"] == 1
        assert reader.counts == {"fallback": 2, "miss": 1}
        assert reader.tower.cache.census()["fills"] == 1
        frozen.child.thaw()
        await reader.settled()
        assert await reader.right("bytes:2000000:1")


async def test_a_frozen_master_delays_a_few_lookups_and_then_none(master: MooncakeMaster, donor: Donor) -> None:
    async with encoders(master.address, None, wait_s=0.5, max_late=1) as (enc,):
        assert master.child is not None
        assert enc.tower.cache.store is not None
        await enc.embed("bytes:5000:0")
        await enc.settled()
        master.child.freeze()
        request = asyncio.create_task(enc.embed("bytes:5000:0", "bytes:5000:1"))
        await until(lambda: bool(enc.tower.cache.store and enc.tower.cache.store.in_flight))
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert enc.tower.cache.census()["pinned"] == 0
        for seed in (1, 2, 3):
            assert await enc.right(f"bytes:5000:{seed}")
        reasons = enc.tower.cache.counters.reasons
        assert reasons["exist:timeout"] <= 1
        assert reasons["exist:timeout"] + reasons["exist:skipped"] == 3
        master.child.thaw()
        await enc.settled()
    assert enc.counts["miss"] == 4


@pytest.mark.parametrize("kind", ["fail", "drop", "repeat", "delay"])
@pytest.mark.parametrize("step", ["cache.lookup", "cache.get", "cache.put", "cache.copy", "cache.evict"])
async def test_a_fault_at_any_step_costs_at_most_a_forward(world: World, step: str, kind: str) -> None:
    gate = Hook(step, decision=Decision(kind, 0.01))  # type: ignore[arg-type]
    first = 1000 + 10 * zlib.crc32(f"{step} {kind}".encode())
    items = [f"bytes:65536:{seed}" for seed in range(first, first + 3)]
    async with world.encoder() as warm, world.encoder(pool=128 * KIB, gate=gate) as enc:
        await warm.embed(items[0], items[1])
        await warm.settled()
        for pair in ((items[0], items[1]), (items[2], items[0]), (items[1], items[1]), (items[2], items[2])):
            assert await enc.right(*pair)
            await enc.settled()
        assert gate.seen > 0


@pytest.mark.parametrize("step", ["cache.lookup", "cache.get", "cache.copy", "cache.put"])
async def test_a_cancelled_request_leaves_nothing_half_done(world: World, step: str) -> None:
    first = 2000 + 10 * zlib.crc32(step.encode())
    items = [f"bytes:65536:{first}", f"bytes:65536:{first + 1}"]
    reached, go = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reached.set()
        await go.wait()

    async with world.encoder() as warm, world.encoder(gate=Hook(step, wait)) as enc:
        await warm.embed(items[0])
        await warm.settled()
        request = asyncio.create_task(enc.embed(*items))
        await reached.wait()
        request.cancel()
        go.set()
        await asyncio.gather(request, return_exceptions=True)
        await enc.settled()
        assert enc.tower.cache.census() == {"fills": 0, "cache_tasks": 0, "pinned": 0}
        assert await enc.right(*items)


async def test_many_requests_at_once_in_a_small_pool(world: World) -> None:
    seeds = [3000 + number * 7 % 12 for number in range(72)]
    async with world.encoder(pool=384 * KIB) as enc, world.encoder(pool=256 * KIB) as other:
        sizes = [1000 + 20000 * (seed % 8) for seed in seeds]
        items = [f"bytes:{size}:{seed}" for size, seed in zip(sizes, seeds, strict=True)]
        pairs = [*itertools.pairwise(items)]
        answers = await asyncio.gather(*((enc, other)[number % 2].right(*pair) for number, pair in enumerate(pairs)))
        assert all(answers)
        for index, one in enumerate((enc, other)):
            await one.settled()
            counted = sum(one.counts.get(word, 0) for word in ("local_hit", "global_hit", "miss", "fallback"))
            assert counted == 2 * len(pairs[index::2])


# ---- TP ranks --------------------------------------------------------------------------------------------------------


class Ranks:
    """Two ranks that agree in memory: the first mask of a tag meets the next one of the same tag."""

    def __init__(self) -> None:
        self.first: dict[str, tuple[list[bool], asyncio.Future[list[bool]]]] = {}
        self.asked = 0

    async def agree(self, tag: str, mask: list[bool]) -> list[bool]:
        self.asked += 1
        if tag not in self.first:
            answer: asyncio.Future[list[bool]] = asyncio.get_running_loop().create_future()
            self.first[tag] = (mask, answer)
            return await answer
        other, answer = self.first.pop(tag)
        answer.set_result([mine and theirs for mine, theirs in zip(mask, other, strict=True)])
        return await answer


async def test_ranks_run_the_forward_on_the_same_items(world: World) -> None:
    ranks = Ranks()
    async with world.encoder(agreement=ranks) as zero, world.encoder(agreement=ranks) as one:
        both = ["bytes:9000:400", "bytes:9000:401"]
        zero.tower.cache.store = None
        assert await asyncio.gather(zero.right(both[0]), one.right(both[0])) == [True, True]
        await one.settled()
        zero.tower.cache.pool.evict(zero.tower.cache.pool.entries[0])
        assert await asyncio.gather(zero.right(*both), one.right(*both)) == [True, True]
        zero.tower.cache.store = one.tower.cache.store
    assert zero.inner.forwards == one.inner.forwards == [[400], [400, 401]]


async def test_ranks_that_ask_in_another_order_never_take_another_requests_answer(world: World) -> None:
    ranks = Ranks()
    first, second = ["bytes:9000:410", "bytes:9000:411"], ["bytes:9000:412", "bytes:9000:413"]
    async with world.encoder(agreement=ranks) as zero, world.encoder(agreement=ranks) as one:
        await asyncio.gather(zero.embed(*second), one.embed(*second))
        slow = Hook("cache.lookup", lambda: until(lambda: ranks.asked >= 7))
        zero.tower.cache.steps.gate = slow
        tasks = [asyncio.create_task(zero.right(*first))]
        await until(lambda: slow.seen == 1)
        zero.tower.cache.steps.gate = None
        for number, request in enumerate((zero.right(*second), one.right(*first), one.right(*second)), start=5):
            tasks.append(asyncio.create_task(request))
            await until(lambda: ranks.asked >= number)  # noqa: B023
        answers = await asyncio.gather(*tasks)
    assert answers == [True] * 4
    assert zero.inner.forwards == one.inner.forwards == [[412, 413], [410, 411]]


# ---- the client ------------------------------------------------------------------------------------------------------


async def test_a_closed_client_skips_and_does_not_crash(world: World) -> None:
    async with world.client() as (_, memory):
        store = StoreClient(StoreConfig(world.master.address))
        await store.open()
        await asyncio.gather(store.close(), store.close())
        assert await store.exist(["a", "b"]) == [Outcome.SKIPPED] * 2
        assert await store.size("a") is None
        with pytest.raises(StoreUnavailable, match="closed"):
            store.register(memory)


async def test_only_registered_memory_is_read_or_written(world: World) -> None:
    async with world.client() as (store, memory):
        for extent in ((memory.address - 1, 10), (memory.address + memory.nbytes - 5, 6)):
            with pytest.raises(BadBuffer, match="register the pool"):
                await store.put(["key"], [[extent]])
            with pytest.raises(BadBuffer, match="register the pool"):
                await store.get(["key"], [[extent]])
        with pytest.raises(StoreUnavailable, match="register each region once"):
            store.register(memory)


async def test_codes_become_outcomes(world: World) -> None:
    async with world.client() as (store, memory):
        start = memory.address
        memory.tensor[:100] = torch.arange(100, dtype=torch.uint8)
        for key in ("codes", "codes2", "codes3"):
            assert await store.put([key], [[(start, 60), (start + 60, 40)]]) == [Outcome.OK]
        assert await store.exist(["codes", "no-such-key"]) == [Outcome.OK, Outcome.MISSING]
        assert await store.size("codes") == 100
        outcomes = await store.get(
            ["codes", "no-such-key", "codes2", "codes3"],
            [[(start + 200, 1), (start + 201, 99)], [(start, 9)], [(start + 400, 99)], [(start + 500, 101)]],
        )
        assert outcomes == [Outcome.OK, Outcome.MISSING, Outcome.INVALID, Outcome.TRANSFER_FAILED]
        assert memory.tensor[200:300].tolist() == list(range(100))
        assert await store.remove("codes") is Outcome.LEASED
        assert await store.remove("codes", force=True) is Outcome.OK
        assert await store.remove("codes") is Outcome.MISSING


async def test_no_master_is_an_error_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(StoreUnavailable, match="no mooncake_master at"):
        await StoreClient(StoreConfig(f"127.0.0.1:{port}")).open()
    with pytest.raises(StoreUnavailable, match="HOST:PORT"):
        await StoreClient(StoreConfig("somewhere")).open()


async def test_another_server_is_no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "300")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_hang_up_on_all, args=(listener,))
        thread.start()
        try:
            with pytest.raises(StoreUnavailable, match="no mooncake_master of this release"):
                await StoreClient(StoreConfig(f"127.0.0.1:{listener.getsockname()[1]}")).open()
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _hang_up_on_all(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


@pytest.mark.parametrize(("nbytes", "why"), [(16 * MIB, "no mooncake_master at"), (MIB, "donate 0 or at least")])
async def test_a_donor_that_cannot_start_says_why(tmp_path: Path, nbytes: int, why: str) -> None:
    with pytest.raises(LabError, match=why):
        await Donor("127.0.0.1:1", nbytes, tmp_path / "donor.log").start()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
async def test_embeddings_on_the_gpu(world: World) -> None:
    async with world.encoder() as enc:
        tower = CachedTower(SyntheticTower("cuda"), enc.tower.cache, device="cuda")
        prepared = await tower.prepare(["bytes:70000:500", "bytes:9:501"], Modality.IMAGE)
        for _ in range(2):
            [buffer] = await tower.forward([prepared])
            assert isinstance(buffer, TensorBuffer)
            assert buffer.tensor.is_cuda
            assert buffer.tensor.cpu().numpy().tobytes() == await plain("bytes:70000:500", "bytes:9:501")
    assert tower.counters["local_hit"] == 2
