"""Tokens of questions and passages, for the small encoder and for a pretrained one."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import BertPreTokenizer, Digits, Sequence
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from lanewise.errors import DataError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Learn the pieces of words that are frequent in texts.

    By BPE, which learns the same pieces in each process; the trainer of WordPiece does not.
    """
    tokenizer = Tokenizer(BPE(unk_token=SPECIAL[1]))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Sequence([BertPreTokenizer(), Digits()])
    trainer = BpeTrainer(
        vocab_size=vocabulary_size, special_tokens=list(SPECIAL), min_frequency=2, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def load_tokenizer(pretrained: str | None, folder: Path) -> Tokenizer:
    """Load the tokenizer of a pretrained model, or the one that `prepare.py` left.

    Raises:
        DataError: if the pretrained model has no fast tokenizer, which alone knows the places of tokens.
    """
    if pretrained is None:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415 - takes a second

    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise DataError(
            f"{pretrained} has the tokenizer {type(tokenizer).__name__}, which does not tell where in the "
            "text a token is. Name a model that has a tokenizer.json."
        )
    return tokenizer.backend_tokenizer


def count_vocabulary(folder: Path) -> int:
    """Return how many tokens the tokenizer of `prepare.py` has."""
    return len(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
