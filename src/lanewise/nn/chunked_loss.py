"""The cross entropy of linear logits with its gradients, of a few tokens at a time."""

from dataclasses import dataclass, replace
from typing import Any, Self, final

import torch

from lanewise.errors import TaskError

CHUNK_TOKENS = 256
"""Tokens whose logits exist at a time. A constant: equal shapes give equal bytes, whatever memory is free."""


@dataclass(frozen=True)
class Targets:
    """What the tokens should be, and what the loss makes of it; see `LinearCrossEntropy`."""

    classes: torch.Tensor
    """int64 [tokens]: the right class, and any class for a token that does not count."""
    token_weights: torch.Tensor
    """[tokens], in the format of all sums; 0 for a token that does not count."""
    class_weights: torch.Tensor
    """[classes], in the same format."""
    label_smoothing: float
    z_loss: float

    @property
    def counts(self) -> torch.Tensor:
        """Bool [tokens]: whether a token counts."""
        return self.token_weights != 0

    def __getitem__(self, chunk: slice) -> Self:
        """Return those of some tokens."""
        return replace(self, classes=self.classes[chunk], token_weights=self.token_weights[chunk])


@torch.compiler.disable(reason="the chunks of LinearCrossEntropy would be unrolled: that takes minutes")  # type: ignore[untyped-decorator]
def chunked_loss(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: Targets
) -> torch.Tensor:
    """Add up the loss of all tokens, in the format of `targets.token_weights`.

    Args:
        hidden: [tokens, width].
        weight: [classes, width].
        bias: [classes], or None.
        targets: of all tokens.
    """
    device_type = hidden.device.type
    is_autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if is_autocast else hidden.dtype
    with torch.autocast(device_type, enabled=False):
        total: torch.Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, dtype, torch.is_grad_enabled()
        )
    return total


@final
class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients with the loss, and keeps them for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: Targets,
        dtype: torch.dtype,
        is_trained: bool,
    ) -> torch.Tensor:
        """Add up the loss, with matrix products in the format `dtype`."""
        sum_dtype = targets.token_weights.dtype
        # What is small before the loss scale is multiplied would be 0 in fp16.
        gradient_dtype = sum_dtype if dtype is torch.float16 else dtype
        product_weight, gradient_weight = weight.to(dtype), weight.to(gradient_dtype)
        product_bias = None if bias is None else bias.to(dtype)
        hidden_grad, weight_grad, bias_grad = gradients = [
            torch.zeros_like(given, dtype=sum_dtype) if given is not None and is_trained and needed else None
            for given, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        ]
        total = targets.token_weights.new_zeros(())
        # New memory for each chunk would cost a tenth of the time on a CPU.
        products = hidden.new_empty((min(CHUNK_TOKENS, len(hidden)), len(weight)), dtype=dtype)
        for start in range(0, len(hidden), CHUNK_TOKENS):
            chunk = slice(start, start + CHUNK_TOKENS)
            # What does not count may be infinite, and 0 times that would be NaN.
            states = hidden[chunk].where(targets[chunk].counts[:, None], 0)
            inputs = states.to(dtype)
            logits = products[: len(inputs)]
            if product_bias is None:
                torch.mm(inputs, product_weight.T, out=logits)
            else:
                torch.addmm(product_bias, inputs, product_weight.T, out=logits)
            logits = logits.to(sum_dtype)
            total += _turn_into_gradient(logits, targets[chunk])
            if bias_grad is not None:
                bias_grad += logits.sum(dim=0)
            gradient = logits.to(gradient_dtype)
            if hidden_grad is not None:
                hidden_grad[chunk] = gradient @ gradient_weight
            if weight_grad is not None and gradient_dtype is sum_dtype:
                weight_grad.addmm_(gradient.T, states.to(sum_dtype))
            elif weight_grad is not None:
                weight_grad += gradient.T @ inputs
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if given is None else given.dtype for given in (hidden, weight, bias)]
        return total

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Multiply the gradients by that of the sum.

        Raises:
            TaskError: if the graph of a second derivative is asked for; torch would take it for zero.
        """
        if torch.is_grad_enabled():
            raise TaskError(
                "LinearCrossEntropy has no second derivative, and a backward with create_graph=True asks for "
                "one. Use whole logits there: cross_entropy(head.logits(hidden), targets)."
            )
        gradients = (
            None if gradient is None else (factor * gradient).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*gradients, None, None, None)


def _turn_into_gradient(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return the loss of tokens, added up, and leave its gradient in the place of their logits.

    With w the weight of a token, c those of the classes, V their number, e the label smoothing, p the softmax
    and y the target, the gradient of the logit of class v is

        w ((1 - e) c[y] + e / V sum(c) + 2 z_loss logsumexp) p[v] - w (1 - e) c[y] [v = y] - w e / V c[v]
    """
    token_weights, class_weights = targets.token_weights, targets.class_weights
    places = targets.classes[:, None]
    smoothing = targets.label_smoothing / len(class_weights)
    on_target = (1 - targets.label_smoothing) * class_weights[targets.classes]
    on_all = on_target + smoothing * class_weights.sum()

    largest = logits.amax(dim=1)
    logits.sub_(largest[:, None])
    losses = -on_target * logits.gather(1, places).squeeze(1)
    if smoothing:
        losses -= smoothing * logits.mv(class_weights)
    exp_sums = logits.exp_().sum(dim=1)
    log_sums = exp_sums.log()
    logsumexps = largest + log_sums
    losses += on_all * log_sums + targets.z_loss * logsumexps**2

    logits.mul_((token_weights * (on_all + 2 * targets.z_loss * logsumexps) / exp_sums)[:, None])
    logits.scatter_add_(1, places, -(token_weights * on_target)[:, None])
    if smoothing:
        logits.addr_(token_weights, class_weights, alpha=-smoothing)
    return (token_weights * losses).where(targets.counts, 0).sum()
