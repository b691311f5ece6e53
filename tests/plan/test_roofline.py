"""The roofline, the devices and the assumptions: the sheet's figures come out of the formulas."""

import pytest

from forerun.errors import ArgumentError
from forerun.plan.assumptions import (
    DEVICES,
    FREE_PASS,
    HOT,
    TEXTS,
    FreeVerification,
    KeyValues,
    Roofline,
    Size,
    assume_alpha,
    find_device,
    find_text,
    parse_dtype,
)
from forerun.plan.theory import expected_tokens_per_pass

BALANCE = {"3090": 76, "a100": 153, "4090": 164, "h100": 295, "h200": 206, "b200": 281}
"""Tokens in a pass at the end of the free region, bf16, peak figures (algorithms sheet, section 1.4)."""
LLAMA = Size(params=8e9)


def line(device: str = "h100", **more: object) -> Roofline:
    return Roofline(device=DEVICES[device], size=more.pop("size", LLAMA), **more)


@pytest.mark.parametrize("device", BALANCE)
def test_balance_points_are_those_of_the_sheet(device: str) -> None:
    assert line(device).balance == pytest.approx(BALANCE[device], abs=0.6)
    assert line(device, dtype="int8").balance == pytest.approx(BALANCE[device] / 2, abs=0.6)
    assert line(device, dtype="int4").balance == pytest.approx(BALANCE[device] / 4, abs=0.6)


def test_the_processor_lies_where_it_was_measured() -> None:
    assert 16 <= line("cpu").balance <= 32


def test_a_plain_pass_reads_the_weights_and_a_wide_one_computes() -> None:
    found = line("a100", compute_efficiency=1.0, bandwidth_efficiency=1.0)
    assert found.pass_ms(1) == pytest.approx(1e3 * 16e9 / 2.039e12)
    assert found.pass_ms(1000) == pytest.approx(1e3 * 2 * 8e9 * 1000 / 312e12)
    assert found.terms(1).intensity == pytest.approx(1.0)


def test_the_free_width_is_half_of_the_peak_balance_and_is_shared_by_the_batch() -> None:
    found = line("h100")
    assert found.free_nodes() == pytest.approx(FREE_PASS * 295 / 2, abs=1)
    assert found.free_nodes(rows=8) == found.free_nodes() // 8
    assert found.pass_ms(found.free_nodes()) <= FREE_PASS * found.pass_ms(1) < found.pass_ms(found.free_nodes() + 1)


def test_more_devices_divide_both_terms() -> None:
    one, eight = line(tp=1), line(tp=8)
    assert eight.pass_ms(1) == pytest.approx(one.pass_ms(1) / 8)
    assert eight.balance == one.balance and eight.fits(1, 0) and not line(size=Size(params=70e9)).fits(1, 0)


def test_a_long_context_keeps_a_large_batch_bound_by_memory() -> None:
    kv = KeyValues(layers=32, kv_heads=8, head_dim=128)
    assert kv.bytes_per_token == 2 * 32 * 8 * 128 * 2
    short, long = line(kv=kv), line(kv=kv)
    ratio_short = short.pass_ms(5, 128, 100) / short.pass_ms(1, 128, 100)
    ratio_long = long.pass_ms(5, 128, 32_000) / long.pass_ms(1, 128, 32_000)
    assert ratio_long < 1.1 < ratio_short
    heavy = line(kv=KeyValues(layers=32, kv_heads=8, head_dim=128, heads=32))
    assert heavy.terms(1, 1, 1000).operations == 2 * 8e9 + 4 * 32 * 32 * 128 * 1000


class TestMixtureOfExperts:
    MOE = Size(params=30e9, active_params=3e9, experts=128, experts_per_token=8)

    def test_the_weights_add_up(self) -> None:
        moe = self.MOE
        assert moe.shared + 128 * moe.expert == pytest.approx(30e9)
        assert moe.shared + 8 * moe.expert == pytest.approx(3e9)

    def test_experts_touched_grow_with_the_tokens(self) -> None:
        moe = self.MOE
        assert moe.touched(1) == pytest.approx(3e9)
        assert moe.touched(2) == pytest.approx(moe.shared + 128 * (1 - (1 - 8 / 128) ** 2) * moe.expert)
        assert moe.touched(10_000) == pytest.approx(30e9)

    def test_verification_is_dear_at_batch_one_and_cheaper_at_moderate_batches(self) -> None:
        found = line(size=self.MOE)

        def v(rows: int) -> float:
            return found.pass_ms(5, rows) / found.pass_ms(1, rows)

        assert v(1) > 2 and v(32) < 1.5 and v(32) < v(4) and v(4096) > v(32)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"active_params": 3e9},
            {"active_params": 3e9, "experts": 128},
            {"active_params": 40e9, "experts": 128, "experts_per_token": 8},
            {"active_params": 3e9, "experts": 8, "experts_per_token": 8},
            {"active_params": 1e9, "experts": 128, "experts_per_token": 8},
        ],
    )
    def test_nonsense_is_refused(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ArgumentError):
            Size(params=30e9, **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Size(params=0),
        lambda: Size(params=float("nan")),
        lambda: line(tp=0),
        lambda: KeyValues(layers=0, kv_heads=1, head_dim=1),
    ],
)
def test_impossible_sizes_are_refused(wrong: object) -> None:
    with pytest.raises(ArgumentError):
        wrong()


def test_names_of_devices() -> None:
    for name in ("H100", "h100-sxm", "NVIDIA H100 SXM5", "a100-80gb", "RTX 4090", "mi300x", "AMD Instinct MI300X"):
        assert find_device(name).name
    for name, near in (("h10", "h100"), ("l40x", "l40s"), ("rtx3091", "3090")):
        with pytest.raises(ArgumentError, match=f"Did you mean '{near}'"):
            find_device(name)


def test_names_of_dtypes() -> None:
    assert [parse_dtype(name) for name in ("bf16", "auto", "FP8", "int4")] == ["bfloat16", "bfloat16", "fp8", "int4"]
    with pytest.raises(ArgumentError, match="unknown dtype 'bf61'"):
        parse_dtype("bf61")


def test_free_verification_is_free() -> None:
    assert FreeVerification().pass_ms(64, 128, 4096) == FreeVerification().pass_ms(1) == 1.0


class TestAssumptions:
    def test_the_published_length_comes_out_again(self) -> None:
        for name, kind in TEXTS.items():
            alpha, notes = assume_alpha(name, 0.0)
            assert expected_tokens_per_pass(alpha, kind.k) == pytest.approx(kind.tokens) and kind.source in notes[0]

    def test_creative_and_translated_text_accept_less_than_code_and_chat(self) -> None:
        alphas = {name: assume_alpha(name, 0.0)[0] for name in TEXTS}
        assert alphas["creative"] < alphas["code"] and alphas["translation"] < alphas["rag"] < alphas["chat"]

    def test_temperature_lowers_acceptance_and_says_so(self) -> None:
        cold, warm, hot = (assume_alpha("chat", t)[0] for t in (0.0, 0.5, 1.0))
        assert cold > warm > hot == assume_alpha("chat", 1.5)[0]
        assert expected_tokens_per_pass(hot, 3) == pytest.approx(2.60 * HOT)
        assert len(assume_alpha("chat", 0.0)[1]) == 1 and "temperature 0.5" in assume_alpha("chat", 0.5)[1][1]

    def test_what_there_are_no_figures_for(self) -> None:
        with pytest.raises(ArgumentError, match="Did you mean 'summary'"):
            find_text("summaries")
        with pytest.raises(ArgumentError):
            assume_alpha("chat", -1.0)
