"""What differs from device to device."""

import torch

from forerun.devices import attention_kernels


def test_cudnn_plans_no_attention_of_a_pass() -> None:
    """On CUDA alone, and only while a pass runs."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with attention_kernels(torch.device("cuda")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
    with attention_kernels(torch.device("cpu")):
        assert torch.backends.cuda.cudnn_sdp_enabled() is before
    assert torch.backends.cuda.cudnn_sdp_enabled() is before
