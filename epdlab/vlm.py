"""The model: a real Qwen2.5-VL, whole or only the half a process needs.

Owns: media to patches, the vision forward (encode), the language model that takes embeddings instead of pixels
(prefill, decode), and the one-process reference both are held against. What never passes through here: references
and files of media, transfers, the wire.

Same bits everywhere: a tiny weight is a function of seed and parameter name, so every role and process holds the same,
and on a CPU the tiny model runs on one thread. There an item's embedding has the same bytes alone and in a batch. On a
GPU, with more threads or with a checkpoint, a matrix product of another height may round otherwise: after another
batching than the reference's, compare tokens exactly and logits within `VLM.tolerance`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import PIL
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from .checkpoint import TINY, ModelError, Role, build, open_checkpoint, special_ids
from .errors import MediaError, UsageError
from .modality import Modality

Grid = tuple[int, int, int]
Media = Image.Image | Sequence[Image.Image]

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


class PromptError(UsageError):
    """The prompt is empty, or it and its media are longer than the model takes."""

    kind = "prompt"


class Pixels(NamedTuple):
    """One item ready for the vision tower: values [t*h*w patches, channels*2*14*14] float32 and its patch grid."""

    modality: Modality
    values: Tensor
    grid_thw: Grid

    def digest(self) -> bytes:
        """SHA-256 of what the tower sees: modality, grid and pixel values."""
        return hashlib.sha256(f"{self.modality.value} {self.grid_thw}".encode() + _raw(self.values)).digest()


class Part(NamedTuple):
    """One or more items of a modality as they arrive at prefill: [tokens, dim], and a patch grid per item."""

    modality: Modality
    embedding: Tensor
    grid_thw: Sequence[Grid]


class Reference(NamedTuple):
    """What the whole model said: the new tokens, and the logits [vocabulary] behind the first of them."""

    tokens: list[int]
    logits: Tensor


@dataclass(slots=True)
class DecodeState:
    """A prefilled sequence: its key-value cache, the next rope position, the last logits. Decode it once."""

    cache: Any
    position: int
    logits: Tensor


def best_device() -> str:
    """`cuda` if torch sees a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_prompt(prompt: str) -> None:
    """Raises PromptError for a prompt that says nothing or is no text. Cheap: call it before a model is loaded."""
    if not prompt.strip():
        raise PromptError("the prompt is empty: say what to do with the media")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise PromptError("the prompt is not UTF-8: write it as UTF-8 text")


