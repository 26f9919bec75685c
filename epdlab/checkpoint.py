"""Where a model comes from: seeds and our own config (`tiny`), or a local checkpoint's folder.

Owns: config, weights, image processor and tokenizer, and the network built from them with only the halves a role
needs. What never passes through here: media, forwards, the network (nothing is downloaded).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from .errors import EpdLabError

Role = Literal["encoder", "prefill", "full"]
Weights = Callable[[str, torch.Size], Tensor]

TINY = "tiny"
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
_IDS = {token: 256 + index for index, token in enumerate(SPECIAL)}
_CONFIG: dict[str, Any] = {
    "text_config": {
        "vocab_size": 256 + len(SPECIAL),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": _IDS["<|im_end|>"],
        "pad_token_id": _IDS["<|endoftext|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    },
    "vision_config": {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "out_hidden_size": 256,
        "fullatt_block_indexes": [1, 3],
    },
    "image_token_id": _IDS["<|image_pad|>"],
    "video_token_id": _IDS["<|video_pad|>"],
    "vision_start_token_id": _IDS["<|vision_start|>"],
    "vision_end_token_id": _IDS["<|vision_end|>"],
}
_MAX_PIXELS = 512 * 28 * 28


class ModelError(EpdLabError):
    """The model cannot be loaded, or was asked for what its role or its inputs do not allow."""

    kind = "model"


@dataclass(slots=True)
class Checkpoint:
    """What a model is built from. `weights(name, shape)` gives one tensor by its name in the whole network.

    Close it (`with`) once the network is built: a folder's weight files are open until then.
    """

    config: Any
    processor: Any
    tokenizer: Tokenizer
    weights: Weights
    dtype: torch.dtype
    files: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()


def open_checkpoint(model: str, seed: int = 0) -> Checkpoint:
    """`tiny`, or the folder of a Qwen2.5-VL checkpoint: config.json, tokenizer.json, preprocessor_config.json and
    *.safetensors. seed: of the tiny weights.

    Raises:
        ModelError: no such folder, or no Qwen2.5-VL in it that can be used.
    """
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if model == TINY:
        config, processor = Qwen2_5_VLConfig(**_CONFIG), Qwen2VLImageProcessorPil(max_pixels=_MAX_PIXELS)
        return Checkpoint(config, processor, _byte_tokenizer(), _seeded(seed), torch.float32)
    folder, files = _folder(model), ExitStack()
    with _reading(folder / "config.json"):
        config = Qwen2_5_VLConfig.from_pretrained(folder, local_files_only=True)
    with _reading(folder / "preprocessor_config.json"):
        processor = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
    with _reading(folder / "tokenizer.json"):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return Checkpoint(config, processor, tokenizer, _stored(folder, files), dtype, files)


def build(source: Checkpoint, role: Role, device: str) -> Any:
    """The network of the checkpoint; nothing is read or allocated for the half the role does not need.

    Returns:
        A Qwen2_5_VLForConditionalGeneration for inference, without `model.visual` (prefill), or without
        `model.language_model` and `lm_head` (encoder).
    """
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

    config = source.config
    with torch.device("meta"):
        network: Any = Qwen2_5_VLForConditionalGeneration(config)
    model = network.model
    if role == "encoder":
        del model.language_model, network.lm_head
    else:  # rotary frequencies are computed, not stored, so the meta device has none
        model.language_model.rotary_emb = type(model.language_model.rotary_emb)(config=config.text_config)
    if role == "prefill":
        del model.visual
    else:
        model.visual.rotary_pos_emb = type(model.visual.rotary_pos_emb)(config.vision_config)
    for name, empty in list(network.named_parameters()):  # a tied head is not among them
        value = source.weights(name, empty.shape).to(device, source.dtype)
        owner, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=False))
    if role != "encoder" and config.tie_word_embeddings:
        network.lm_head.weight = model.language_model.embed_tokens.weight
    return network.to(device).eval()


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the tokens the prompt template needs. Raises ModelError if one is not in the vocabulary."""
    found = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    if missing := [token for token, index in found.items() if index is None]:
        raise ModelError(f"the tokenizer has no {missing[0]}: pass a Qwen2.5-VL checkpoint with its own tokenizer.json")
    return {token: index for token, index in found.items() if index is not None}


def _byte_tokenizer() -> Tokenizer:
    """One token per UTF-8 byte (ids 0 to 255), then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def _seeded(seed: int) -> Weights:
    """Weights by seed and name: ones for norms, zeros for biases, else uniform with a variance of one over the fan-in.

    Uniform, because it takes only exact operations on the generator's integers: every machine draws the same bits.
    """

    def weights(name: str, shape: torch.Size) -> Tensor:
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        fan_in = 1 if "embed_tokens" in name else shape[1:].numel()
        return torch.rand(shape, generator=generator).mul_(2).sub_(1).mul_((3 / fan_in) ** 0.5)

    return weights


def _folder(model: str) -> Path:
    folder = Path(model).expanduser()
    needed = ("config.json", "tokenizer.json", "preprocessor_config.json")
    if missing := [name for name in needed if not (folder / name).is_file()]:
        raise ModelError(f"{model!r} is no checkpoint folder (no {', '.join(missing)}): pass one, or `tiny`")
    with _reading(folder / "config.json"):
        config = dict(json.loads((folder / "config.json").read_text()))
    if config.get("model_type") != "qwen2_5_vl" or "quantization_config" in config:
        raise ModelError(f"{model!r} is no plain Qwen2.5-VL checkpoint: pass an unquantised qwen2_5_vl one")
    return folder


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each reader has errors of its own
        raise ModelError(f"{path} cannot be read ({type(error).__name__}): fetch the file again") from error


def _stored(folder: Path, files: ExitStack) -> Weights:
    """Weights out of the folder's safetensors, read one by one and only as they are asked for."""
    from safetensors import safe_open

    where: dict[str, tuple[Any, str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _reading(path):
            file = files.enter_context(safe_open(path, framework="pt"))
        where.update({_canonical(key): (file, key) for key in file.keys()})  # noqa: SIM118

    def weights(name: str, shape: torch.Size) -> Tensor:
        if name not in where:
            raise ModelError(f"{folder.name!r} has no tensor {name}: fetch its safetensors files again")
        file, key = where[name]
        value: Tensor = file.get_tensor(key)
        if value.shape != shape:
            raise ModelError(f"{name} is {tuple(value.shape)}, not {tuple(shape)}: config.json is of another model")
        return value

    return weights


def _canonical(key: str) -> str:
    """A tensor's name in today's module tree; published checkpoints use the older one."""
    if key.startswith("visual."):
        return f"model.{key}"
    if key.startswith("model.") and not key.startswith(("model.visual.", "model.language_model.")):
        return key.replace("model.", "model.language_model.", 1)
    return key
