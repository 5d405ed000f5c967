"""Losses and gradients are those of whole logits, within a bound; the whole logits never exist."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lanewise.errors import TaskError
from lanewise.nn import LinearCrossEntropy, chunked_loss

IGNORED = 1


@dataclass(frozen=True)
class Case:
    """What to compute, and in which format."""

    num_tokens: int
    width: int
    num_classes: int
    seed: int = 0
    scale: float = 1.0
    bias: bool = True
    has_weights: bool = False
    has_class_weights: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dtype: torch.dtype = torch.float32

    def build(self) -> tuple[LinearCrossEntropy, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the module, the hidden states, the targets and the weights."""
        torch.manual_seed(self.seed)
        module = LinearCrossEntropy(
            self.width,
            self.num_classes,
            bias=self.bias,
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
            class_weights=torch.rand(self.num_classes) if self.has_class_weights else None,
            z_loss=self.z_loss,
        )
        hidden = (self.scale * torch.randn(self.num_tokens, self.width)).requires_grad_()
        targets = torch.randint(self.num_classes, (self.num_tokens,))
        return module, hidden, targets, torch.rand(self.num_tokens) if self.has_weights else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Enter the format."""
        return nullcontext() if self.dtype is torch.float32 else torch.autocast("cpu", self.dtype)


def whole_loss(
    module: LinearCrossEntropy, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Compute the sum as one would write it by hand."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(
        logits,
        targets,
        weight=module.class_weights.to(logits.dtype),
        ignore_index=IGNORED,
        label_smoothing=module.label_smoothing,
        reduction="none",
    )
    losses = losses + (targets != IGNORED) * module.z_loss * logits.logsumexp(1) ** 2
    return (losses if weights is None else losses * weights).sum()


def gradients(total: torch.Tensor, *of: torch.Tensor) -> list[torch.Tensor]:
    """Return the sum and its gradients."""
    return [total.detach(), *torch.autograd.grad(total, of)]


def exact_values_and_bounds(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the sum and its gradients in float64, and the bounds of docs/numerics.md."""
    module, hidden, targets, weights = case.build()
    rounded = (
        one.detach().to(case.dtype).double().requires_grad_() for one in (hidden, *module.parameters())
    )
    hidden, weight, *biases = rounded
    token_weights = (targets != IGNORED).double() * (1 if weights is None else weights.double())
    logits = F.linear(hidden, weight, *biases)
    exact = gradients(whole_loss(module, logits, targets, weights), hidden, weight, *biases)

    eps = torch.finfo(torch.float32).eps / 2
    unit = torch.finfo(case.dtype).eps / 2
    with torch.no_grad():
        largest = F.linear(hidden.abs(), weight.abs(), *(one.abs() for one in biases)).amax(1)
        logit_errors = (unit + (case.width + 1) * eps) * largest
        roundings = (case.num_classes + case.num_tokens + 16) * eps
        class_weights = module.class_weights.double()
        smoothing = case.label_smoothing / case.num_classes
        on_target = (1 - case.label_smoothing) * class_weights[targets]
        on_all = on_target + smoothing * class_weights.sum()
        logsumexps = logits.logsumexp(1)
        on_softmax = on_all + 2 * case.z_loss * (1 + logsumexps.abs())

        terms = on_softmax * 2 * logit_errors
        terms += roundings * (3 * on_all * largest.clamp(min=1) + on_all * logsumexps.abs())
        terms += roundings * case.z_loss * logsumexps**2
        loss_bound = (token_weights * terms).sum()

        sizes = on_softmax[:, None] * logits.softmax(1) + smoothing * class_weights
        sizes += on_target[:, None] * F.one_hot(targets, case.num_classes)
        relative = torch.expm1(2 * logit_errors) + 3 * unit + roundings
        errors = (token_weights * relative * (1 + relative))[:, None] * sizes
        bounds = [loss_bound, errors @ weight.abs(), errors.T @ hidden.abs(), *[errors.sum(0)] * len(biases)]
    return exact, bounds


def require_within_the_bounds(case: Case, computed: list[torch.Tensor]) -> None:
    exact, bounds = exact_values_and_bounds(case)
    for one, value, bound in zip(computed, exact, bounds, strict=True):
        assert torch.all((one.double() - value).abs() <= bound)


def compute(case: Case) -> list[torch.Tensor]:
    module, hidden, targets, weights = case.build()
    with case.autocast():
        loss = module(hidden, targets, weights)
    return gradients(loss.sum, hidden, *module.parameters())


def compute_whole(case: Case) -> list[torch.Tensor]:
    module, hidden, targets, weights = case.build()
    with case.autocast():
        total = whole_loss(module, module.logits(hidden), targets, weights)
    return gradients(total, hidden, *module.parameters())


shares = st.floats(0, 1)
cases = st.builds(
    Case,
    num_tokens=st.integers(0, 13),
    width=st.integers(1, 9),
    num_classes=st.integers(IGNORED + 1, 20),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    bias=st.booleans(),
    has_weights=st.booleans(),
    has_class_weights=st.booleans(),
    label_smoothing=st.just(0.0) | shares,
    z_loss=st.just(0.0) | shares,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)


