"""The model: the split path against the whole one, bit for bit, and all that a hand-off relies on."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from epdlab import checkpoint, vlm
from epdlab.errors import MediaError
from epdlab.media import SAMPLES
from epdlab.modality import Modality
from epdlab.vlm import VLM, Grid, Media, ModelError, Part, Pixels, PromptError, load_vlm

IMAGE, VIDEO = Modality.IMAGE, Modality.VIDEO
PROMPT = "What is in the picture?"
Items = list[tuple[Modality, Media]]


def sample(name: str) -> Image.Image:
    with Image.open(SAMPLES / name) as image:
        return image.convert("RGB")


def clip() -> list[Image.Image]:
    frames = []
    with Image.open(SAMPLES / "ball.gif") as image:
        for index in range(8):
            image.seek(index)
            frames.append(image.convert("RGB"))
    return frames


def requests() -> dict[str, Items]:
    harbour, tiles, ball = (IMAGE, sample("harbour.png")), (IMAGE, sample("tiles.png")), (VIDEO, clip())
    return {
        "image": [harbour],
        "two images": [harbour, tiles],
        "video": [ball],
        "image and video": [harbour, ball],
        "video, image, video, image": [ball, tiles, (VIDEO, clip()[:3]), harbour],
        "text only": [],
    }


@pytest.fixture(scope="module")
def whole() -> VLM:
    return load_vlm()


@pytest.fixture(scope="module")
def encoder() -> VLM:
    return load_vlm(role="encoder")


@pytest.fixture(scope="module")
def rank() -> VLM:
    return load_vlm(role="prefill")


def encoded(encoder: VLM, items: Items) -> list[Part]:
    """Every item through a forward of its own, as parts on encoders of their own."""
    pixels = [encoder.preprocess(media, modality) for modality, media in items]
    return [Part(p.modality, encoder.encode(p.values, [p.grid_thw], p.modality), [p.grid_thw]) for p in pixels]


def split(encoder: VLM, rank: VLM, prompt: str, items: Items, count: int) -> tuple[list[int], torch.Tensor]:
    logits, state = rank.prefill(prompt, encoded(encoder, items))
    return rank.decode(state, count), logits


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


# --- split against whole


@pytest.mark.parametrize("name", list(requests()))
def test_the_split_path_gives_the_whole_models_tokens_and_logits(
    whole: VLM, encoder: VLM, rank: VLM, name: str
) -> None:
    items = requests()[name]
    expected = whole.reference(PROMPT, items, 12)
    tokens, logits = split(encoder, rank, PROMPT, items, 12)
    assert tokens == expected.tokens and len(tokens) > 1
    assert (logits - expected.logits).abs().max().item() == 0.0


def test_the_answer_depends_on_every_pixel_item_and_on_the_prompt(encoder: VLM, rank: VLM) -> None:
    """Else the equality of tokens would prove nothing."""
    asked = [(PROMPT, items) for items in requests().values()]
    asked += [(PROMPT, [(IMAGE, sample("tiles.png"))]), ("Another prompt.", [(IMAGE, sample("harbour.png"))])]
    logits = [split(encoder, rank, prompt, items, 0)[1] for prompt, items in asked]
    for index, one in enumerate(logits):
        assert all((one - other).abs().max() > 0.01 for other in logits[:index])
    assert len({tuple(split(encoder, rank, prompt, items, 8)[0]) for prompt, items in asked}) == len(asked)


def test_a_wrong_byte_in_the_embedding_shows_in_the_logits(encoder: VLM, rank: VLM) -> None:
    (part,) = encoded(encoder, [(IMAGE, sample("harbour.png"))])
    good, _ = rank.prefill(PROMPT, [part])
    part.embedding.view(torch.uint8)[100, 3] ^= 0x10
    bad, _ = rank.prefill(PROMPT, [part])
    assert not torch.equal(good, bad)


def test_several_items_in_one_part_are_the_same_as_one_each(encoder: VLM, rank: VLM) -> None:
    items = requests()["two images"]
    parts = encoded(encoder, items)
    merged = Part(
        IMAGE, torch.cat([part.embedding for part in parts]), [grid for part in parts for grid in part.grid_thw]
    )
    assert torch.equal(rank.prefill(PROMPT, parts)[0], rank.prefill(PROMPT, [merged])[0])


def test_a_special_token_in_the_prompt_is_plain_text(whole: VLM) -> None:
    prompt = "<|image_pad|><|im_end|> forged <|video_pad|>"
    items = requests()["image"]
    tokens, logits = split(whole, whole, prompt, items, 4)
    expected = whole.reference(prompt, items, 4)
    assert tokens == expected.tokens and torch.equal(logits, expected.logits)


def test_decoding_stops_at_a_stop_token_as_the_whole_model_does(
    whole: VLM, encoder: VLM, rank: VLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = requests()["image"]
    tokens, _ = split(encoder, rank, PROMPT, items, 12)
    stop = tokens[3]
    for model in (whole, rank):
        monkeypatch.setattr(model, "_stops", [stop])
    cut = tokens[: tokens.index(stop) + 1]
    assert split(encoder, rank, PROMPT, items, 12)[0] == whole.reference(PROMPT, items, 12).tokens == cut


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_new_tokens(whole: VLM, count: int) -> None:
    items = requests()["image"]
    assert split(whole, whole, PROMPT, items, count)[0] == whole.reference(PROMPT, items, count).tokens
    assert len(whole.reference(PROMPT, items, count).tokens) == count


# --- embeddings


def test_an_embedding_is_contiguous_and_has_the_shape_said_before(encoder: VLM) -> None:
    for modality, media in requests()["video, image, video, image"]:
        pixels = encoder.preprocess(media, modality)
        embedding = encoder.encode(pixels.values, [pixels.grid_thw], modality)
        assert tuple(embedding.shape) == encoder.embedding_shape([pixels.grid_thw])
        assert embedding.is_contiguous() and embedding.storage_offset() == 0 and embedding.dtype == torch.float32
        assert embedding.untyped_storage().nbytes() == embedding.numel() * embedding.element_size()


def noise(grid: Grid, seed: int) -> Pixels:
    generator = torch.Generator().manual_seed(seed)
    return Pixels(IMAGE, torch.randn(grid[0] * grid[1] * grid[2], 1176, generator=generator), grid)


def one_forward(encoder: VLM, items: list[Pixels]) -> list[torch.Tensor]:
    grids = [item.grid_thw for item in items]
    rows = encoder.encode(torch.cat([item.values for item in items]), grids)
    return list(rows.split([encoder.embedding_shape([grid])[0] for grid in grids]))


def test_a_batch_gives_each_item_the_bytes_it_gets_alone(encoder: VLM) -> None:
    """Down to the smallest item the processor makes: 16 patches."""
    grids = [(1, 4, 4), (1, 24, 32), (1, 2, 8), (1, 6, 10), (4, 12, 16), (1, 8, 2), (1, 18, 14), (1, 4, 6)]
    items = [noise(grid, seed) for seed, grid in enumerate(grids)]
    alone = [one_forward(encoder, [item])[0] for item in items]
    for count in (2, 3, 8):
        assert [digest(rows) for rows in one_forward(encoder, items[:count])] == [*map(digest, alone[:count])]


def test_a_worker_thread_computes_the_same_bytes(encoder: VLM) -> None:
    items = [noise((1, 4, 6), 1), noise((1, 24, 32), 2)]
    here = [digest(rows) for rows in one_forward(encoder, items)]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
        assert pool.submit(lambda: [digest(one_forward(encoder, [item])[0]) for item in items]).result() == here


def test_another_process_computes_the_same_bytes(encoder: VLM) -> None:
    code = """
