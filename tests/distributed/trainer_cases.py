"""Models and samples in the style of public examples, by names of cases, for `trainers.build`."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

NUM_SAMPLES = 22
_SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
_BERT = {
    **_SMALL,
    "vocab_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2 = {
    "vocab_size": 64,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_T5 = {
    "vocab_size": 64,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
_IMAGE = {"image_size": 8, "patch_size": 4}
_VIT = {
    **_SMALL,
    **_IMAGE,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}
_SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
    "drop_path_rate": 0.0,
    "classifier_dropout_prob": 0.0,
    "num_labels": 3,
}


def _sentences() -> list[torch.Tensor]:
    """Return ragged rows of tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 12, (NUM_SAMPLES,), generator=generator).tolist()
    return [torch.randint(2, 64, (length,), generator=generator) for length in lengths]


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad rows, and stack what is a number of each sample."""
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    for name in samples[0].keys() - batch.keys():
        values = [torch.as_tensor(sample[name]) for sample in samples]
        batch[name] = pad_sequence(values, True, -100) if values[0].dim() else torch.stack(values)
    return batch


def _some(tokens: torch.Tensor) -> torch.Tensor:
    """Return labels of which some are none."""
    return tokens.where(tokens % 3 != 0, -100)


Built = tuple[nn.Module, list[dict[str, Any]], Any]
"""A model, its samples, and what collates them; None: the library's default."""


def _with_labels(model: nn.Module, **labels: list[Any]) -> Built:
    """Return sentences with labels, and a column that the model does not take."""
    names = labels.keys()
    rows = zip(_sentences(), *labels.values(), strict=True)
    samples = [
        {"input_ids": row, "unused": 1, **dict(zip(names, of_row, strict=True))} for row, *of_row in rows
    ]
    return model, samples, pad


def _of_rows(function: Callable[[torch.Tensor], Any]) -> list[Any]:
    return [function(row) for row in _sentences()]


def _gpt2() -> Built:
    model = GPT2LMHeadModel(GPT2Config(**_GPT2))
    model.loss_type = "ForCausalLM"  # without it the library counts the first label of each row as well
    return _with_labels(model, labels=_sentences())


def _gpt2_with_lora() -> Built:
    from peft import LoraConfig, get_peft_model

    model, samples, collate = _gpt2()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what peft asks it
        options = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        return get_peft_model(model, options), samples, collate


def _llama() -> Built:
    """Blocks of one length, of which each token is a label."""
    blocks = [torch.randint(2, 64, (9,)) for _ in range(NUM_SAMPLES)]
    samples = [{"input_ids": block, "labels": block} for block in blocks]
    return LlamaForCausalLM(LlamaConfig(**_SMALL, vocab_size=64)), samples, None


def _bert(cls: type[Any], labels: Callable[[torch.Tensor], Any], **options: Any) -> Built:
    return _with_labels(cls(BertConfig(**_BERT, **options)), labels=_of_rows(labels))


def _question_answering() -> Built:
    ends = _of_rows(lambda row: len(row) - 1)
    model = BertForQuestionAnswering(BertConfig(**_BERT))
    return _with_labels(model, start_positions=[0] * NUM_SAMPLES, end_positions=ends)


def _multiple_choice() -> Built:
    choices = [torch.randint(2, 64, (3, 6)) for _ in range(NUM_SAMPLES)]
    samples = [{"input_ids": tokens, "labels": int(tokens.sum()) % 3} for tokens in choices]
    return BertForMultipleChoice(BertConfig(**_BERT)), samples, None


def _images() -> list[torch.Tensor]:
    return [torch.randn(3, 8, 8) for _ in range(NUM_SAMPLES)]


def _vit() -> Built:
    model = ViTForImageClassification(ViTConfig(**_VIT))
    samples = [{"pixel_values": image, "labels": number % 3} for number, image in enumerate(_images())]
    return model, samples, None


def _segmentation() -> Built:
    """Has batch normalization, and pixels that are no target."""
    masks = [torch.randint(0, 4, (8, 8)) for _ in range(NUM_SAMPLES)]
    labels = [mask.where(mask < 3, 255) for mask in masks]
    samples = [{"pixel_values": image, "labels": mask} for image, mask in zip(_images(), labels, strict=True)]
    return SegformerForSemanticSegmentation(SegformerConfig(**_SEGFORMER)), samples, None


def _clip() -> Built:
    """Has a loss in which the samples of a micro-batch influence each other."""
    text = {**_SMALL, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    config = CLIPConfig(text_config=text, vision_config={**_SMALL, **_IMAGE}, projection_dim=8)
    samples = [{"input_ids": torch.randint(3, 64, (5,)), "pixel_values": image} for image in _images()]
    return CLIPModel(config), samples, lambda samples: {**pad(samples), "return_loss": True}


_bert_tokens = partial(_bert, BertForTokenClassification, _some, num_labels=64)
_classes = partial(_bert, BertForSequenceClassification)
CASES: dict[str, Callable[[], Built]] = {
    "gpt2": _gpt2,
    "gpt2 smoothed": _gpt2,
    "gpt2 peft": _gpt2_with_lora,
    "llama": _llama,
    "llama bfloat16": _llama,
    "t5": lambda: _with_labels(T5ForConditionalGeneration(T5Config(**_T5)), labels=_of_rows(_some)),
    "bert tokens": _bert_tokens,
    "bert own loss": _bert_tokens,
    "bert sequences": partial(_classes, lambda row: int(row.sum()) % 3, num_labels=3),
    "bert regression": partial(_classes, lambda row: float(row.sum() % 7), num_labels=1),
    "bert masked": partial(_bert, BertForMaskedLM, _some),
    "question answering": _question_answering,
    "multiple choice": _multiple_choice,
    "vit": _vit,
    "segmentation": _segmentation,
    "clip": _clip,
}
