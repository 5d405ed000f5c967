"""The cross entropy of a linear layer with many outputs, computed without its whole logits."""

from typing import final

import torch
from torch import nn
from torch.nn import functional as F

from lanewise.errors import TaskError
from lanewise.nn.chunked_loss import Targets, chunked_loss
from lanewise.task import Loss


@final
class LinearCrossEntropy(nn.Module):
    """A linear layer over a large vocabulary and the cross entropy of its logits, which never exist whole.

        self.head = LinearCrossEntropy(width, num_words, bias=False)
        self.head.weight = self.words.weight  # where the weights are tied
        ...
        return self.head(hidden, targets)  # in the forward of the model

    Its parameters are those of `nn.Linear(width, num_classes)`, with the same names and initial values. With
    p the softmax of the logits of a token, y its target and c the class weights, the loss of the token is

        (1 - label_smoothing) c[y] (-log p[y]) + label_smoothing / num_classes sum_v c[v] (-log p[v])
            + z_loss logsumexp(logits)^2

    times the weight of the token. The sum of the `Loss` adds up the tokens whose target is not
    `ignore_index`; its weight adds up their weights times c[y]. So without weights of tokens and `z_loss`,
    sum / weight is the mean of `torch.nn.functional.cross_entropy`.

    The logits of 256 tokens exist at a time. The gradients are computed with them in the forward, so until
    the backward only gradients of the size of `hidden` and of the parameters are kept (the method of Liger
    Kernel, arXiv 2410.10989, without its kernels). A second derivative is an error. Products are computed
    in the format of autocast, or else of `hidden`; the softmax, all sums and the kept gradients in float32 or
    better. docs/numerics.md bounds the errors.

    Call it in the forward of the model, where every reducer finds its parameters. Under `torch.compile` it
    breaks the graph.

    Args:
        width: size of the last dimension of `hidden`.
        num_classes: size of the vocabulary.
        bias: whether the logits have a bias.
        ignore_index: the target of tokens that do not count.
        label_smoothing: the part of each target that is spread over all classes, from 0 to 1.
        class_weights: float [num_classes]; None weighs all classes alike.
        z_loss: coefficient of the squared logsumexp, which keeps logits small; 1e-4 in PaLM
            (arXiv 2204.02311).

    Raises:
        TaskError: if `label_smoothing`, `z_loss` or the shape of `class_weights` is impossible.
    """

    class_weights: torch.Tensor

    def __init__(
        self,
        width: int,
        num_classes: int,
        *,
        bias: bool = True,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        class_weights: torch.Tensor | None = None,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing <= 1:
            raise TaskError(
                f"label_smoothing of LinearCrossEntropy must be from 0 to 1: got {label_smoothing}."
            )
        if not z_loss >= 0:
            raise TaskError(f"z_loss of LinearCrossEntropy must be 0 or more: got {z_loss}.")
        if class_weights is None:
            class_weights = torch.ones(num_classes)
        if class_weights.shape != (num_classes,):
            raise TaskError(
                f"class_weights of LinearCrossEntropy must be [{num_classes}], one for each class: "
                f"got {list(class_weights.shape)}."
            )
        linear = nn.Linear(width, num_classes, bias=bias)
        self.weight, self.bias = linear.weight, linear.bias
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss
        self.register_buffer("class_weights", class_weights, persistent=False)

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> Loss:
        """Return the loss of tokens, whose sum has a gradient for `hidden` and for the parameters.

        Args:
            hidden: [tokens, width].
            targets: int64 [tokens]: the class of each token, or `ignore_index`.
            weights: [tokens]: how much each token counts; 1 by default. They get no gradient.

        Raises:
            TaskError: if the shapes are others, or `weights` asks for a gradient.
        """
        width = self.weight.shape[1]
        tokens = hidden.shape[:1]
        if hidden.shape != (*tokens, width) or targets.shape != tokens:
            raise TaskError(
                f"LinearCrossEntropy takes hidden [tokens, {width}] and targets [tokens]: got "
                f"{list(hidden.shape)} and {list(targets.shape)}. "
                "Of sequences, give hidden.flatten(0, 1) and targets.flatten()."
            )
        if weights is not None and (weights.shape != tokens or weights.requires_grad):
            raise TaskError(
                f"weights of LinearCrossEntropy must be {list(tokens)}, one for each token, without a "
                f"gradient: got {list(weights.shape)}, requires_grad={weights.requires_grad}. "
                "Give weights.detach()."
            )
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        counts = targets != self.ignore_index
        classes = targets.where(counts, 0)
        token_weights = counts.to(dtype) if weights is None else weights.to(dtype).where(counts, 0)
        class_weights = self.class_weights.to(dtype)
        of_tokens = Targets(classes, token_weights, class_weights, self.label_smoothing, self.z_loss)
        total = chunked_loss(hidden, self.weight, self.bias, of_tokens)
        return Loss(total, (token_weights * class_weights[classes]).sum())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return whole logits [..., num_classes] of `hidden` [..., width], to rank or to draw from."""
        return F.linear(hidden, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Describe the options, as `print(model)` shows them."""
        num_classes, width = self.weight.shape
        return (
            f"width={width}, num_classes={num_classes}, bias={self.bias is not None}, "
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, z_loss={self.z_loss}"
        )