@given(case=cases)
def test_chunks_and_whole_logits_are_both_within_the_bounds(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_loss, "CHUNK_TOKENS", 4)
        require_within_the_bounds(case, compute(case))
    require_within_the_bounds(case, compute_whole(case))


ALL_OPTIONS = Case(
    num_tokens=600,
    width=8,
    num_classes=50,
    has_weights=True,
    has_class_weights=True,
    label_smoothing=0.1,
    z_loss=0.01,
)


def test_chunks_of_their_true_size_are_within_the_bounds():
    require_within_the_bounds(ALL_OPTIONS, compute(ALL_OPTIONS))


@pytest.mark.parametrize(
    "other",
    [
        {"label_smoothing": 0.1001},
        {"z_loss": 0.01001},
        {"has_class_weights": False},
        {"has_weights": False},
    ],
    ids=str,
)
def test_another_option_is_out_of_the_bounds_so_they_can_fail(other):
    with pytest.raises(AssertionError):
        require_within_the_bounds(ALL_OPTIONS, compute(replace(ALL_OPTIONS, **other)))


def test_small_gradients_survive_fp16_until_the_loss_scale_is_multiplied():
    scale = 2.0**-20
    case = replace(ALL_OPTIONS, dtype=torch.float16)
    module, hidden, targets, weights = case.build()
    hidden = hidden.detach().half().requires_grad_()
    with case.autocast():
        small = module(hidden, targets, weights * scale).sum
        large = module(hidden, targets, weights).sum
    inputs = [hidden, *module.parameters()]
    for one, other in zip(
        torch.autograd.grad(small / scale, inputs), gradients(large, *inputs)[1:], strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)


class Operators(TorchDispatchMode):
    """Notes which operators run, and how large their largest output is."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        tensors = [one for one in tree_leaves(returned) if isinstance(one, torch.Tensor)]
        self.largest = max([self.largest, *(one.numel() for one in tensors)])
        return returned


def test_no_tensor_is_larger_than_the_logits_of_a_chunk():
    module, hidden, targets, weights = ALL_OPTIONS.build()
    with Operators() as operators:
        module(hidden, targets, weights).sum.backward()
    assert operators.largest == chunked_loss.CHUNK_TOKENS * ALL_OPTIONS.num_classes


@pytest.mark.parametrize(
    ("trained", "num_products"),
    [({"hidden", "weight", "bias"}, 3), ({"hidden"}, 2), ({"weight"}, 2), ({"bias"}, 1), (set(), 1)],
)
def test_only_the_gradients_that_are_needed_are_computed(trained, num_products):
    module, hidden, targets, weights = ALL_OPTIONS.build()
    expected = dict(zip(("sum", "hidden", "weight", "bias"), compute(ALL_OPTIONS), strict=True))
    tensors = {"hidden": hidden, **dict(module.named_parameters())}
    for name, one in tensors.items():
        one.requires_grad_(name in trained)
    with Operators() as operators:
        total = module(hidden, targets, weights).sum
    assert total.requires_grad == bool(trained)
    assert sum(name in {"mm", "addmm", "addmm_"} for name in operators.names) == 3 * num_products
    if trained:
        total.backward()
    for name, one in tensors.items():
        assert one.grad is None if name not in trained else torch.equal(one.grad, expected[name])


def test_without_gradients_there_is_one_product_for_a_chunk():
    module, hidden, targets, weights = ALL_OPTIONS.build()
    with torch.no_grad(), Operators() as operators:
        total = module(hidden, targets, weights).sum
    assert operators.names.count("addmm") == 3
    assert not {"mm", "addmm_"} & set(operators.names)
    assert torch.equal(total, compute(ALL_OPTIONS)[0])


def test_a_backward_may_be_repeated():
    module, hidden, targets, _ = ALL_OPTIONS.build()
    total = module(hidden, targets).sum
    (once,) = torch.autograd.grad(total, hidden, retain_graph=True)
    (twice,) = torch.autograd.grad(2 * total, hidden)
    assert torch.equal(2 * once, twice)


def test_a_second_derivative_is_refused_and_not_taken_for_zero():
    module, hidden, targets, _ = ALL_OPTIONS.build()
    with pytest.raises(TaskError, match=r"no second derivative, .*head\.logits"):
        torch.autograd.grad(module(hidden, targets).sum, hidden, create_graph=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_breaks_its_graph_and_computes_the_same():
    module, hidden, targets, weights = ALL_OPTIONS.build()

    def scaled_loss(hidden: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = module(2 * hidden, targets, weights).sum
        return total / 2

    compiled = torch.compile(scaled_loss, backend="eager")
    for one, other in zip(
        gradients(compiled(hidden), hidden, *module.parameters()),
        gradients(scaled_loss(hidden), hidden, *module.parameters()),
        strict=True,
    ):
        assert torch.equal(one, other)