def load_vlm(model: str = TINY, device: str = "cpu", role: Role = "full", seed: int = 0) -> VLM:
    """Build the model, or for the roles `encoder` and `prefill` only the vision tower or the language model.

    model: `tiny` (float32), or a checkpoint's folder, taken in its own dtype. seed: of the tiny weights. The tiny model
    on a CPU sets torch to one thread: its bits do not depend on the number of cores, and ranks do not fight for them.
    On a GPU it turns TF32 off for convolutions, so that float32 means float32.

    Raises:
        ModelError: no such device, no such checkpoint, or one that cannot be used.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise ModelError(f"no device {device!r} here: use cpu, or install an NVIDIA driver and a CUDA build of torch")
    if model == TINY and device == "cpu":
        torch.set_num_threads(1)
    elif model == TINY:
        torch.backends.cudnn.allow_tf32 = False
    with open_checkpoint(model, seed) as source:
        return VLM(build(source, role, device), role, source.processor, source.tokenizer)


class VLM:
    """A loaded model. Methods say which roles have them; all of them run without gradients on `device`."""

    def __init__(self, network: Any, role: Role, processor: Any, tokenizer: Tokenizer) -> None:
        self.role: Role = role
        self.config = network.config
        weight = next(iter(network.parameters()))
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        self.dim: int = self.config.vision_config.out_hidden_size
        self._merge: int = self.config.vision_config.spatial_merge_size
        self._network, self._processor, self._tokenizer = network, processor, tokenizer
        tokenizer.encode_special_tokens = True  # `<|...|>` in a prompt stays plain text and cannot forge media
        self._special = special_ids(tokenizer)
        self._stops = sorted(self._special[token] for token in ("<|endoftext|>", "<|im_end|>"))

    def __repr__(self) -> str:
        return f"VLM(role={self.role}, device={self.device}, dtype={self.dtype}, dim={self.dim})"

    @property
    def tolerance(self) -> float:
        """Largest difference of logits that rounding explains when items were batched otherwise than in `reference`."""
        return _TOLERANCE[self.dtype]

    # --- every role: pixels, sizes, text

    def preprocess(self, media: Media, modality: Modality) -> Pixels:
        """Resize, normalise and cut into patches, on the CPU.

        A video's frames pair up in time (an odd last one with itself) and share the pixel budget of one image.

        Raises:
            MediaError: the picture is too narrow to be cut (sides over 200 to 1).
        """
        frames = [media] if isinstance(media, Image.Image) else list(media)
        pairs = (len(frames) + 1) // 2
        size = self._processor.size
        low, high = int(size["shortest_edge"]), int(size["longest_edge"])
        size = {"shortest_edge": low, "longest_edge": max(low, high // pairs)}
        try:
            done = self._processor(images=frames, size=size, return_tensors="pt")
        except ValueError as error:
            raise MediaError(f"cannot cut a {frames[0].width}x{frames[0].height} picture: crop it") from error
        _, height, width = done["image_grid_thw"][0].tolist()
        values = done["pixel_values"] if len(frames) == 1 else _pair_frames(done["pixel_values"], len(frames))
        return Pixels(modality, values, (pairs, height, width))

    def embedding_shape(self, grid_thw: Sequence[Grid]) -> tuple[int, int]:
        """(tokens, dim) of the embedding of items with these grids, known before any forward."""
        return sum(map(self._tokens, grid_thw)), self.dim

    def text(self, tokens: Sequence[int]) -> str:
        """The tokens as text, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def processor_fingerprint(self) -> str:
        """SHA-256 (hex) of what turns media into pixels: processor settings, our rule for videos, Pillow's release."""
        settings = json.dumps(self._processor.to_dict(), sort_keys=True, default=str)
        return hashlib.sha256(f"{settings} shared-budget pillow-{PIL.__version__}".encode()).hexdigest()

    def _tokens(self, grid: Grid) -> int:
        return grid[0] * grid[1] * grid[2] // self._merge**2

    def _need(self, role: Role, what: str) -> None:
        if self.role not in ("full", role):
            raise ModelError(f"{what} is not loaded in role {self.role}: load role {role} or full")

    # --- encoder

    @torch.no_grad()
    def encode(self, pixel_values: Tensor, grid_thw: Sequence[Grid], modality: Modality = Modality.IMAGE) -> Tensor:
        """One vision forward over the concatenated patches of items of one modality.

        Returns:
            The merged embeddings [tokens, dim], contiguous, in a storage of their own, on `device`.
        """
        self._need("encoder", "the vision tower")
        model, grids = self._network.model, torch.tensor(grid_thw, device=self.device)
        features = model.get_image_features if modality is Modality.IMAGE else model.get_video_features
        return torch.cat(features(pixel_values.to(self.device), grids).pooler_output)

    def weights_revision(self) -> str:
        """SHA-256 (hex) of the vision tower: its config, and every weight's name, shape, dtype and bytes."""
        self._need("encoder", "the vision tower")
        return self._revision

    @cached_property
    def _revision(self) -> str:
        digest = hashlib.sha256(self.config.vision_config.to_json_string().encode())
        for name, weight in sorted(self._network.model.visual.named_parameters()):
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            digest.update(_raw(weight))
        return digest.hexdigest()

    # --- prefill

    @torch.no_grad()
    def prefill(self, prompt: str, parts: Sequence[Part]) -> tuple[Tensor, DecodeState]:
        """Run the language model over the prompt, with the parts' embeddings in place of their pad tokens.

        Returns:
            The last position's logits [vocabulary], and the state to decode from.

        Raises:
            PromptError: empty or too long. ModelError: an embedding without its grid's shape or the model's dtype.
        """
        self._need("prefill", "the language model")
        for part in parts:
            self._check_part(part)
        items = [(part.modality, grid) for part in parts for grid in part.grid_thw]
        inputs, starts = self._inputs(prompt, items)
        embeds = self._network.model.language_model.embed_tokens(inputs["input_ids"])
        rows = [row for part in parts for row in torch.split(part.embedding, [*map(self._tokens, part.grid_thw)])]
        for start, row in zip(starts, rows, strict=True):
            embeds[0, start : start + len(row)] = row
        positions, _ = self._network.model.get_rope_index(**inputs)
        state = self._forward(embeds, positions, None)
        return state.logits, state

    @torch.no_grad()
    def decode(self, state: DecodeState, max_new_tokens: int) -> list[int]:
        """Greedy decoding after `prefill`: at most that many token ids, a stop token included if one came."""
        self._need("prefill", "the language model")
        tokens: list[int] = []
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in self._stops):
            if tokens:
                embeds = self._network.model.language_model.embed_tokens(self._tensor([[tokens[-1]]]))
                state = self._forward(embeds, self._tensor([[[state.position]]] * 3), state.cache)
            tokens.append(int(state.logits.argmax()))
        return tokens

    def _forward(self, embeds: Tensor, positions: Tensor, cache: Any) -> DecodeState:
        out = self._network.model.language_model(
            inputs_embeds=embeds, position_ids=positions, cache=cache, use_cache=True
        )
        logits = self._network.lm_head(out.last_hidden_state[:, -1:])[0, -1]
        return DecodeState(out.cache, int(positions.max()) + 1, logits)

    def _check_part(self, part: Part) -> None:
        shape, expected = tuple(part.embedding.shape), self.embedding_shape(part.grid_thw)
        if shape != expected or part.embedding.dtype != self.dtype:
            got = f"{shape} {part.embedding.dtype}"
            raise ModelError(f"embedding is {got}, not {expected} {self.dtype}: run encoder and prefill on one model")

    # --- the one-process reference

    @torch.no_grad()
    def reference(self, prompt: str, media: Sequence[tuple[Modality, Media]], max_new_tokens: int) -> Reference:
        """The same request through the whole model's ordinary forward and `generate`: pixels in, no hand-off."""
        self._need("prefill", "the language model")
        self._need("encoder", "the vision tower")
        items = [self.preprocess(item, modality) for modality, item in media]
        inputs, _ = self._inputs(prompt, [(item.modality, item.grid_thw) for item in items])
        for modality, name in ((Modality.IMAGE, "pixel_values"), (Modality.VIDEO, "pixel_values_videos")):
            if values := [item.values for item in items if item.modality is modality]:
                inputs[name] = torch.cat(values).to(self.device)
        ids = inputs["input_ids"]
        out = self._network.generate(
            **inputs,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max(1, max_new_tokens),
            do_sample=False,
            eos_token_id=self._stops,
            pad_token_id=self._stops[0],
            return_dict_in_generate=True,
            output_logits=True,
        )
        return Reference(out.sequences[0, ids.shape[1] :].tolist()[:max_new_tokens], out.logits[0][0])

    # --- the prompt

    def _inputs(self, prompt: str, items: Sequence[tuple[Modality, Grid]]) -> tuple[dict[str, Tensor], list[int]]:
        """The chat with one pad token per embedding row, as model inputs; and where each item's rows start."""
        check_prompt(prompt)
        ids, starts = self._chat(prompt, items)
        if len(ids) > (limit := self.config.text_config.max_position_embeddings):
            raise PromptError(
                f"{len(ids)} tokens are over the model's {limit}: shorten the prompt or use smaller media"
            )
        kinds = {self._special["<|image_pad|>"]: 1, self._special["<|video_pad|>"]: 2}
        inputs = {"input_ids": self._tensor([ids])}
        inputs["mm_token_type_ids"] = self._tensor([[kinds.get(token, 0) for token in ids]])
        for modality, name in ((Modality.IMAGE, "image_grid_thw"), (Modality.VIDEO, "video_grid_thw")):
            if grids := [grid for kind, grid in items if kind is modality]:
                inputs[name] = self._tensor(grids)
        return inputs, starts

    def _chat(self, prompt: str, items: Sequence[tuple[Modality, Grid]]) -> tuple[list[int], list[int]]:
        """Qwen2.5-VL's chat template by token ids: a system turn, a user turn with the items first, an open answer."""
        special, plain = self._special, self._plain
        start, end = special["<|im_start|>"], [special["<|im_end|>"], *plain("\n")]
        ids = [start, *plain("system\nYou are a helpful assistant."), *end, start, *plain("user\n")]
        starts: list[int] = []
        for modality, grid in items:
            pad = special["<|image_pad|>" if modality is Modality.IMAGE else "<|video_pad|>"]
            starts.append(len(ids) + 1)
            ids += [special["<|vision_start|>"], *[pad] * self._tokens(grid), special["<|vision_end|>"]]
        return [*ids, *plain(prompt), *end, start, *plain("assistant\n")], starts

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, device=self.device)


def _pair_frames(values: Tensor, frames: int) -> Tensor:
    """Patches of single frames, each doubled in time [frames*h*w, 3*2*p*p], to patches of pairs of frames."""
    single = values.view(frames, -1, 3, 2, values.shape[1] // 6)[:, :, :, 0]
    if frames % 2:
        single = torch.cat((single, single[-1:]))
    pairs = single.view(-1, 2, *single.shape[1:]).permute(0, 2, 3, 1, 4)
    return pairs.reshape(-1, values.shape[1])


def _raw(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
