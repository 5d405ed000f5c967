import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lanewise.processes.device.live_storage import LiveStorage


def test_what_is_made_counts_until_nobody_holds_it():
    with LiveStorage() as live:
        first = torch.zeros(100)
        view = first[10:20]
        second = first + 1
        assert live.live_bytes == 800
        del first
        assert live.live_bytes == 800  # the view has it
        del view
        assert live.live_bytes == 400
        del second
    assert (live.live_bytes, live.peak_bytes) == (0, 800)


def test_what_was_there_before_is_not_counted_nor_are_its_views():
    weight = torch.zeros(10, 10)
    with LiveStorage() as live:
        transposed = weight.t()
        weight.add_(1)
        assert live.live_bytes == 0
        live.count([weight, transposed])
        assert live.live_bytes == 400


def test_the_peak_is_that_since_it_was_taken():
    with LiveStorage() as live:
        large = torch.zeros(1000)
        del large
        assert live.take_peak() == 4000
        assert live.take_peak() == 0
        small = torch.zeros(10)
    assert live.take_peak() == small.nbytes


def test_a_size_that_changed_without_an_operation_is_taken_when_it_is_told():
    with LiveStorage() as live:
        gathered = torch.zeros(100)
        gathered.untyped_storage().resize_(0)
        live.note_size(gathered.untyped_storage())
        assert live.live_bytes == 0


def forward_and_backward():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Dropout(0.5), torch.nn.Linear(30, 5))
    with LiveStorage() as live:
        model(torch.ones(7, 20)).sum().backward()
    return live.live_bytes, live.peak_bytes


def test_fake_tensors_take_as_much_as_real_ones():
    real = forward_and_backward()
    with FakeTensorMode():
        assert forward_and_backward() == real
    assert real[0] == 4 * (20 * 30 + 30 + 30 * 5 + 5)  # the gradients
