"""Small versions of the models of torchvision, timm and transformers, with batches to train on.

Nothing is downloaded: weights are random. A model of transformers keeps its default configuration
but for its sizes; LayerDrop and SpecAugment are off, as they draw the number of layers from a
generator, or from numpy's. The smallest model of each family of torchvision and timm is built as it
is, for small images.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

Batch = dict[str, Any]

ROWS, LENGTH, LABELS, VOCABULARY = 2, 16, 3, 100
LIBRARIES = ("torchvision", "timm", "transformers")
IMAGE_SIZES = (64, 128, 224)  # the first that a model of timm or torchvision accepts


class Case(NamedTuple):
    """A model: its library, its name there, the kind of its head, and which recipe builds it."""

    library: str
    model: str
    head: str
    recipe: int

    @property
    def name(self) -> str:
        """A name that is also that of a file."""
        return f"{self.library}-{self.model}"


class Built(NamedTuple):
    """A model in training mode, its optimizer, and the batches that it is trained on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[Batch]


def build(case: Case) -> Built:
    """Build a model with random weights; seed torch before."""
    model, batch_of = _LIBRARIES[case.library](case)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Built(model, optimizer, [batch_of(index) for index in range(3)])


def parameters_of(case: Case) -> float:
    """The number of a model's parameters; infinite if it cannot be built."""
    return _size(lambda: _LIBRARIES[case.library](case)[0])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    """Train on one batch; without a loss of its own, a model learns to be small."""
    labels = batch.get("_labels")
    outputs = model(*batch.get("_args", ()), **{k: v for k, v in batch.items() if k[0] != "_"})
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, dict) and outputs and "loss_classifier" in outputs:
        loss = sum(outputs.values())  # a detector's
    if loss is None and labels is not None:
        loss = nn.functional.cross_entropy(_first(outputs), labels)
    if loss is None:
        parts = [t.float().square().mean() for t in _floats(outputs) if t.requires_grad]
        loss = torch.stack(parts).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _first(outputs: Any) -> torch.Tensor:
    return next(_floats(outputs))


