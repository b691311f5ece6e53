"""What differs from device to device."""

import pytest
import torch

from forerun.devices import attention_kernels, time_in_turns


def test_cudnn_plans_no_attention_of_a_pass() -> None:
    """On CUDA alone, and only while a pass runs."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with attention_kernels(torch.device("cuda")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
    with attention_kernels(torch.device("cpu")):
        assert torch.backends.cuda.cudnn_sdp_enabled() is before
    assert torch.backends.cuda.cudnn_sdp_enabled() is before


def test_what_is_timed_on_one_thread_leaves_torch_its_threads() -> None:
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        time_in_turns([lambda: seen.append(torch.get_num_threads())], 2, threads=1)
        time_in_turns([lambda: seen.append(torch.get_num_threads())], 1)
        with pytest.raises(ZeroDivisionError):
            time_in_turns([lambda: 1 / 0], 1, threads=1)
        assert (*seen, torch.get_num_threads()) == (1, 1, 3, 3)
    finally:
        torch.set_num_threads(before)
