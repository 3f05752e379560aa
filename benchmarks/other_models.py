"""Encoders, encoders with decoders, models of images and sound, and diffusion models: small, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 64
_ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_TEXT = {**_ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
_PICTURE = {**_ENCODER, "image_size": 16, "patch_size": 8}
_PAIR = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
}
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
_CLIP = {"text_config": {**_TEXT, "eos_token_id": 63, "bos_token_id": 62, "pad_token_id": 0}, "vision_config": _PICTURE}


class Other(NamedTuple):
    """A model to train.

    Attributes:
        make: builds it.
        batch: the arguments of step `number`.
        loss: of the model and its arguments; by default the model's own.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    loss: Callable[[nn.Module, dict[str, Any]], Tensor] = lambda model, batch: model(**batch).loss


def _generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def _tokens(number: int, *shape: int) -> Tensor:
    return torch.randint(5, VOCABULARY - 4, shape, generator=_generator(number))


def _padded(number: int) -> dict[str, Any]:
    tokens = _tokens(number, 4, 16)
    lengths = torch.tensor([[16], [9], [12], [7]])
    mask = (torch.arange(16) < lengths).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}


def _masked_words(number: int) -> dict[str, Any]:
    batch = _padded(number)
    chosen = torch.rand(batch["input_ids"].shape, generator=_generator(number)) < 0.2
    chosen[:, 1] = True
    labels = torch.where(chosen & batch["attention_mask"].bool(), batch["input_ids"], -100)
    return {**batch, "input_ids": torch.where(labels == -100, batch["input_ids"], 4), "labels": labels}


def _classes(number: int) -> dict[str, Any]:
    return {**_padded(number), "labels": torch.randint(3, (4,), generator=_generator(number))}


def _translated(number: int) -> dict[str, Any]:
    return {**_padded(number), "labels": _tokens(number, 4, 12), "use_cache": False}


def _pictures(number: int, size: int = 16) -> Tensor:
    return torch.randn(4, 3, size, size, generator=_generator(number))


def _labelled(number: int, size: int = 16) -> dict[str, Any]:
    return {"pixel_values": _pictures(number, size), "labels": torch.randint(5, (4,), generator=_generator(number))}


def _heard(number: int) -> dict[str, Any]:
    sound = torch.randn(2, 16, 32, generator=_generator(number))
    return {"input_features": sound, "labels": _tokens(number, 2, 10), "use_cache": False}


def _captions(number: int) -> dict[str, Any]:
    words = torch.cat([_tokens(number, 4, 11), torch.full((4, 1), 63)], 1)
    return {"input_ids": words, "pixel_values": _pictures(number), "return_loss": True}


def _waves(number: int) -> dict[str, Any]:
    waves = torch.randn(2, 640, generator=_generator(number))
    return {"input_values": waves, "labels": torch.randint(1, 16, (2, 5), generator=_generator(number))}


def _encoded(generator: torch.Generator) -> Tensor:
    return torch.randn(2, 6, 32, generator=generator)


def _ten_classes(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 10, (2,), generator=generator)


def _noise(channels: int, size: int, **more: Callable[[torch.Generator], Tensor]) -> Callable[[int], dict[str, Any]]:
    def batch(number: int) -> dict[str, Any]:
        generator = _generator(number)
        noisy, noise = torch.randn(2, 2, channels, size, size, generator=generator)
        times = torch.randint(0, 1000, (2,), generator=generator)
        made = {name: one(generator) for name, one in more.items()}
        return {"sample": noisy, "timestep": times, "noise": noise, **made}

    return batch


def _denoised(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    given = {name: one for name, one in batch.items() if name not in ("noise", "sample")}
    found = model(batch["sample"], **given).sample
    return nn.functional.mse_loss(found.float(), batch["noise"])


def _of_pictures(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["pixel_values"]).float(), batch["labels"])


def _of_class(config: str, model: str, batch: Callable, **settings: Any) -> Other:
    """A model of transformers."""
    return Other(lambda: getattr(transformers, model)(getattr(transformers, config)(**settings)), batch)


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    return UNet2DModel(
        16,
        3,
        3,
        down_block_types=down,
        up_block_types=up,
        block_out_channels=(16, 32),
        layers_per_block=1,
        attention_head_dim=8,
        norm_num_groups=8,
    )


