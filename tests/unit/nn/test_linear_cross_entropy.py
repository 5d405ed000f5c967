"""A linear layer that returns its loss: which tokens count, which parameters it has, what it refuses."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lanewise.errors import TaskError
from lanewise.nn import LinearCrossEntropy


def test_sum_over_weight_is_the_mean_of_torch():
    class_weights = torch.tensor([1.0, 0.5, 2.0, 0.25])
    options = {"ignore_index": 0, "label_smoothing": 0.2}
    module = LinearCrossEntropy(8, 4, class_weights=class_weights, **options)
    hidden, targets = torch.randn(20, 8), torch.arange(20) % 4
    loss = module(hidden, targets)
    expected = F.cross_entropy(module.logits(hidden), targets, weight=class_weights, **options)
    torch.testing.assert_close(loss.sum / loss.weight, expected)


def test_the_weight_counts_tokens_by_their_weights_and_those_of_their_classes():
    module = LinearCrossEntropy(8, 3, class_weights=torch.tensor([1.0, 10.0, 100.0]))
    targets, weights = torch.tensor([0, 1, -100, 2]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert module(torch.zeros(4, 8), targets, weights).weight == 1 + 2 * 10 + 4 * 100


def test_ignored_tokens_alone_weigh_nothing_and_change_nothing():
    module = LinearCrossEntropy(8, 3, z_loss=0.1)
    loss = module(torch.randn(4, 8), torch.full((4,), -100), torch.full((4,), float("nan")))
    loss.sum.backward()
    assert (loss.sum, loss.weight) == (0, 0)
    assert not module.weight.grad.any()


def loss_and_gradients(function, module, hidden, targets):
    hidden = hidden.clone().requires_grad_()
    loss = function(hidden, targets)
    return [loss, *torch.autograd.grad(loss, [hidden, *module.parameters()])]


@pytest.mark.parametrize("options", [{}, {"class_weights": torch.tensor([1.0, 0.5, 2.0])}])
def test_a_forbidden_class_and_ignored_tokens_that_are_not_finite_do_no_harm(options):
    """They were NaN where torch's loss is finite: 0 times infinity, as ignored tokens have the class 0."""
    module = LinearCrossEntropy(8, 3, **options)
    with torch.no_grad():
        module.bias[0] = -torch.inf
    hidden, targets = torch.randn(300, 8), torch.arange(300) % 2 + 1
    targets[::3] = -100
    expected = loss_and_gradients(
        lambda hidden, targets: F.cross_entropy(
            module.logits(hidden), targets, options.get("class_weights"), reduction="sum"
        ),
        module,
        hidden,
        targets,
    )
    hidden[::6], hidden[3::6] = torch.nan, torch.inf  # of torch's loss alone the value would stay finite
    found = loss_and_gradients(lambda *given: module(*given).sum, module, hidden, targets)
    torch.testing.assert_close(found, expected)


def test_the_z_loss_is_the_squared_logsumexp():
    hidden, targets = torch.randn(20, 8), torch.arange(20) % 4
    module = LinearCrossEntropy(8, 4)
    plain = module(hidden, targets).sum
    module.z_loss = 0.5
    expected = plain + 0.5 * module.logits(hidden).logsumexp(1).square().sum()
    torch.testing.assert_close(module(hidden, targets).sum, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_its_state_and_first_weights_are_those_of_a_linear_layer(bias):
    torch.manual_seed(0)
    linear = nn.Linear(8, 4, bias=bias)
    torch.manual_seed(0)
    module = LinearCrossEntropy(8, 4, bias=bias, class_weights=torch.ones(4))
    torch.testing.assert_close(dict(module.state_dict()), dict(linear.state_dict()), rtol=0, atol=0)


def test_a_tied_weight_is_one_parameter_with_the_gradients_of_both_its_uses():
    model = nn.ModuleDict({"words": nn.Embedding(4, 8), "head": LinearCrossEntropy(8, 4, bias=False)})
    model["head"].weight = model["words"].weight
    assert [name for name, _ in model.named_parameters()] == ["words.weight"]
    words, targets = torch.arange(4), torch.arange(4).roll(1)
    model["head"](model["words"](words), targets).sum.backward()
    weight = model["words"].weight
    (expected,) = torch.autograd.grad(
        F.cross_entropy(F.linear(weight[words], weight), targets, reduction="sum"), weight
    )
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.5}, "label_smoothing of .* from 0 to 1: got 1.5"),
        ({"z_loss": -1.0}, "z_loss of .* 0 or more: got -1.0"),
        ({"z_loss": float("nan")}, "z_loss of .* 0 or more: got nan"),
        ({"class_weights": torch.ones(3)}, r"class_weights of .* must be \[4\].* got \[3\]"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(TaskError, match=message):
        LinearCrossEntropy(8, 4, **options)


@pytest.mark.parametrize(
    ("hidden", "targets", "weights", "message"),
    [
        ((2, 5, 8), (2, 5), None, r"got \[2, 5, 8\] and \[2, 5\]. Of sequences, give hidden.flatten"),
        ((5, 7), (5,), None, r"takes hidden \[tokens, 8\] and targets \[tokens\]: got \[5, 7\] and \[5\]"),
        ((5, 8), (4,), None, r"got \[5, 8\] and \[4\]"),
        ((5, 8), (5,), torch.ones(4), r"weights of .* must be \[5\].* got \[4\]"),
        ((5, 8), (5,), torch.ones(5, requires_grad=True), r"requires_grad=True. Give weights.detach\(\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(hidden, targets, weights, message):
    module = LinearCrossEntropy(8, 4)
    with pytest.raises(TaskError, match=message):
        module(torch.zeros(hidden), torch.zeros(targets, dtype=torch.int64), weights)


def test_it_shows_its_options():
    assert "width=8, num_classes=4, bias=True, ignore_index=0" in repr(
        LinearCrossEntropy(8, 4, ignore_index=0)
    )