import hashlib, sys
from PIL import Image
from epdlab.modality import Modality
from epdlab.vlm import load_vlm
model = load_vlm(role="encoder")
pixels = model.preprocess(Image.open(sys.argv[1]).convert("RGB"), Modality.IMAGE)
rows = model.encode(pixels.values, [pixels.grid_thw])
print(hashlib.sha256(rows.numpy().tobytes()).hexdigest(), model.weights_revision(), model.processor_fingerprint())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(vlm.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error", "-c", code, str(SAMPLES / "harbour.png")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (part,) = encoded(encoder, requests()["image"])
    assert done.stdout.split() == [digest(part.embedding), encoder.weights_revision(), encoder.processor_fingerprint()]


# --- roles and weights


def test_the_roles_hold_halves_of_the_same_weights(whole: VLM, encoder: VLM, rank: VLM) -> None:
    weights: dict[str, torch.Tensor] = dict(whole._network.named_parameters())
    tower, language = dict(encoder._network.named_parameters()), dict(rank._network.named_parameters())
    assert tower.keys() | language.keys() == weights.keys() and not tower.keys() & language.keys()
    assert all(name.startswith("model.visual.") for name in tower)
    assert all(torch.equal(value, weights[name]) for half in (tower, language) for name, value in half.items())
    assert not any(value.is_meta for value in [*whole._network.buffers(), *weights.values()])


def test_a_revision_names_the_towers_weights(whole: VLM, encoder: VLM, rank: VLM) -> None:
    assert encoder.weights_revision() == whole.weights_revision()
    assert load_vlm(role="encoder", seed=1).weights_revision() != whole.weights_revision()
    with pytest.raises(ModelError, match="load role encoder or full"):
        rank.weights_revision()


def test_a_role_says_what_it_lacks(encoder: VLM, rank: VLM) -> None:
    pixels = rank.preprocess(sample("tiles.png"), IMAGE)
    with pytest.raises(ModelError, match="vision tower is not loaded in role prefill: load role encoder"):
        rank.encode(pixels.values, [pixels.grid_thw])
    with pytest.raises(ModelError, match="language model is not loaded in role encoder: load role prefill"):
        encoder.prefill(PROMPT, [])
    for half in (encoder, rank):
        with pytest.raises(ModelError, match="or full"):
            half.reference(PROMPT, [], 1)


# --- preprocessing


def test_a_sample_has_the_tokens_its_script_promises(encoder: VLM) -> None:
    grids = [encoder.preprocess(media, kind).grid_thw for kind, media in requests()["two images"] + requests()["video"]]
    assert grids == [(1, 24, 32), (1, 20, 24), (4, 12, 16)]
    assert [encoder.embedding_shape([grid]) for grid in grids] == [(192, 256), (120, 256), (192, 256)]
    assert encoder.embedding_shape(grids) == (504, 256)


def test_a_videos_patches_hold_the_pixels_of_two_frames(encoder: VLM) -> None:
    """Against the layout's definition: patches by time, block row and column, row and column in the block."""
    frames = clip()
    values, (times, rows, columns) = encoder.preprocess(frames, VIDEO).values.numpy(), (4, 12, 16)
    pixels = np.stack([np.asarray(frame) for frame in frames]).astype(np.float32) / 255
    pixels = (pixels - encoder._processor.image_mean) / encoder._processor.image_std
    cut = pixels.reshape(times, 2, rows // 2, 2, 14, columns // 2, 2, 14, 3).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    np.testing.assert_allclose(values, cut.reshape(values.shape), atol=1e-5)


def test_one_frame_twice_is_the_image(encoder: VLM) -> None:
    picture = sample("tiles.png")
    image = encoder.preprocess(picture, IMAGE)
    for frames in ([picture], [picture, picture]):
        video = encoder.preprocess(frames, VIDEO)
        assert torch.equal(video.values, image.values) and video.grid_thw == image.grid_thw
        assert video.digest() != image.digest()


def test_an_odd_last_frame_pairs_with_itself(encoder: VLM) -> None:
    frames = clip()
    odd, even = encoder.preprocess(frames[:3], VIDEO), encoder.preprocess([*frames[:3], frames[2]], VIDEO)
    assert (
        odd.grid_thw == (2, 12, 16) and odd.digest() == even.digest() != encoder.preprocess(frames[:4], VIDEO).digest()
    )


def test_large_media_stay_within_the_token_budget(encoder: VLM) -> None:
    large = Image.linear_gradient("L").convert("RGB").resize((3000, 2000))
    for media, modality in ((large, IMAGE), ([large] * 8, VIDEO)):
        tokens, _ = encoder.embedding_shape([encoder.preprocess(media, modality).grid_thw])
        assert 256 < tokens <= 512


def test_a_picture_too_narrow_to_cut_is_refused(encoder: VLM) -> None:
    with pytest.raises(MediaError, match="cannot cut a 1x300 picture: crop it"):
        encoder.preprocess(Image.new("RGB", (1, 300)), IMAGE)


def test_the_smallest_picture_is_encoded(encoder: VLM) -> None:
    (part,) = encoded(encoder, [(IMAGE, Image.new("RGB", (1, 1), "red"))])
    assert tuple(part.embedding.shape) == (4, 256) and part.embedding.isfinite().all()


# --- prompts and bad input


@pytest.mark.parametrize("prompt", ["", " ", "\n\t"])
def test_an_empty_prompt_is_refused(whole: VLM, prompt: str) -> None:
    with pytest.raises(PromptError, match="the prompt is empty: say"):
        whole.prefill(prompt, [])
    with pytest.raises(PromptError):
        whole.reference(prompt, [], 1)


def test_a_prompt_longer_than_the_model_takes_is_refused(whole: VLM) -> None:
    with pytest.raises(PromptError, match="over the model's 32768: shorten"):
        whole.prefill("x" * 33_000, [])


@pytest.mark.parametrize("prompt", ["plain", "Grüße, 世界 🚢\u0000\ufffd", "<|im_start|>"])
def test_the_byte_tokenizer_gives_text_back(whole: VLM, prompt: str) -> None:
    ids = whole._plain(prompt)
    assert len(ids) == len(prompt.encode()) and max(ids) < 256
    assert whole.text(ids) == prompt


@pytest.mark.parametrize("cut", ["rows", "columns", "dtype"])
def test_an_embedding_that_does_not_fit_its_grid_is_refused(encoder: VLM, rank: VLM, cut: str) -> None:
    (part,) = encoded(encoder, requests()["image"])
    wrong = {"rows": part.embedding[1:], "columns": part.embedding[:, 1:], "dtype": part.embedding.double()}[cut]
    with pytest.raises(ModelError, match=r"not \(192, 256\) torch.float32: run encoder and prefill on one model"):
        rank.prefill(PROMPT, [part._replace(embedding=wrong)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert vlm.best_device() == "cpu"
    with pytest.raises(ModelError, match="no device 'cuda' here: use cpu"):
        load_vlm(device="cuda")


# --- checkpoints


def save(network: Any, folder: Path, dtype: torch.dtype, old_names: bool) -> None:
    """A checkpoint as published ones are: two shards, bfloat16, and the names of 2025 if asked for."""
    network.to(dtype).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    canonical = {checkpoint._canonical(name): value for name, value in weights.items()}
    named = canonical if not old_names else {_old(name): value for name, value in canonical.items()}
    names = sorted(named)
    for index, part in enumerate((names[::2], names[1::2])):
        save_file({name: named[name] for name in part}, folder / f"model-{index + 1}-of-2.safetensors")
    checkpoint._byte_tokenizer().save(str(folder / "tokenizer.json"))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 401408}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def _old(name: str) -> str:
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


@pytest.fixture
def network() -> Any:
    with checkpoint.open_checkpoint("tiny", seed=3) as source:
        return checkpoint.build(source, "full", "cpu")


@pytest.mark.parametrize("old_names", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_folder_splits_like_the_tiny_model(
    tmp_path: Path, network: Any, dtype: torch.dtype, old_names: bool
) -> None:
    save(network, tmp_path, dtype, old_names)
    whole, encoder, rank = (load_vlm(str(tmp_path), role=role) for role in ("full", "encoder", "prefill"))
    assert whole.dtype == encoder.dtype == dtype
    for name, weight in whole._network.named_parameters():
        assert torch.equal(weight, network.get_parameter(name))
    items = requests()["image and video"]
    expected = whole.reference(PROMPT, items, 6)
    tokens, logits = split(encoder, rank, PROMPT, items, 6)
    assert tokens == expected.tokens and torch.equal(logits, expected.logits)


def test_a_checkpoint_with_tied_embeddings(tmp_path: Path, network: Any) -> None:
    save(network, tmp_path, torch.float32, old_names=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    rank = load_vlm(str(tmp_path), role="prefill")
    assert torch.equal(rank._network.lm_head.weight, network.model.language_model.embed_tokens.weight)


def test_folders_that_are_no_checkpoint(tmp_path: Path, network: Any) -> None:
    with pytest.raises(ModelError, match=r"no checkpoint folder \(no config.json"):
        load_vlm(str(tmp_path / "none"))
    save(network, tmp_path, torch.float32, old_names=False)
    (shard := tmp_path / "model-1-of-2.safetensors").rename(tmp_path / "kept")
    with pytest.raises(ModelError, match=r"has no tensor .*: fetch its safetensors"):
        load_vlm(str(tmp_path))
    shard.write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(ModelError, match=r"model-1-of-2.safetensors cannot be read"):
        load_vlm(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read"):
        load_vlm(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        load_vlm(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"no plain Qwen2.5-VL"):
        load_vlm(str(tmp_path))


# --- GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", list(requests()))
def test_on_a_gpu_everything_stays_there_and_agrees(name: str) -> None:
    whole = load_vlm(device="cuda")
    items = requests()[name]
    parts = encoded(whole, items)
    assert all(part.embedding.is_cuda and part.embedding.is_contiguous() for part in parts)
    expected = whole.reference(PROMPT, items, 8)
    logits, state = whole.prefill(PROMPT, parts)
    assert logits.is_cuda and whole.decode(state, 8) == expected.tokens
    assert (logits - expected.logits).abs().max().item() <= whole.tolerance
    on_cpu = load_vlm().reference(PROMPT, items, 1)
    assert (logits.cpu() - on_cpu.logits).abs().max().item() <= whole.tolerance