def _unet_of_text() -> nn.Module:
    from diffusers import UNet2DConditionModel

    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    return UNet2DConditionModel(
        8,
        4,
        4,
        down_block_types=down,
        up_block_types=up,
        block_out_channels=(16, 32),
        layers_per_block=1,
        attention_head_dim=8,
        norm_num_groups=8,
        cross_attention_dim=32,
    )


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        2, 16, 4, 4, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=1000, norm_num_groups=4
    )


def _timm(name: str, size: int, **settings: Any) -> Other:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=5, **settings)

    return Other(make, lambda number: _labelled(number, size), _of_pictures)


OTHERS: dict[str, Other] = {
    "BERT for masked words": _of_class("BertConfig", "BertForMaskedLM", _masked_words, **_TEXT),
    "RoBERTa for classes": _of_class(
        *("RobertaConfig", "RobertaForSequenceClassification", _classes),
        **{**_TEXT, "num_labels": 3, "pad_token_id": 0},
    ),
    "ALBERT for masked words": _of_class(
        *("AlbertConfig", "AlbertForMaskedLM", _masked_words),
        **{**_TEXT, "embedding_size": 16},
    ),
    "DistilBERT for classes": _of_class(
        *("DistilBertConfig", "DistilBertForSequenceClassification", _classes),
        **{"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "num_labels": 3},
    ),
    "ELECTRA for masked words": _of_class(
        *("ElectraConfig", "ElectraForMaskedLM", _masked_words),
        **{**_TEXT, "embedding_size": 16},
    ),
    "ModernBERT for masked words": _of_class(
        *("ModernBertConfig", "ModernBertForMaskedLM", _masked_words),
        **{**_TEXT, "num_hidden_layers": 3, "local_attention": 8},
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "cls_token_id": 2, "sep_token_id": 1},
    ),
    "DeBERTa v2 for masked words": _of_class(
        *("DebertaV2Config", "DebertaV2ForMaskedLM", _masked_words),
        **{**_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        **{"position_buckets": 8, "max_relative_positions": 16},
    ),
    "T5": _of_class("T5Config", "T5ForConditionalGeneration", _translated, **_T5, decoder_start_token_id=0),
    "BART": _of_class("BartConfig", "BartForConditionalGeneration", _translated, **_PAIR, max_position_embeddings=64),
    "Whisper": _of_class(
        *("WhisperConfig", "WhisperForConditionalGeneration", _heard),
        **{**_PAIR, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32},
        **{"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    "wav2vec 2 with CTC": _of_class(
        *("Wav2Vec2Config", "Wav2Vec2ForCTC", _waves),
        **{**_ENCODER, "vocab_size": 16, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4)},
        **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
        **{"mask_time_length": 2},
    ),
    "ViT": _of_class("ViTConfig", "ViTForImageClassification", _labelled, **_PICTURE, num_labels=5),
    "DINOv2": _of_class("Dinov2Config", "Dinov2ForImageClassification", _labelled, **_PICTURE, num_labels=5),
    "Swin": _of_class(
        *("SwinConfig", "SwinForImageClassification", _labelled),
        **{"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2]},
        **{"window_size": 4, "num_labels": 5},
    ),
    "ConvNeXt": _of_class(
        *("ConvNextConfig", "ConvNextForImageClassification", _labelled),
        **{"num_stages": 2, "hidden_sizes": [16, 32], "depths": [2, 2], "patch_size": 2, "num_labels": 5},
    ),
    "CLIP": _of_class("CLIPConfig", "CLIPModel", _captions, **_CLIP, projection_dim=16),
    "SigLIP": _of_class("SiglipConfig", "SiglipModel", _captions, **_CLIP, bos_token_id=62, eos_token_id=63),
    "diffusers UNet2DModel": Other(_unet, _noise(3, 16), _denoised),
    "diffusers UNet2DConditionModel": Other(_unet_of_text, _noise(4, 8, encoder_hidden_states=_encoded), _denoised),
    "diffusers DiTTransformer2DModel": Other(_dit, _noise(4, 8, class_labels=_ten_classes), _denoised),
    "timm ViT": _timm("vit_tiny_patch16_224", 16, img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2),
    # Smaller pictures would leave 1 x 1 points for kernels of 3 x 3, of whose gradients oneDNN leaves some unwritten.
    "timm ResNet-18": _timm("resnet18", 96),
    "timm ConvNeXt": _timm("convnext_atto", 64, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), patch_size=2),
}