def _floats(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        if outputs.is_floating_point():
            yield outputs
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from _floats(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from _floats(value)


def _generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + index)


# torchvision and timm


def _images(size: int, index: int, *, depth: int | None = None, rows: int = ROWS) -> torch.Tensor:
    frames = () if depth is None else (depth,)
    return torch.randn(rows, 3, *frames, size, size, generator=_generator(index))


def _torchvision(case: Case) -> tuple[nn.Module, Callable[[int], Batch]]:
    import torchvision

    size, kind = IMAGE_SIZES[case.recipe], case.head
    options: dict[str, Any] = {} if kind == "flow" else {"num_classes": 10}
    if kind in ("segmentation", "detection"):
        options |= {"weights_backbone": None}
    if (
        "image_size"
        in inspect.signature(torchvision.models.get_model_builder(case.model)).parameters
    ):
        options["image_size"] = size
    if case.model.startswith("vit"):
        options["image_size"] = size
    model = torchvision.models.get_model(case.model, weights=None, **options)

    def batch(index: int) -> Batch:
        g = _generator(index)
        if kind == "flow":
            return {
                "_args": (_images(size, index), _images(size, index + 50)),
                "num_flow_updates": 2,
            }
        if kind == "video":
            return {
                "_args": (_images(size, index, depth=8),),
                "_labels": torch.randint(0, 10, (ROWS,), generator=g),
            }
        if kind == "segmentation":
            labels = torch.randint(0, 10, (ROWS, size, size), generator=g)
            return {"_args": (_images(size, index),), "_labels": labels}
        if kind == "detection":
            box = torch.tensor([[5.0, 5.0, 40.0, 50.0], [10.0, 20.0, 60.0, 60.0]])
            target = {"boxes": box, "labels": torch.randint(1, 10, (2,), generator=g)}
            return {"_args": ([_images(size, index)[0]], [target])}
        return {
            "_args": (_images(size, index),),
            "_labels": torch.randint(0, 10, (ROWS,), generator=g),
        }

    return model, batch


def _timm(case: Case) -> tuple[nn.Module, Callable[[int], Batch]]:
    import timm

    size = IMAGE_SIZES[case.recipe % len(IMAGE_SIZES)]
    options: dict[str, Any] = {} if case.recipe >= len(IMAGE_SIZES) else {"img_size": size}
    model = timm.create_model(case.model, pretrained=False, num_classes=10, **options)

    def batch(index: int) -> Batch:
        labels = torch.randint(0, 10, (ROWS,), generator=_generator(index))
        return {"_args": (_images(size, index),), "_labels": labels}

    return model, batch


# transformers: sizes by the names that configurations use

_SIZES: dict[str, int | float | bool] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim"), 32),
    **dict.fromkeys(("embedding_size", "projection_dim", "hidden_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "dim_feedforward"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "hidden_mlp_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "encoder_num_hidden_layers", "layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "attention_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "attention_head_dim"), 16),
    **dict.fromkeys(("vocab_size", "text_vocab_size", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0),
    **dict.fromkeys(("apply_spec_augment",), False),
    **dict.fromkeys(("mask_time_prob", "mask_feature_prob"), 0.0),
    **dict.fromkeys(("num_conv_pos_embeddings",), 8),
    **dict.fromkeys(("num_conv_pos_embedding_groups",), 2),
    **dict.fromkeys(("image_size",), 64),
}
_FEW_SIZES = frozenset(
    {
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
        *("decoder_layers", "vocab_size", "layerdrop", "encoder_layerdrop", "decoder_layerdrop"),
        *("apply_spec_augment", "mask_time_prob", "mask_feature_prob"),
    }
)
_AUDIO_KEYS = ("input_values", "input_features")


def _small(config: Any, recipe: int) -> dict[str, Any]:
    """The arguments of a small configuration, from the default one."""
    found: dict[str, Any] = {}
    for key, value in vars(config).items():
        name = config.attribute_map.get(key, key)
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            found[key] = {**value.to_dict(), **_small(value, recipe)}
        elif name.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            found[key] = 1 if name.startswith("pad") else 2
        elif name in _SIZES and isinstance(value, (int, float)) and not isinstance(value, list):
            if recipe < 2 or name in _FEW_SIZES:
                found[key] = _SIZES[name]
        elif name == "depths" and isinstance(value, (list, tuple)):
            found[key] = [1] * len(value)
        elif name == "layer_types" and isinstance(value, (list, tuple)):
            found[key] = list(value[-2:]) if recipe % 2 == 0 else list(value[:2])
        elif name == "intermediate_size" and value is None:
            found[key] = 64
    if "pad_token_id" in vars(config) and config.pad_token_id is None and recipe != 1:
        found["pad_token_id"] = 1
    return found


def _transformers(case: Case) -> tuple[nn.Module, Callable[[int], Batch]]:
    import transformers

    model_class = getattr(transformers, case.model)
    kind = model_class.config_class
    labels = {"num_labels": LABELS}
    config = kind(**{**_small(kind(), case.recipe), **labels})
    if getattr(config, "is_encoder_decoder", False):
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 2
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 1
    if case.recipe != 1 and hasattr(config, "use_cache"):
        config.use_cache = False
    model = model_class(config)
    parameters = inspect.signature(model.forward).parameters

    def batch(index: int) -> Batch:
        return _HEADS[case.head](config, parameters, model, index)

    return model, batch


def _ids(index: int, rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (rows, length), generator=_generator(index))


def _text(config: Any, parameters: Any, model: Any, index: int) -> Batch:
    """Token ids with a mask, as tokenizers return them: all ones, but for the second batch."""
    batch: Batch = {"input_ids": _ids(index)}
    if "attention_mask" in parameters:
        mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
        if index == 1:
            mask[0, -4:] = 0
        batch["attention_mask"] = mask
    return batch


def _labelled_text(config: Any, parameters: Any, model: Any, index: int) -> Batch:
    batch = _text(config, parameters, model, index)
    return {**batch, "labels": batch["input_ids"].clone()}


def _classified_text(config: Any, parameters: Any, model: Any, index: int) -> Batch:
    labels = torch.randint(0, LABELS, (ROWS,), generator=_generator(index))
    return {**_text(config, parameters, model, index), "labels": labels}


def _tagged_text(config: Any, parameters: Any, model: Any, index: int) -> Batch:
    labels = torch.randint(0, LABELS, (ROWS, LENGTH), generator=_generator(index))
    return {**_text(config, parameters, model, index), "labels": labels}


def _answered_text(config: Any, parameters: Any, model: Any, index: int) -> Batch:
    first, last = torch.randint(0, LENGTH, (2, ROWS), generator=_generator(index))
    batch = _text(config, parameters, model, index)
    # Models clamp them in place: they must not share memory.
    return {**batch, "start_positions": first.clone(), "end_positions": last.clone()}


def _pixels(config: Any, index: int) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 64
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    return torch.randn(ROWS, channels, height, width, generator=_generator(index))


def _image(config: Any, parameters: Any, model: Any, index: int) -> Batch:
    return {"pixel_values": _pixels(config, index)}


def _classified_image(config: Any, parameters: Any, model: Any, index: int) -> Batch:
    labels = torch.randint(0, LABELS, (ROWS,), generator=_generator(index))
    return {"pixel_values": _pixels(config, index), "labels": labels}


def _segmented_image(config: Any, parameters: Any, model: Any, index: int) -> Batch:
    pixels = _pixels(config, index)
    labels = torch.randint(0, LABELS, (ROWS, *pixels.shape[2:]), generator=_generator(index))
    return {"pixel_values": pixels, "labels": labels}


def _image_and_text(config: Any, parameters: Any, model: Any, index: int) -> Batch:
    batch = {"pixel_values": _pixels(config, index), **_text(config, parameters, model, index)}
    return {**batch, "return_loss": True} if "return_loss" in parameters else batch


def _sound(config: Any, parameters: Any, model: Any, index: int) -> Batch:
    g = _generator(index)
    if "input_values" in parameters and not hasattr(config, "num_mel_bins"):
        return {"input_values": torch.randn(ROWS, 2000, generator=g)}
    bins = getattr(config, "num_mel_bins", 80)
    if "input_values" in parameters:
        return {
            "input_values": torch.randn(ROWS, getattr(config, "max_length", 64), bins, generator=g)
        }
    if hasattr(config, "max_source_positions") and "whisper" in config.model_type:
        frames = 2 * config.max_source_positions
        return {"input_features": torch.randn(ROWS, bins, frames, generator=g)}
    return {
        "input_features": torch.randn(
            ROWS, 64, getattr(config, "input_feat_per_channel", bins), generator=g
        )
    }


def _classified_sound(config: Any, parameters: Any, model: Any, index: int) -> Batch:
    labels = torch.randint(0, LABELS, (ROWS,), generator=_generator(index))
    return {**_sound(config, parameters, model, index), "labels": labels}


def _transcribed_sound(config: Any, parameters: Any, model: Any, index: int) -> Batch:
    labels = _ids(index, length=3)
    return {**_sound(config, parameters, model, index), "labels": labels}


def _video(config: Any, parameters: Any, model: Any, index: int) -> Batch:
    size, frames = getattr(config, "image_size", 64), getattr(config, "num_frames", 4)
    shape = (ROWS, frames, getattr(config, "num_channels", 3), size, size)
    labels = torch.randint(0, LABELS, (ROWS,), generator=_generator(index))
    return {"pixel_values": torch.randn(shape, generator=_generator(index)), "labels": labels}


_Inputs = Callable[[Any, Any, Any, int], Batch]
# By the names of transformers' mappings of heads, in the order in which one is chosen.
_HEADS: dict[str, _Inputs] = {
    "SEQ_TO_SEQ_CAUSAL_LM": _labelled_text,
    "MASKED_LM": _labelled_text,
    "CAUSAL_LM": _labelled_text,
    "IMAGE_CLASSIFICATION": _classified_image,
    "CTC": _transcribed_sound,
    "SPEECH_SEQ_2_SEQ": _transcribed_sound,
    "AUDIO_CLASSIFICATION": _classified_sound,
    "SEMANTIC_SEGMENTATION": _segmented_image,
    "ZERO_SHOT_IMAGE_CLASSIFICATION": _image_and_text,
    "VIDEO_CLASSIFICATION": _video,
    "QUESTION_ANSWERING": _answered_text,
    "SEQUENCE_CLASSIFICATION": _classified_text,
    "TOKEN_CLASSIFICATION": _tagged_text,
    "TEXT_ENCODING": _text,
    "IMAGE": _image,
}
_LIBRARIES: dict[str, Callable[[Case], tuple[nn.Module, Callable[[int], Batch]]]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
}


# Candidates for the list


def candidates(libraries: Sequence[str]) -> Iterator[list[Case]]:
    """The recipes of every candidate, the preferred first; one or two models of a family."""
    if "torchvision" in libraries:
        for model, head in _smallest_of_torchvision():
            yield [Case("torchvision", model, head, recipe) for recipe in range(len(IMAGE_SIZES))]
    if "timm" in libraries:
        for model in _smallest_of_timm():
            yield [Case("timm", model, "", recipe) for recipe in (0, 3, 4, 5)]
    if "transformers" in libraries:
        yield from _heads_of_transformers()


def _size(make: Callable[[], nn.Module]) -> float:
    """The number of a model's parameters, which are not allocated; infinite if that fails."""
    try:
        with torch.device("meta"):
            return sum(param.numel() for param in make().parameters())
    except Exception:
        return float("inf")


def _smallest_of_torchvision() -> Iterator[tuple[str, str]]:
    import torchvision

    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for name in torchvision.models.list_models():
        builder = torchvision.models.get_model_builder(name)
        module = builder.__module__
        if "quantization" in module:
            continue
        kinds = {"segmentation": "segmentation", "detection": "detection", "video": "video"}
        head = next((kind for part, kind in kinds.items() if f".{part}." in module), "image")
        head = "flow" if "optical_flow" in module else head
        options = {"weights_backbone": None} if head in ("segmentation", "detection") else {}
        size = _size(lambda b=builder, o=options: b(weights=None, **o))
        found.setdefault((module, head), []).append((size, name))
    for (_, head), models in found.items():
        for _, name in sorted(models)[:2]:
            yield name, head


def _smallest_of_timm() -> Iterator[str]:
    import timm

    for module in timm.list_modules():
        sizes = []
        for name in timm.list_models(module=module)[:24]:
            make = partial(timm.create_model, name, pretrained=False, num_classes=10)
            sizes.append((_size(make), name))
        if sizes and min(sizes)[0] < 40e6:
            yield min(sizes)[1]


def _heads_of_transformers() -> Iterator[list[Case]]:
    from transformers.models.auto import modeling_auto

    of_type: dict[str, list[tuple[str, str]]] = {}
    for head in _HEADS:
        for kind, models in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            name = models if isinstance(models, str) else models[0]
            of_type.setdefault(kind, []).append((name, head))
    seen: set[str] = set()
    for models in of_type.values():
        cases = [
            Case("transformers", name, head, recipe)
            for name, head in models[:2]
            for recipe in range(4)
            if name not in seen
        ]
        seen.update(name for name, _ in models[:2])
        if cases:
            yield cases
