"""Options that make no sense are refused by the names of drafter and option, before anything is built."""

from typing import Any

import pytest

from forerun.drafters import check_options
from forerun.errors import ArgumentError

NEEDED: dict[str, dict[str, Any]] = {
    **{method: {"model": "x"} for method in ("draft_model", "pard", "slem", "tli", "eagle3")},
    "cascade": {"model": "x", "inner": "ngram"},
    "first_of": {"drafters": ["ngram", "suffix"]},
    "merge": {"drafters": ["ngram", "suffix"]},
    "rest": {"datastore": "x"},
    "early_exit": {"exit_layer": 1},
    "skip_layers": {"skip": ["1.attn"]},
}
"""What a drafter must be given."""
WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "ngram": {
        **dict.fromkeys(("num_speculative_tokens", "prompt_lookup_min", "min_hits"), (0,)),
        "match": ("latest",),
        "min_token_prob": (1.5, -0.1),
    },
    "lookahead": {**dict.fromkeys(("window", "guesses", "pool_keys"), (0,)), "level": (1,)},
    "suffix": {
        **dict.fromkeys(("num_speculative_tokens", "min_match", "nodes"), (0,)),
        **{"max_tree_depth": (1,), "max_spec_factor": (-1, 0), "min_token_prob": (1.5,)},
        **{"max_cached_requests": (1,), "max_cached_tokens": (3,)},
    },
    "draft_model": {
        **{"draw": ("idd",), "num_speculative_tokens": (0,), "shape": ((), (2, 0)), "temperature": (0.0,)},
        "stop": ("svp",),
    },
    "pard": {"nodes": (0,), "stop": ("svip",), "shape": ((2, 0),), "draw": ("random",)},
    "quantized_self": {"bits": (3,), "num_speculative_tokens": (0,)},
    "slem": {"look_behind": (0,), "num_speculative_tokens": (0,)},
    "tli": {"min_shared": (-1,), "draw": ("idd",)},
    "rest": {**dict.fromkeys(("num_speculative_tokens", "min_match", "max_hits"), (0,)), "max_match": (1, 65)},
    "recycling": dict.fromkeys(("num_speculative_tokens", "nodes", "top_k"), (0,)),
    "early_exit": {"exit_layer": (None,), "draw": ("greedy",)},
    "skip_layers": {
        **dict.fromkeys(("stop_below", "target_acceptance"), (0.0, 1.0)),
        **{"draw": ("idd",), "shape": ((2, 0),)},
    },
    "eagle3": {
        **dict.fromkeys(("top_k", "nodes"), (0,)),
        **{"draw": ("idd",), "temperature": (0.0,), "stop_below": (1.0,), "shape": ((2, 0),)},
    },
    "first_of": {"min_tokens": (-1, (1.0, 2.0)), "drafters": ([], [{"method": "ngram"}], "ngram")},
    "merge": {"nodes": (0,), "drafters": ([], {"method": "ngram"})},
    "cascade": {"num_speculative_tokens": (0,), "tail": (-1,), "inner_nodes": (0,)},
    "prediction": {"num_speculative_tokens": (0,)},
    "jacobi": {"num_speculative_tokens": (0,)},
}
"""Drafter -> option -> values that it does not take."""


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [(method, option, value) for method, own in WRONG.items() for option, values in own.items() for value in values],
)
def test_a_value_that_makes_no_sense_is_refused(method: str, option: str, value: Any) -> None:
    options = {**NEEDED.get(method, {}), option: value}
    if value is None:
        del options[option]
    name = "draft head" if method == "eagle3" else method
    with pytest.raises(ArgumentError, match=rf"(?s)^(drafter )?'?{name}'?\b.*{option}"):
        check_options(method, options)


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("ngram", {"prompt_lookup_max": 1, "prompt_lookup_min": 2}, r"prompt_lookup_max \(1\) is below"),
        ("draft_model", {"draw": "idd"}, "Did you mean 'iid'"),
        *(
            ("draft_model", {"stop": stop, "stop_threshold": threshold}, f"threshold of stop={stop}")
            for stop, thresholds in {**dict.fromkeys(("confidence", "adaedl"), (-0.1, 1.1)), "svip": (-1.0,)}.items()
            for threshold in thresholds
        ),
        ("draft_model", {"stop": "never", "stop_threshold": 0.5}, "threshold of stop=never"),
        ("pard", {"stop": "svip"}, "stop=svip ends chains and fixed trees"),
        ("skip_layers", {"skip": None}, "needs either skip"),
        ("skip_layers", {"search": "swift"}, "needs either skip"),
        ("skip_layers", {"skip": None, "search": "swft"}, "Did you mean 'swift'"),
        ("skip_layers", {"skip": None, "search": "swift", "skip_ratio": 1.5}, "skip_ratio must lie between"),
        ("skip_layers", {"skip": None, "search": "swift", "search_window": 0}, "search_window must be at least 1"),
        ("first_of", {"drafters": [{"method": "ngrm"}, "ngram"]}, "ngram"),
        ("first_of", {"drafters": [{"method": "ngram"}]}, 'first_of: .*"method": "'),
        ("first_of", {"drafters": ["ngram", 3]}, "first_of: a drafter is a name, or"),
        ("merge", {"drafters": ["ngram", {}]}, "merge: a drafter is a name, or"),
        ("eagle3", {"shape": (2, 2), "top_k": 3}, "shape and top_k exclude each other"),
        ("eagle3", {"top_k": 2, "draw": "iid"}, "nodes of a dynamic tree are deterministic"),
        ("cascade", {"inner": 3}, "cascade: a drafter is a name, or"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(method: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        check_options(method, {**NEEDED.get(method, {}), **options})
