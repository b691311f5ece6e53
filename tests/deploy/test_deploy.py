"""``forerun deploy``: the commands of every engine, what each cannot do, and files that fit the published schemas."""

import dataclasses
import importlib
import itertools
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cli.conftest import Ran, forerun
from forerun.control.config import SpeculativeConfig
from forerun.control.costs import DraftCost
from forerun.deploy.launch import ENGINES, DeployRequest, Forecast, find_engine
from forerun.deploy.sequences import Sequences, read_options
from forerun.errors import ArgumentError
from forerun.heads.engines import Launch, engines_for
from forerun.heads.files import HeadCheckpoint, write_head
from forerun.plan import theory
from forerun.plan.assumptions import DEVICES, Roofline, Size
from forerun.plan.planner import PlanLoad
from forerun.shipped import resolve
from heads.samples import FACTS, PLAIN, TARGET, sample
from launch_lines import GOLDEN, HEAD, MERGED, SMALL, SPREAD
from training.ttt import dflash

__all__ = ["forerun"]
Run = Callable[..., Ran]
PAPER = ("--text", "chat", "--params", "8e9", "--device", "h100", "--max-batch", "512")
SUFFIX_AND_MTP = ("--drafter", "merge", "--drafter-option", 'drafters=["suffix", "mtp"]')
FOR_DEMO = dataclasses.replace(
    PLAIN, target_hidden_size=384, own_embedding=True, vocab_size=8192, draft_vocab_size=64, boundaries=(2, 4, 5)
)


@pytest.mark.parametrize("arguments", GOLDEN, ids=lambda arguments: " ".join(arguments)[:60])
def test_the_command(forerun: Run, arguments: tuple[str, ...]) -> None:
    ran = forerun("deploy", *arguments)
    lines = [line for line in ran.out.splitlines() if not line.startswith("#")]
    assert ran.code == 0 and lines[0] == GOLDEN[arguments], ran


REFUSED: dict[tuple[str, ...], str] = {
    ("tgi", "m"): "unknown engine 'tgi'. There are vllm, sglang, trtllm, llamacpp, dynamo",
    ("vllm", "m", "--engine-version", "0.9.1"): "nothing is known of vLLM 0.9.1; known are 0.31.0, 0.32.0, 0.33.0",
    ("vllm", "m", "--drafter", "recycling"): "vLLM 0.33.0 has no counterpart of recycling; it has ngram, suffix",
    ("vllm", "m", "--drafter", "medusa", "--drafter-model", "o/h"): "vLLM 0.33.0 has no counterpart of medusa",
    ("trtllm", "m", "--drafter", "eagle", "--drafter-model", "o/h"): "no counterpart of eagle; it has ngram",
    ("llama.cpp", "m", "--drafter", "suffix"): "llama.cpp 0.5.0 has no counterpart of suffix",
    ("vllm", "m", "--drafter", "eagle3"): "eagle3 needs a model or head; name it with --drafter-model",
    ("vllm", "m", "--drafter", "draft_model", "--drafter-model", "o/eagle3-small"): "with 'eagle3' in it for a head",
    ("sglang", "m", "--drafter", "pard", "--drafter-model", "o/p"): "SGLang 0.5.23 has no counterpart of pard",
    ("vllm", "/data/dflash/glm", "--drafter", "mtp"): "with 'dflash' in it for a head",
    ("dynamo", "o/DSpark-m", "--drafter", "mtp"): "with 'dspark' in it for a head",
    ("vllm", "m", "--drafter", "mtp", "--drafter-model", "o/h"): "in the target's own checkpoint",
    ("vllm", "m", "--drafter", "ngram", "--drafter-option", "x=1"): "drafter 'ngram' has no option 'x'",
    ("vllm", "m", "--drafter", "ngram", "--rule", "typical"): "vLLM has no counterpart of the rule 'typical'",
    ("llamacpp", "m", *SMALL, "--rule", "block"): "by its own rule: leave --rule out",
    ("sglang", "m", *SMALL, "--rule", "block"): "has the rule block for chains of EAGLE, EAGLE3, NEXTN only",
    ("sglang", "m", "--drafter", "dflash", "--drafter-model", "o/h", "--pp", "2"): "without pipeline parallelism only",
    ("trtllm", "m", *HEAD, "--pp", "2"): "without pipeline parallelism only",
    ("trtllm", "m", "--drafter", "ngram", "--rule", "token_rejection"): "not for NGram: leave --rule out",
    ("trtllm", "m", "--drafter", "suffix", "--rule", "token_rejection"): "not for SA: leave --rule out",
    ("trtllm", "m", *SUFFIX_AND_MTP, "--rule", "token_rejection"): "where its suffix automaton drafts before MTP",
    ("trtllm", "m", *HEAD, "--drafter-option", "top_k=40", "--rule", "token_rejection"): "trees of top_k up to 32",
    ("llamacpp", "m", "--nodes", "2", "--tp", "2"): "llama.cpp is deployed on one machine",
    ("vllm", "m", "--tp", "8", "--nodes", "2"): "2 machines need the first one's address: --head-address HOST",
    ("vllm", "m", "--tp", "3", "--nodes", "2"): "cannot be shared out evenly to 2 machines",
    ("vllm", "m", "--tp", "0"): "--tp, --pp and --nodes are at least 1",
    ("vllm", "m", "--port", "-5"): "--port is a number from 1 to 65535, got -5",
    ("llamacpp", "m.gguf", "--port", "70000"): "--port is a number from 1 to 65535, got 70000",
    ("vllm", "demo", "--drafter", "mtp"): "brings no MTP layers: its config.json has none of num_nextn_predict_layers",
    ("llamacpp", "demo", "--drafter", "mtp"): "brings no MTP layers",
    ("vllm", "m", *HEAD, "--device", "h100"): "what is accepted: give --text chat",
    ("vllm", "m", *HEAD, "--dtype", "fp8"): "what is accepted: give --text chat",
    ("vllm", "m", *HEAD, "--max-batch", "256"): "what is accepted: give --text chat",
    ("vllm", "m", *PAPER): "name a --drafter",
    ("vllm", "m", "--head-address", "h"): "give --nodes",
    ("sglang", "m", "--drafter", "prediction"): "bring no prediction to a plug-in",
    ("sglang", "m", *MERGED, "--adaptive"): "leave --adaptive out",
    ("vllm", "m", "--drafter", "merge", "--drafter-option", "drafters=[1, 2]"): "list of names",
    ("llamacpp", "o/x-GGUF", "--drafter", "eagle3", "--drafter-model", "demo-eagle3"): "name the target's directory",
    ("llamacpp", "m.gguf", "--drafter", "eagle3", "--drafter-model", "demo-eagle3"): "name the target's directory",
    ("vllm", "m", *HEAD, "--text", "chat"): "what does a pass cost? Give the target's --params 8e9",
    ("vllm", "m", *HEAD, *PAPER[:-1], "0"): "--max-batch must be at least 1",
    ("vllm", "m", *HEAD, *PAPER[2:], "--alpha", "0.01"): "no draft of up to 5 tokens is predicted to be faster",
    ("vllm", "m", "--run"): "vLLM is not installed here: there is no vllm on PATH",
    ("dynamo", "m", "--run", "--out", "{tmp}/out"): "Dynamo is not installed here: there is no python with dynamo",
    ("trtllm", "m", *HEAD, "--run"): "TensorRT-LLM reads trtllm.yaml: name a directory for it, --out DIR",
    ("vllm", "m", "--tp", "2", "--nodes", "2", "--head-address", "h", "--run"): "starts one machine's server",
    ("llamacpp", "demo", "--run"): "first, once: python convert_hf_to_gguf.py",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=lambda arguments: " ".join(arguments)[:60])
