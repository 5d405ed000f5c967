"""A small GPT, which both sides train."""

import torch
from torch import nn


class GPT(nn.Module):
    """A decoder over characters."""

    def __init__(self, vocab_size: int, block_size: int) -> None:
        super().__init__()
        n_embd, n_head, n_layer, dropout = 32, 4, 2, 0.1
        self.block_size = block_size
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        layer = nn.TransformerEncoderLayer(
            n_embd, n_head, 4 * n_embd, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.h = nn.TransformerEncoder(layer, n_layer, nn.LayerNorm(n_embd), enable_nested_tensor=False)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:  # [batch, time] -> [batch, time, vocabulary]
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1], device=idx.device)
        logits: torch.Tensor = self.lm_head(self.h(x, mask=mask, is_causal=True))
        return logits

    @torch.no_grad()
    def generate(self, idx: torch.Tensor, max_new_tokens: int) -> torch.Tensor:  # [batch, time]
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.block_size :])[:, -1]
            idx = torch.cat((idx, torch.multinomial(logits.softmax(-1), 1)), dim=1)
        return idx
