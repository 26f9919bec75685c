"""Pages of a real KV cache through a real store: the model goes on from them as from its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from PIL import Image
from store_world import MIB, Encoder, Hook, World

from epdlab.errors import UsageError
from epdlab.kv_tier import KVLayout, KVTier
from epdlab.modality import Modality
from epdlab.steps import Decision
from epdlab.vlm import DecodeState, Part, load_vlm

TOKENS = [int(token) for token in torch.randint(0, 90, (37,), generator=torch.Generator().manual_seed(3))]
PAGE = 8


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("store"))
    asyncio.run(world.start(64 * MIB, clients=2))
    yield world
    asyncio.run(world.stop())


@pytest.fixture(scope="module")
def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def forward(model: Any, tokens: list[int], cache: Any = None) -> Any:
    return model(input_ids=torch.tensor([tokens]), cache=cache, use_cache=True)


def tier(enc: Encoder, kv: Any, model: str = "llama") -> KVTier:
    return KVTier(enc.tower.cache, KVLayout.of(kv, PAGE), model)


async def test_the_model_goes_on_from_pages_another_process_kept(world: World, llama: Any) -> None:
    whole = forward(llama, TOKENS)
    async with world.encoder() as first, world.encoder() as second:
        assert await tier(first, whole.cache).save(TOKENS, whole.cache) == 32
        await first.settled()
        reader = tier(second, whole.cache)
        assert await reader.match(TOKENS) == 32
        restored, known = await reader.load(TOKENS)
        assert (known, restored.get_seq_length()) == (32, 32)
        for mine, theirs in zip(restored.layers, whole.cache.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys[:, :, :32])
            assert torch.equal(mine.values, theirs.values[:, :, :32])
        own = forward(llama, TOKENS[:32])
        resumed = forward(llama, TOKENS[32:], restored).logits
        assert torch.equal(resumed, forward(llama, TOKENS[32:], own.cache).logits)
        torch.testing.assert_close(resumed[0], whole.logits[0, 32:], rtol=1e-4, atol=1e-5)
    assert second.counts["global_hit"] == 4


async def test_only_an_equal_prefix_matches(world: World, llama: Any) -> None:
    kv = forward(llama, TOKENS).cache
    async with world.encoder() as enc:
        kept = tier(enc, kv, "prefixes")
        await kept.save(TOKENS, kv)
        assert await kept.match(TOKENS[:20]) == 16
        assert await kept.match([*TOKENS[:20], 96, *TOKENS[21:]]) == 16
        assert await kept.match([96, *TOKENS[1:]]) == 0
        assert await kept.match(TOKENS[8:]) == 0
        assert await kept.match([]) == 0
        assert await tier(enc, kv, "another model").match(TOKENS) == 0
        assert await KVTier(enc.tower.cache, KVLayout.of(kv, 4), "prefixes").match(TOKENS) == 0


async def test_a_page_that_cannot_be_had_cuts_the_prefix(world: World, llama: Any) -> None:
    kv = forward(llama, TOKENS).cache
    async with world.encoder() as first, world.encoder() as second:
        writer, reader = tier(first, kv, "cut"), tier(second, kv, "cut")
        await writer.save(TOKENS, kv)
        await first.settled()
        assert first.tower.cache.store is not None
        await first.tower.cache.store.remove(writer.keys(TOKENS)[2], force=True)
        restored, known = await reader.load(TOKENS)
        assert known == 16
        resumed = forward(llama, TOKENS[16:], restored).logits
        torch.testing.assert_close(resumed[0], forward(llama, TOKENS).logits[0, 16:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", ["cache.get", "cache.lookup", "cache.copy"])
async def test_without_the_store_nothing_is_known(world: World, llama: Any, step: str) -> None:
    kv = forward(llama, TOKENS).cache
    async with world.encoder() as first, world.encoder(gate=Hook(step, decision=Decision("fail"))) as second:
        await tier(first, kv, step).save(TOKENS, kv)
        await first.settled()
        restored, known = await tier(second, kv, step).load(TOKENS)
        assert (known, restored.get_seq_length()) == (0, 0)


async def test_a_real_vision_language_model_decodes_the_same(world: World) -> None:
    vlm = load_vlm("tiny", "cpu", "full")
    image = Image.linear_gradient("L").resize((56, 84)).convert("RGB")
    pixels = vlm.preprocess(image, Modality.IMAGE)
    part = Part(Modality.IMAGE, vlm.encode(pixels.values, [pixels.grid_thw]), [pixels.grid_thw])
    _, state = vlm.prefill("What is it?", [part])
    length = state.cache.get_seq_length()
    layout = KVLayout.of(state.cache, next(size for size in range(16, 0, -1) if length % size == 0))
    tokens = list(range(length))
    async with world.encoder() as first, world.encoder() as second:
        await KVTier(first.tower.cache, layout, "vlm").save(tokens, state.cache)
        await first.settled()
        restored, known = await KVTier(second.tower.cache, layout, "vlm").load(tokens)
    assert known == length
    assert vlm.decode(DecodeState(restored, state.position, state.logits), 6) == vlm.decode(state, 6)


def test_only_one_sequence(llama: Any) -> None:
    with torch.no_grad():
        two = llama(input_ids=torch.tensor([[1, 2], [3, 4]]), use_cache=True).cache
    with pytest.raises(UsageError, match="exactly one sequence"):
        KVLayout.of(two, PAGE)