def test_refusals(forerun: Run, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    ran = forerun("deploy", *(word.format(tmp=tmp_path) for word in arguments))
    assert ran.code == 2 and REFUSED[arguments] in ran.err, ran


def test_an_unknown_version_is_written_for_with_force(forerun: Run) -> None:
    ran = forerun("deploy", "vllm", "m", "--engine-version", "0.99.0", "--force")
    assert ran.code == 0 and "nothing is known of vLLM 0.99.0: this is right for 0.33.0" in ran.err
    old = forerun("deploy", "vllm", "m", "--engine-version", "0.32.0", "--drafter", "medusa", "--drafter-model", "o/h")
    assert old.code == 0 and '"method": "medusa"' in old.out


@pytest.mark.parametrize(
    ("engine", "reported", "version"),
    [
        ("llamacpp", "2026-11", "2026-11"),
        ("llamacpp", "0.5.0", "0.5.0"),
        ("llamacpp", "0.5.0-dev (build 1, commit 0c1e570)", "0.5.0"),
        ("vllm", "0.32.0+cpu", "0.32.0"),
    ],
)
def test_a_version_is_what_the_engine_says_that_it_is(forerun: Run, engine: str, reported: str, version: str) -> None:
    ran = forerun("deploy", engine, "m", "--engine-version", reported, "--json")
    assert ran.code == 0 and json.loads(ran.out)["version"] == version


def test_several_machines(forerun: Run) -> None:
    where = ("--tp", "8", "--pp", "2", "--nodes", "2", "--head-address", "10.0.0.1")
    first, second = forerun("deploy", "vllm", "m", *where).out.splitlines()[1::2]
    assert first.endswith("--nnodes 2 --node-rank 0 --master-addr 10.0.0.1")
    assert second.endswith("--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --headless")
    first, second = forerun("deploy", "sglang", "m", *where).out.splitlines()[1::2]
    assert first.endswith("--dist-init-addr 10.0.0.1:20000 --nnodes 2 --node-rank 0") and second.endswith("-rank 1")


def load(alpha: float = 0.72, level_ms: float = 0.0) -> PlanLoad:
    line, draft = Roofline(device=DEVICES["h100"], size=Size(params=8e9)), DraftCost(fixed_ms=0.0, level_ms=level_ms)
    return PlanLoad(survival=theory.geometric(alpha, 16), cost=line, draft=lambda rows: draft)


def test_the_schedule_is_the_planners() -> None:
    forecast = Forecast(load=load(), max_batch=300)
    found = forecast.stretches(6)
    assert (found[0].first, found[-1].last) == (1, 300) and [one.k for one in found] == [6, 5, 4, 3, 2, 1, 0]
    for one, other in itertools.pairwise(found):
        assert other.first == one.last + 1
    for first, last, k in found:
        for rows in (first, last):
            speedups = [load().predict(length, rows).speedup for length in range(k + 1)]
            assert max(speedups) == speedups[k] or (k == 0 and max(speedups) < theory.WORTH)


def test_every_engine_takes_the_schedule_in_its_own_way(forerun: Run) -> None:
    spoken = shlex.split(forerun("deploy", "vllm", "m", *HEAD, *PAPER).out)
    table = json.loads(spoken[-1])["num_speculative_tokens_per_batch_size"]
    assert table[0][0] == 1 and table[0][2] == 5 and table[-1][1:] == [512, 0]
    ran = forerun("deploy", "trtllm", "m", *HEAD, *PAPER)
    written = yaml.safe_load(ran.out.partition("# trtllm.yaml")[2])["speculative_config"]
    bounds = written["draft_len_schedule"]  # upper ones; nothing above the last
    assert bounds == {last: k for _, last, k in table if k} and bounds[min(bounds)] == written["max_draft_len"] == 5
    assert f"above a batch of {max(bounds)} it drafts nothing" in ran.err
    ran = forerun("deploy", "sglang", "m", *HEAD, *PAPER)
    steps = json.loads(ran.out.partition("# sglang-adaptive.json")[2])
    assert steps == {str(first): {"candidate_steps": [k]} for first, _, k in table}
    assert "--speculative-num-steps 5 " in ran.out
    assert "--speculative-adaptive --speculative-adaptive-config sglang-adaptive.json\n" in ran.out
    ran = forerun("deploy", "sglang", "m", *SMALL, *PAPER)
    assert "SGLang drafts as much at every batch: at batch 512 K = 5 is predicted at" in ran.err
    assert "K = 0 1.00 x" in ran.err and "adaptive" not in ran.out
    fixed = forerun("deploy", "vllm", "m", *HEAD, *PAPER, "--no-adaptive")
    assert "per_batch_size" not in fixed.out
    for method in ("medusa", "pard", "peagle"):  # which draft all at once, as many as they were set up for
        named = ("--drafter", method, "--drafter-model", "o/h", "-k", "4", "--engine-version", "0.32.0")
        assert "per_batch_size" not in forerun("deploy", "vllm", "m", *named, *PAPER).out
    suffix = forerun("deploy", "vllm", "m", "--drafter", "suffix", *PAPER)
    assert "per_batch_size" not in suffix.out and "arctic-inference" in suffix.err


def test_a_lost_tree_is_priced(forerun: Run) -> None:
    tree = ("--drafter-option", "top_k=4", "--drafter-option", "nodes=12")
    assert "not as a tree of 12 nodes; --rank-acceptance" in forerun("deploy", "vllm", "m", *HEAD, *tree).err
    ranks = ("--rank-acceptance", "0.6,0.2,0.1;0.5,0.2", "--params", "8e9", "--device", "h100")
    told = forerun("deploy", "vllm", "m", *HEAD, *tree, *ranks).err
    assert "vLLM drafts this as a chain of 5, not as a tree of 12 nodes; at batch 1 the chain is predicted at" in told
    for engine in ("sglang", "trtllm"):
        assert "drafts this as a chain" not in forerun("deploy", engine, "m", *HEAD, *tree).err
    shaped = forerun("deploy", "sglang", "m", *HEAD, "--drafter-option", "shape=[3,2,1]").err
    assert "SGLang drafts this as a chain of 5, not as a tree of 15 nodes" in shaped


@pytest.mark.parametrize(("alpha", "length", "nodes"), [("0.35", 1, 2), ("0.8", 5, 10)])
def test_a_tree_is_as_large_as_the_schedule_lets_it_be(forerun: Run, alpha: str, length: int, nodes: int) -> None:
    tree = ("--drafter-option", "top_k=2", "--drafter-option", "nodes=10")
    costs = ("--alpha", alpha, "--params", "8e9", "--device", "h100", "--draft-cost", "0.1")
    ran = forerun("deploy", "trtllm", "m", *HEAD, *tree, *costs)
    written = yaml.safe_load(ran.out.partition("# trtllm.yaml")[2])["speculative_config"]
    assert (written["max_draft_len"], written["max_total_draft_tokens"]) == (length, nodes), ran


def test_tensorrt_llm_drafts_a_whole_dspark_block(forerun: Run, tmp_path: Path) -> None:
    made = dflash(markov_rank=6)
    head = write_head(HeadCheckpoint.of(made), tmp_path / "head", "dflash", FACTS)
    named = ("deploy", "trtllm", "demo", "--drafter", "dspark", "--drafter-model", head, "--force")
    ran = forerun(*named, "-k", "3")
    assert ran.code == 2 and f"a DSpark head's whole block, {made.config.max_depth} tokens; 3 were requested" in ran.err
    for more in ((), PAPER):
        ran = forerun(*named, *more)
        written = yaml.safe_load(ran.out.partition("# trtllm.yaml")[2])["speculative_config"]
        assert written["max_draft_len"] == made.config.max_depth and "draft_len_schedule" not in written
    assert "TensorRT-LLM drafts as much at every batch" in ran.err
    elsewhere = forerun("deploy", "trtllm", "m", "--drafter", "dspark", "--drafter-model", "o/h", "-k", "3")
    assert elsewhere.code == 0 and "`max_draft_len` is the DSpark head's own block_size" in elsewhere.err


@pytest.mark.parametrize("options", [{}, {"markov_rank": 6}, {"gru_hidden_dim": 6}], ids=["dflash", "dspark", "domino"])
def test_heads_that_draft_a_block_draft_as_exported(forerun: Run, options: dict[str, Any], tmp_path: Path) -> None:
    made = dflash(**options)
    kind, depth = made.config.kind, made.config.max_depth
    head = write_head(HeadCheckpoint.of(made), tmp_path / "head", "dflash", FACTS)
    named = ("demo", "--drafter", kind, "--drafter-model", head, "--force")
    assert f'"num_speculative_tokens": {depth}}}' in forerun("deploy", "vllm", *named).out
    launch = Launch(head=HeadCheckpoint.of(made), target=FACTS, directory=head)
    line = engines_for(kind).destinations["sglang"].command(launch)
    assert forerun("deploy", "sglang", *named).out.split()[-1] == line.split()[-1]
    ran = forerun("deploy", "vllm", *named, "-k", 60)
    assert ran.code == 2 and f"the {kind} head drafts {depth} tokens on one path, 60 were requested" in ran.err


def test_drafters_made_of_drafters(forerun: Run) -> None:
    members = 'drafters=["ngram", {"method": "draft_model", "model": "d.gguf"}]'
    both = ("--drafter", "first_of", "--drafter-option", members)
    assert "--spec-type ngram-simple,draft-simple " in forerun("deploy", "llamacpp", "m.gguf", *both).out
    alone = forerun("deploy", "vllm", "m", *both)
    assert '"method": "draft_model"' in alone.out and "does not draft with ngram beside draft_model" in alone.err
    written = forerun("deploy", "trtllm", "m", *SUFFIX_AND_MTP)
    assert "sa_config" in written.out and "suffix automaton" in written.err
    cascade = ("--drafter", "cascade", "--drafter-model", "o/small", "-k", "4")
    told = forerun("deploy", "sglang", "m", *cascade)
    assert "STANDALONE" in told.out and "--speculative-num-steps 4" in told.out


def test_what_copies_and_vllm_has_not_goes_there_as_a_plug_in(forerun: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = ("--text", "code", "--params", "8e9", "--device", "h100", "--max-batch", "256")
    (command,) = json.loads(forerun("deploy", "vllm", "m", *MERGED, *costs, "--json").out)["commands"]
    assert command["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "0" and "--no-async-scheduling" in command["words"]
    speculation = json.loads(command["words"][-1])
    assert speculation["method"] == "custom_class"
    module, _, name = speculation["model"].rpartition(".")  # a dotted path, as vLLM takes it
    assert getattr(importlib.import_module(module), name).__name__ == "ForerunProposer"
    monkeypatch.setenv("FORERUN_VLLM_CONFIG", command["environment"]["FORERUN_VLLM_CONFIG"])
    given = read_options("FORERUN_VLLM_CONFIG")
    assert given["method"] == "merge" and given["schedule"][0][0] == 1 and given["schedule"][-1][1] == 256
    said = forerun("deploy", "vllm", "m", *MERGED)
    assert "pip install forerun" in said.err and "drafts with" not in said.err
    assert forerun("deploy", "trtllm", "m", "--drafter", "rest", "--drafter-option", "datastore=d").code == 2


def test_what_was_said_reaches_a_plug_in(forerun: Run) -> None:
    def told(*arguments: str) -> tuple[dict[str, Any], str]:
        ran = forerun("deploy", *arguments, "--json")
        (command,) = json.loads(ran.out)["commands"]
        return json.loads(next(value for name, value in command["environment"].items() if "CONFIG" in name)), ran.err

    for adaptive in (("--adaptive",), ("--drafter-option", "adaptive=true")):
        given, said = told("vllm", "m", *MERGED, *adaptive)
        assert given["adaptive"] is True and "as long at every batch" not in said
    assert "adaptive" not in told("vllm", "m", *MERGED)[0]
    rest = ("--drafter", "rest", "--drafter-option", "datastore=d")
    assert told("sglang", "m", *rest, "-k", "4")[0]["num_speculative_tokens"] == 4
    assert "num_speculative_tokens" not in told("sglang", "m", *rest)[0]


def test_auto_chooses_among_what_copies_inside_vllm(forerun: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model or head among its drafters is worth more than a choice among copies; other engines take one drafter."""
    for more in ((), ("--drafter-option", 'drafters=[{"method": "suffix", "max_spec_factor": 2.0}]')):
        ran = forerun("deploy", "vllm", "m", "--drafter", "auto", *more, "--json")
        (command,) = json.loads(ran.out)["commands"]
        assert command["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        monkeypatch.setenv("FORERUN_VLLM_CONFIG", command["environment"]["FORERUN_VLLM_CONFIG"])
        given = read_options("FORERUN_VLLM_CONFIG")
        assert given["method"] == "auto" and bool(given.get("drafters")) == bool(more)
        made = Sequences({"num_speculative_tokens": 8, **given}, vocab_size=50, rows=2, slots=100, nodes=8)
        assert {one.method for one in made.drafters} == {"suffix", "prediction"}
        assert json.loads(command["words"][-1])["num_speculative_tokens"] == 24
    named = ("--drafter", "auto", "--drafter-option", 'drafters=[{"method": "eagle3", "model": "o/h"}]')
    head = forerun("deploy", "vllm", "m", *named)
    assert '"method": "eagle3"' in head.out and "does not draft with" in head.err and "FORERUN" not in head.out
    assert "as long at every batch" not in forerun("deploy", "vllm", "m", "--drafter", "auto").err
    for engine in ("vllm", "sglang", "dynamo"):
        for named in ("auto", "ngram", "suffix"):
            ran = forerun("deploy", engine, "m", "--drafter", named)
            plugged = (engine, named) in (("vllm", "auto"), ("sglang", "suffix"))
            assert ran.code == 0 and ("FORERUN" in ran.out) == plugged, (engine, named)


def test_the_documents_line_is_what_is_printed(forerun: Run) -> None:
    page = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
    assert f"```sh\n{forerun('deploy', 'vllm', 'MODEL', *MERGED).out}```" in page


def test_what_copies_and_sglang_has_not_goes_there_as_a_plug_in(forerun: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    members = 'drafters=["suffix", "ngram"]'
    asked = {
        ("suffix",): ("16", True),
        ("suffix", "-k", "8"): ("9", True),
        ("suffix", "--drafter-option", "nodes=20"): ("21", False),
        ("merge", "--drafter-option", members): ("16", False),
        ("first_of", "--drafter-option", members): ("16", True),
        ("rest", "--drafter-option", "datastore=d"): ("16", False),
    }
    for given, (count, chain) in asked.items():
        (command,) = json.loads(forerun("deploy", "sglang", "m", "--drafter", *given, "--json").out)["commands"]
        words = command["words"]
        assert words[words.index("--speculative-algorithm") + 1] == "FORERUN"
        assert words[words.index("--speculative-num-draft-tokens") + 1] == count
        assert ("--speculative-eagle-topk" in words) == chain, given
        monkeypatch.setenv("FORERUN_SGLANG_CONFIG", command["environment"]["FORERUN_SGLANG_CONFIG"])
        assert read_options("FORERUN_SGLANG_CONFIG")["method"] == given[0]
    several = forerun("deploy", "sglang", *SPREAD, "--drafter", "suffix")
    assert several.out.count("FORERUN_SGLANG_CONFIG=") == 2


@pytest.mark.parametrize(("engine", "words"), [("vllm", '"num_speculative_tokens": 8'), ("sglang", "tokens 9")])
def test_a_drafter_outside_of_forerun_goes_there_as_a_plug_in(forerun: Run, engine: str, words: str) -> None:
    ran = forerun("deploy", engine, "m", "--drafter", "deploy.own_drafter:Periodic")
    assert '{"method": "deploy.own_drafter:Periodic"}' in ran.out and words in ran.out
    assert "deploy.own_drafter:Periodic: put the module's folder in PYTHONPATH" in ran.err
    for name, reason in (("Reading", "no counterpart"), ("Nobody", "cannot be imported")):
        refused = forerun("deploy", engine, "m", "--drafter", f"deploy.own_drafter:{name}")
        assert refused.code == 2 and reason in refused.err


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("rule", ["block", "typical", "nonsense"])
def test_no_engine_has_a_rule_for_a_plug_in(forerun: Run, engine: str, rule: str) -> None:
    refused = forerun("deploy", engine, "m", *MERGED, "--rule", rule)
    assert refused.code == 2 and f"no counterpart of the rule '{rule}'" in refused.err


@pytest.mark.parametrize("method", ["suffix", "pard", "tli", "peagle", "medusa"])
def test_vllm_has_block_verification_in_its_newer_runner_only(forerun: Run, method: str) -> None:
    model = () if method == "suffix" else ("--drafter-model", "o/h")
    named = ("deploy", "vllm", "m", "--engine-version", "0.32.0", "--drafter", method, *model)
    ran = forerun(*named, "--rule", "block")
    assert ran.code == 2 and f"{method} needs V1, which would pass over it" in ran.err
    standard = forerun(*named, "--rule", "token_rejection")
    assert '"rejection_sample_method": "standard"' in standard.out
    assert ("probabilistic" in standard.out) == (method in ("pard", "peagle"))


@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_a_length_that_nobody_knows_is_said_to_be_a_guess(forerun: Run, engine: str) -> None:
    head = ("--drafter", "dflash", "--drafter-model", "o/h")
    assert "K = 16 is a guess" in forerun("deploy", engine, "m", *head).err
    assert "is a guess" not in forerun("deploy", engine, "m", *head, "-k", "7").err


def test_a_manifest_that_kubernetes_takes(forerun: Run, tmp_path: Path) -> None:
    schema = yaml.safe_load((Path(__file__).parent / "dynamographdeployment.yaml").read_text())
    spread = ("--tp", "8", "--pp", "2", "--nodes", "2")
    for name, more, machines in (
        ("My_Model-8B", HEAD, 1),
        ("My_Model-8B", (*HEAD, *spread), 2),
        ("My_Model-8B", (), 1),
        ("DeepSeek-R1-Distill-Llama-70B-quantized.w4a16", HEAD, 1),  # whose 40th character is a dash
    ):
        ran = forerun("deploy", "dynamo", f"Owner/{name}", *more, "--out", tmp_path / "out")
        text = (tmp_path / "out" / "dynamo.yaml").read_text()
        *maps, graph = yaml.safe_load_all(text)
        jsonschema.validate(graph, schema)
        assert ran.code == 0 and "&id" not in text
        assert graph["metadata"]["name"] in ("my-model-8b", "deepseek-r1-distill-llama-70b-quantized")
        worker = graph["spec"]["components"][1]
        main = worker["podTemplate"]["spec"]["containers"][0]
        assert main["resources"]["limits"] == {"nvidia.com/gpu": "8" if machines == 2 else "1"}
        assert worker.get("multinode") == ({"nodeCount": 2} if machines == 2 else None)
        assert main["envFrom"][0]["secretRef"]["name"] == "hf-token-secret"
        if more:
            source = main["env"][0]["valueFrom"]["configMapKeyRef"]
            assert maps[0]["metadata"]["name"] == source["name"]
            assert json.loads(maps[0]["data"][source["key"]])["method"] == "eagle3"
        assert ("dynamo.frontend --http-port" in ran.out) == (machines == 1)
        assert "kubectl create secret generic hf-token-secret" in ran.out
    broken = {**graph, "spec": {**graph["spec"], "backendFramework": "llamacpp"}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)


def test_dynamo_knows_the_vllm_inside(forerun: Run) -> None:
    ran = forerun("deploy", "dynamo", "m", "--drafter", "medusa", "--drafter-model", "o/h")
    assert ran.code == 0 and "documents speculation with EAGLE-3 alone" in ran.err


def test_files_and_json(forerun: Run, tmp_path: Path) -> None:
    ran = forerun("deploy", "trtllm", "m", *HEAD, "--out", tmp_path / "out", "--json")
    found = json.loads(ran.out)
    assert found["engine"] == "trtllm" and found["version"] == "1.4.0rc1" and found["schedule"] == []
    assert found["commands"][0]["line"] == (tmp_path / "out" / "deploy.sh").read_text().strip()
    written = (tmp_path / "out" / "trtllm.yaml").read_text()
    assert found["files"] == {"trtllm.yaml": written} and str(tmp_path / "out" / "trtllm.yaml") in ran.out
    assert yaml.safe_load(written) == {
        "speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 5, "speculative_model": "owner/head"}
    }


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_head(sample(FOR_DEMO), tmp_path / "eagle3-head", "flat", TARGET)


def test_a_head_is_judged_as_doctor_does(forerun: Run, head: Path, tmp_path: Path) -> None:
    named = ("--drafter", "eagle3", "--drafter-model", head)
    ran = forerun("deploy", "vllm", "demo", *named, "-k", "3")
    assert ran.code == 0 and str(resolve("demo")) in ran.out and "was not looked at" not in ran.err
    out = tmp_path / "speculators"
    assert forerun("export", head, "--to", "speculators", "--target", "demo", "--output", out).code == 0
    ran = forerun("deploy", "sglang", "demo", "--drafter", "eagle3", "--drafter-model", out)
    assert ran.code == 2 and f"forerun export {out} --to sglang --target" in ran.err
    assert forerun("deploy", "sglang", "demo", "--drafter", "eagle3", "--drafter-model", out, "--force").code == 0
    ran = forerun("deploy", "vllm", "demo", "--drafter", "eagle", "--drafter-model", head)
    assert ran.code == 2 and "holds a eagle3 head: --drafter eagle3" in ran.err
    ran = forerun("deploy", "trtllm", "demo", *named)
    written = yaml.safe_load(ran.out.partition("# trtllm.yaml")[2])["speculative_config"]
    assert ran.code == 0 and written["eagle3_layers_to_capture"] == [1, 3, 4] and written["max_draft_len"] == 5


@pytest.mark.parametrize(
    ("engine", "size", "words"),
    [
        ("vllm", 100, "has 100 tokens, the target's 8192; vLLM wants one of the same size"),
        ("dynamo", 8191, "Dynamo wants one of the same size"),
        ("sglang", 8191, "SGLang wants one of the same size"),
        ("llamacpp", 8320, None),
        ("llamacpp", 8321, "llama.cpp wants one at most 128 tokens larger or smaller"),
        ("vllm", 8192, None),
    ],
)
def test_draft_models_have_its_vocabulary(
    forerun: Run, engine: str, size: int, words: str | None, tmp_path: Path
) -> None:
    config = json.loads((resolve("demo-draft") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    named = ("deploy", engine, "demo", "--drafter", "draft_model", "--drafter-model", tmp_path)
    ran = forerun(*named)
    assert ran.code == (2 if words else 0) and (words or "") in ran.err, ran
    assert forerun(*named, "--force").code == 0


@pytest.mark.parametrize("text", [False, True])
def test_mtp_layers_are_looked_for_in_the_targets_files(forerun: Run, text: bool, tmp_path: Path) -> None:
    config = json.loads((resolve("demo") / "config.json").read_text())
    more = {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, **({"text_config": more} if text else more)}))
    assert '"method": "mtp"' in forerun("deploy", "vllm", tmp_path, "--drafter", "mtp").out
    assert forerun("deploy", "vllm", "demo", "--drafter", "mtp", "--force").code == 0


def test_a_head_that_the_engine_would_degrade(forerun: Run, tmp_path: Path) -> None:
    config = dataclasses.replace(FOR_DEMO, norm_before_residual=True)
    head = write_head(sample(config), tmp_path / "head", "flat", TARGET)
    ran = forerun("deploy", "sglang", "demo", "--drafter", "eagle3", "--drafter-model", head)
    assert ran.code == 2 and "norm_before_residual: SGLang ignores the flag" in ran.err and "--force" in ran.err
    assert forerun("deploy", "vllm", "demo", "--drafter", "eagle3", "--drafter-model", head).code == 0


def test_llama_cpp_converts_first(forerun: Run, head: Path) -> None:
    ran = forerun("deploy", "llamacpp", "demo", "--drafter", "eagle3", "--drafter-model", head, "--force")
    target, converted, server = (line for line in ran.out.splitlines() if not line.startswith("#"))
    demo = resolve("demo")
    assert target == f"python convert_hf_to_gguf.py {demo} --outtype bf16 --outfile {demo}.gguf"
    assert f"{head} --target-model-dir {demo} --outtype bf16 --outfile {head}.gguf" in converted
    assert f"-m {demo}.gguf" in server and f"--spec-draft-model {head}.gguf" in server


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_llama_cpp_is_asked_what_it_has(forerun: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    program(tmp_path, "llama-server", "echo '-m, --model -hf --port N --spec-type none,draft-simple --draft-max N'")
    arguments = ("deploy", "llamacpp", "m.gguf", "--drafter", "ngram")
    ran = forerun(*arguments)
    assert ran.code == 2 and "llama-server has no --spec-ngram-simple-size-n" in ran.err and "ngram-simple" in ran.err
    assert forerun(*arguments, "--force").code == 0


def test_it_starts_what_is_installed(forerun: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    program(tmp_path, "vllm", f'echo "$@" > {tmp_path}/said; exit 3')
    assert forerun("deploy", "vllm", "owner/m", *HEAD, "--run").code == 3
    assert (tmp_path / "said").read_text().startswith("serve owner/m --port 8000 --speculative-config")


SCRIPTS: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {
    ("vllm", *SPREAD): {"machine-0.sh": ("--node-rank 0",), "machine-1.sh": ("-rank 1 --master-addr h --headless",)},
    ("sglang", *SPREAD): {"machine-0.sh": ("--node-rank 0\n",), "machine-1.sh": ("--node-rank 1\n",)},
    ("trtllm", *SPREAD): {"deploy.sh": ("srun -N 2 ",)},
    ("llamacpp", "demo"): {"convert.sh": ("python convert_hf_to_gguf.py ",), "deploy.sh": ("llama-server -m ",)},
    ("dynamo", "m"): {"deploy.sh": ("dynamo.frontend", "dynamo.vllm"), "kubernetes.sh": ("kubectl apply -f ",)},
    ("dynamo", *SPREAD): {"kubernetes.sh": ("kubectl apply -f ",)},
}


@pytest.mark.parametrize("arguments", SCRIPTS, ids=" ".join)
def test_there_is_a_script_for_each_place(forerun: Run, arguments: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = json.loads(forerun("deploy", *arguments, "--out", out, "--json").out)
    found = {file.name: file.read_text() for file in out.glob("*.sh")}
    assert found.keys() == SCRIPTS[arguments].keys() == {one["script"] for one in made["commands"]}
    for name, text in found.items():
        assert all(part in text for part in SCRIPTS[arguments][name]), text
        commands = [line for line in text.splitlines() if not line.startswith(("#", "trap "))]
        assert len(commands) == len(SCRIPTS[arguments][name]) and not any("YOUR_TOKEN" in line for line in commands)
        assert [line for line in commands if line.endswith(" &")] == commands[:-1]


def test_a_deployment_takes_an_older_ones_place(forerun: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.sh").write_text("true")
    assert forerun("deploy", "vllm", *SPREAD, "--out", "out").code == 0
    assert forerun("deploy", "trtllm", "m", *HEAD, "--out", "out").code == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"mine.sh", "deploy.sh", "trtllm.yaml"}
    line = (tmp_path / "out/deploy.sh").read_text()
    assert f"--config {tmp_path}/out/trtllm.yaml" in line, "wherever it is run"
    shutil.copytree(resolve("demo-draft"), "small")
    named = ("--drafter", "draft_model", "--drafter-model", "small", "--force")
    assert forerun("deploy", "llamacpp", "m.gguf", *named, "--out", "out").code == 0
    line = (tmp_path / "out/convert.sh").read_text()
    assert f"{tmp_path}/small --outtype bf16 --outfile {tmp_path}/small.gguf" in line


@pytest.mark.parametrize("started", ["deploy.sh", "--run"])
def test_a_frontend_does_not_keep_the_worker_waiting_and_ends_with_it(
    forerun: Run, started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    front = f"*frontend*) echo $$ > {tmp_path}/front; exec sleep 60;;"
    worker = f"*vllm*) while [ ! -s {tmp_path}/front ]; do sleep 0.01; done; exit 3;;"
    program(tmp_path, "python", f'case "$*" in -c*) exit 0;; {front} {worker} esac')
    run = ("--run",) if started == "--run" else ()
    code = forerun("deploy", "dynamo", "m", "--out", tmp_path / "out", *run).code
    if not run:
        code = subprocess.run(["sh", str(tmp_path / "out" / started)], check=False, timeout=30).returncode
    assert code == 3
    front_id = int((tmp_path / "front").read_text())
    for _ in range(500):  # Until it is gone; whoever started it may have left a corpse
        state = Path(f"/proc/{front_id}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("the frontend still runs")


@pytest.mark.parametrize(
    ("arguments", "words", "said"),
    [
        (("vllm", *SMALL), "min_p or logit_bias", True),
        (("vllm", "--drafter", "auto"), "min_p or logit_bias", True),
        (("dynamo", *HEAD), "min_p or logit_bias", True),
        (("vllm",), "min_p", False),
        (("sglang", *HEAD), "ignores min_p while it speculates", True),
        (("sglang", "--drafter", "suffix"), "on CPU, XPU and ROCm it answers with the likeliest", True),
        (("sglang", "--drafter", "dspark", "--drafter-model", "o/h"), "min_p", False),
        (("trtllm", *HEAD), "--rule token_rejection compares probabilities", True),
        (("trtllm", *HEAD, "--rule", "token_rejection"), "compares probabilities", False),
        (("trtllm", *HEAD), "refuses requests with penalties", True),
        (("trtllm", "--drafter", "ngram"), "penalties", False),
        (("llamacpp", *SMALL), "where it is the one that it samples itself", True),
        (("llamacpp",), "samples itself", False),
    ],
)
def test_what_sampled_requests_become_is_said(forerun: Run, arguments: tuple[str, ...], words: str, said: bool) -> None:
    engine, *more = arguments
    ran = forerun("deploy", engine, "m", *more)
    assert ran.code == 0 and (words in ran.err) == said, ran.err


@pytest.mark.parametrize("name", ENGINES)
def test_every_way_of_every_engine(name: str) -> None:
    """Each method that an engine claims gives a command, and every method that forerun has is taken or refused."""
    engine = find_engine(name)
    for method, way in engine.ways.items():
        for version in way.versions or engine.versions:
            if name == "dynamo" and way.versions and version not in engine.versions:
                continue
            given: dict[str, Any] = {"method": method, **({"model": "o/head.gguf"} if way.model else {})}
            asked = DeployRequest(model="o/m", config=SpeculativeConfig.parse(given), version=version)
            writer = engine(asked)
            assert writer.deployment().commands[0].line and all(writer.notes)
    with pytest.raises(ArgumentError, match="has no counterpart of kangaroo"):
        config = SpeculativeConfig.parse({"method": "kangaroo", "model": "o/h"})
        engine(DeployRequest(model="o/m", config=config, version=engine.versions[-1])).deployment()
