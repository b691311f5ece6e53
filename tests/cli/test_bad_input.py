"""Bad input of every verb is one clear error and exit code 2; what all can see is said before torch is imported."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import Forerun
from cli.test_commands import verbs
from cli.test_heads import FOR_DEMO
from forerun.cli import VERBS, build_app
from forerun.drafters import DRAFTERS, declared_options, drafter_class
from forerun.heads.files import write_head
from forerun.other_engines import ARGUMENTS, OPTIONS, explain_unknown
from heads.samples import TARGET, sample

REFUSED = [
    ("generate demo hello", "give the prompt with --prompt"),
    ("generate demo -p x --adapter /no/adapter", "/no/adapter"),
    ("drafters list", "`forerun drafters` lists them"),
    ("train eagle3", "target is missing (--target, or target: in the recipe)"),
    ("demo --prompt-name edits", "Did you mean 'edit'"),
    ("generate demo -p x --drafter eagle3 --drafter-model MODEL", "is a whole model (LlamaForCausalLM), and eagle3"),
    ("generate MODEL -p x --drafter ngram --drafter-option prompt_lookup_max=big", "type"),
    ("generate MODEL -p x --device cuda:77", "cuda:77"),
    ("generate MODEL -p LONG", "context"),
    ("certify MODEL", "--drafter"),
    ("certify MODEL --drafter ngram --detect 0", "--detect"),
    ("demo MODEL --prompt-name shed.py", "'sched.py'"),
    ("demo MODEL --repeats 0", "--repeats"),
    ("data prepare DATA --target demo --output OUT", "data.jsonl, line 2: broken JSON"),
    ("data prepare --target demo --output OUT", "no data file"),
    ("data prepare none.jsonl --target demo --output OUT", "does not exist"),
    ("data prepare DATA --target /no/model --output OUT", "/no/model"),
    ("data prepare DATA --target demo --output OUT --draft-vocab-size 99999", "1 to 8192"),
    ("data prepare DATA --target demo --output OUT --max-length 1", "max_length"),
    ("data regenerate DATA --output OUT", "--target"),
    ("data regenerate DATA --output OUT --endpoint http://here", "--model"),
    ("data regenerate DATA --output OUT --target demo --concurrency 0", "--concurrency"),
    ("data regenerate DATA --output OUT --target demo -n 0", "Must be >= 1"),
    ("data prepare DATA --target demo --output OUT --chat-template-kwargs on", "is not JSON"),
    ("data prepare DATA --target demo --output OUT --chat-template-kwargs '{\"tools\": 1}'", "tools"),
    ("data regenerate DATA --target demo --output OUT --chat-template-kwargs '[]'", "JSON object"),
    ("data regenerate DATA --output OUT --endpoint here --model m --skip-bad", "http://"),
    ("datastore build DATA --target demo --output OUT", "data.jsonl, line 2: broken JSON"),
    ("datastore build --target demo --output OUT", "no data file"),
    ("datastore build none.txt --target demo --output OUT", "does not exist"),
    ("datastore build DATA --output OUT", "--target MODEL or --tokenizer"),
    ("datastore build DATA --target demo --tokenizer demo --output OUT", "either"),
    ("datastore build DATA --target /no/model --output OUT", "/no/model"),
    ("datastore info OUT", "is not a datastore"),
    ("plan --alpha 1.2", "probability in 0..1"),
    ("plan --alpha 0.7 -k 0", "-k must be 1 or more"),
    ("plan --alpha 0.7 --params 8e9 --device h10", "Did you mean 'h100'"),
    ("plan --alpha 0.7 --params 8e9", "on which device?"),
    ("plan --alpha 0.7 --device h100", "--params 70e9"),
    ("plan --alpha 0.7 --params 8e9 --device h100 --layers 32", "--kv-heads"),
    ("plan --alpha 0.7 --params 8e9 --tflops 10", "--bandwidth"),
    ("plan --alpha 0.7 --acceptance 0.8", "not both"),
    ("plan --alpha 0.7 --draft-cost -1", "0 or more"),
    ("plan --alpha 0.7 --batch 0", "--batch must be at least 1"),
    ("plan --alpha 0.7 --plot plan.xyz", "ends in .png"),
    ("plan --acceptance '0.8;0.7'", "numbers with commas"),
    ("plan --text chats", "Did you mean 'chat'"),
    ("plan --text chat -t -1", "temperature must be 0"),
    ("plan demo", "give --prompts FILE"),
    ("plan demo --drafter ngram", "give --prompts FILE"),
    ("plan demo --prompts x", "whose acceptance?"),
    ("plan demo --alpha 0.7 --params 8e9", "give one of them"),
    ("plan --alpha 0.7 --prompts x", "a MODEL is needed"),
    ("plan demo --alpha 0.7 --prompts x --drafter ngram", "not both"),
    ("plan demo --text chat --choose-draft demo-draft", "give --prompts FILE"),
    ("plan", "what is accepted?"),
    ("plan --alpha 0.8 --tree-nodes 9", "give --rank-acceptance"),
    ("plan --alpha 0.8 --tp 8", "--tp is for a target that is not here"),
    ("plan --alpha 0.8 --bandwidth 900", "--params 70e9"),
    ("plan --alpha 0.8 --draft-params 1e9", "--params 70e9"),
    ("plan --alpha 0.8 --experts 8", "--params 70e9"),
    ("plan --alpha 0.8 --dtype int4", "--dtype needs the target's size"),
    ("plan --alpha 0.8 --params 8e9 --device h100 --heads 32", "--kv-heads"),
    ("plan --alpha 0.8 --rule block", "give --prompts"),
    ("plan demo --alpha 0.8 --kv-heads 8", "--params 70e9, and no MODEL"),
    ("plan demo --alpha 0.8 --draft-params 1e9", "for a MODEL give --draft-cost"),
    ("plan demo --alpha 0.8 --drafter ngram", "give --prompts"),
    ("plan demo --prompts x --drafter ngram --draft-cost 0.1", "measured on the prompts"),
    ("plan demo --prompts x --drafter ngram --context 99", "measured on the prompts"),
    ("calibrate demo --rows 0", "--rows must be"),
    ("calibrate demo --seconds 0", "--seconds above 0"),
    ("tune skip-layers x --output OUT", "only demo brings its own"),
    ("tune skip-layers demo --iterations 0 --output OUT", "--iterations must be at least 1"),
    ("tune skip-layers demo --limit 0 --output OUT", "--limit must be at least 1"),
    ("tune skip-layers demo --budget-s 0 --output OUT", "--budget-s above 0"),
    ("tune skip-layers demo --temperature -1 --output OUT", "--temperature must be 0 or more"),
    ("tune skip-layers x --prompts nowhere.txt --output OUT", "nowhere.txt does not exist"),
    ("doctor HEAD", "--target"),
    ("bench", "bench needs --server, which is missing, for example --server http://localhost:8000"),
    ("bench --server", "--server needs a value, for example --server http://localhost:8000"),
    ("certify --server", "--server needs a value, for example --server http://localhost:8000"),
    ("generate demo -t", "-t needs a value"),
    ("generate", "generate needs MODEL, which is missing"),
    ("generate demo -p x --backend llamacpp", "llama.cpp runs GGUF files"),
    ("doctor --target demo", "forerun doctor HEAD"),
    ("doctor HEAD --target demo --engine vlm", "'vllm'"),
    ("doctor none --target demo", "there is no directory"),
    ("doctor HEAD --target vllm@0.33.0", "an engine is named by --engine"),
    ("doctor HEAD --target 'a b'", "there is no directory a b, and no hub id is written so"),
    ("doctor HEAD --target 'a/b c'", "there is no directory a/b c, and no hub id is written so"),
    ("generate a@b --prompt x", "there is no directory a@b, and no hub id is written so"),
    ("export HEAD --to tgi --target demo --output OUT", "cannot export to 'tgi'"),
    ("export HEAD --to vllm", "--target"),
]
"""The words behind ``forerun``, in which capitals stand for files of the test; a part of the message."""


@pytest.fixture(scope="module")
def files(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | str]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "data.jsonl").write_text(json.dumps({"text": "the cat"}) + '\n{"broken\n')
    head = write_head(sample(FOR_DEMO), folder / "head", "flat", TARGET)
    return {"MODEL": checkpoint, "DATA": folder / "data.jsonl", "HEAD": head, "LONG": "x " * 500}


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_bad_input_is_one_clear_error(
    forerun: Forerun, files: dict[str, Path | str], tmp_path: Path, words: str, message: str
) -> None:
    places = {**files, "OUT": tmp_path / "out"}
    ran = forerun(*(places.get(word, word) for word in shlex.split(words)))
    told = [line for line in ran.err.splitlines() if "ready in" not in line]
    assert (ran.code, ran.out) == (2, "") and told[0].startswith("error: ") and message in ran.err, ran.err
    assert "Traceback" not in ran.err and not (tmp_path / "out").exists()


HEAVY = ("torch", "transformers", "numba", "fastapi")
TRIED = """
import contextlib, io, json, sys
from forerun.cli import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(said := io.StringIO()), contextlib.redirect_stderr(said):
        code = main(words)
    imported = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
    print(json.dumps([code, imported, said.getvalue()]))
"""
REFUSED_AT_ONCE = {
    "an unknown command": ("generat", "generat"),
    "an unknown option": ("generate demo --bogus", "--bogus"),
    "an option far from all": ("generate demo --rows 2", "Unknown option: --rows.\n"),
    "an option of vLLM": ("serve demo --tensor-parallel-size 2", "one device runs a model"),
    "an option of vLLM that is not needed": ("serve demo --enable-auto-tool-choice", "is not needed: forerun serve"),
    "an option of vLLM with underscores": ("serve demo --gpu_memory_utilization=0.9", "--kv-cache-tokens"),
    "an option of llama.cpp": ("serve demo -c 4096", "--max-model-len"),
    "letters of llama.cpp": ("serve demo -ngl 99", "--device says where"),
    "a port that there is not": ("serve demo --port 99999", "65535"),
    "an address that is not of this machine": (
        "serve demo --host 192.0.2.1",
        "cannot listen on '192.0.2.1'",
    ),
    "a verb of Ollama": ("run demo", "here it is forerun chat demo"),
    "a verb of vLLM": ("complete demo", "here it is forerun generate demo"),
    "a verb misspelt": ("spedup demo", 'Did you mean "speedup"?'),
    "a demo that is enlarged and is real": ("demo smollm2 --scale 2", "--scale enlarges the demo model only"),
    "a drafter to a board of a real model": ("demo smollm2 --all", "--all compares the drafters of the demo model"),
    "a size that is none": ("plan --alpha 0.7 --params 8X --device h100", "--params"),
    "no number": ("generate demo -p x -n many", "many"),
    "no model": ("generate", "MODEL"),
    "an option misspelt": ("generate demo --temprature 1", "--temperature"),
    "no prompt": ("generate demo -p ''", "empty"),
    "an unknown drafter": ("generate demo -p x --drafter ngrm", "Did you mean 'ngram'"),
    "no draft": ("generate demo -p x --drafter ngram -k 0", "num_speculative_tokens"),
    "too long a draft": ("generate demo -p x --drafter ngram -k 900", "from 1 to 128"),
    "an unknown rule": ("generate demo -p x --drafter ngram --rule walk", "walk"),
    "a draft of nobody": ("generate demo -p x -k 3", "--drafter"),
    "a configuration that is no JSON": ("generate demo -p x --speculative-config '{method: ngram}'", "not JSON"),
    "a configuration that is a list": ("generate demo -p x --speculative-config '[1]'", "JSON object"),
    "two drafters": (
        """generate demo -p x --drafter ngram --speculative-config '{"method": "suffix"}'""",
        "'suffix' (--speculative-config) and 'ngram' (--drafter): name one",
    ),
    "a list that took the model": ("serve --api-key KEY /nowhere/model", "MODEL is missing: name it first"),
    "a list without a value": ("generate demo -p x --stop", "--stop needs a value"),
    "an option without a value": ("generate demo -p x --drafter ngram --drafter-option size", "key=value"),
    "no folder": ("generate /nowhere/model -p x", "no directory /nowhere/model"),
    "no GGUF file": ("generate /nowhere/model.gguf -p x", "no file /nowhere/model.gguf"),
    "a folder without a model": ("generate / -p x", "no config.json"),
    "no dtype": ("generate demo -p x --dtype float8", "float8"),
    "no context": ("generate demo -p x --max-model-len 0", "at least 2"),
    "no device": ("generate demo -p x --device gpu", "'gpu' is no device"),
    "no device to serve on": ("serve demo --device cuda0", "'cuda0' is no device"),
    "an unknown option of a drafter": ("generate demo -p x --drafter ngram --drafter-option min_hit=2", "'min_hits'"),
    "a drafter without its model": ("generate demo -p x --drafter draft_model", "--drafter-model"),
    "a head that is not named": ("generate demo -p x --drafter medusa", "medusa needs a head"),
    "a draft model that is nowhere": (
        "generate demo -p x --drafter draft_model --drafter-model /nowhere/draft",
        "no directory /nowhere/draft",
    ),
    "a member whose head is nowhere": (
        "generate demo -p x --speculative-config "
        """'{"method": "merge", "drafters": ["ngram", {"method": "eagle3", "model": "/nowhere/head"}]}'""",
        "no directory /nowhere/head",
    ),
    "no answer": ("generate demo -p x -n 0", "Must be >= 1"),
    "no answer in the demo": ("demo -n 0", "Must be >= 1"),
    "a word too many": ("generate demo 'why?' -p x", "got 'why?'; give the prompt with --prompt"),
    "no such model on the hub": ("generate no/such-model -p x", "no directory no/such-model"),
    "a name misspelt": ("generate smolm2 -p x", "Did you mean 'smollm2'"),
    "a temperature below zero": ("generate demo -p x -t -1", "temperature"),
    "a chat without a model": ("chat /nowhere/model", "no directory"),
    "a server without rows": ("serve demo --max-num-seqs 0", "at least 1"),
    "a server without a model": ("serve /nowhere/model", "no directory"),
    "a server's unknown drafter": ("serve demo --drafter ngrm", "Did you mean 'ngram'"),
    "a proof without a model": ("certify /nowhere/model --drafter ngram", "no directory"),
    "nobody who asks": ("bench --server http://127.0.0.1:9 --concurrency 0", "at least 1"),
    "prompts that are nowhere": (
        "plan demo --drafter suffix --prompts /no/file.jsonl",
        "cannot read prompts from /no/file",
    ),
    "a file of prompts that is nowhere": ("generate demo --json --prompt-file /no/file.jsonl", "/no/file.jsonl"),
    "an unknown kind of head": ("train eagle4", "Did you mean 'eagle'"),
    "a training of nothing": ("train eagle3", "data is missing (--data, or data: in the recipe)"),
    "an unknown drafter to check": ("drafters check nope", "unknown drafter 'nope'"),
    "a drafter to check that is nowhere": ("drafters check nope:Nope", "cannot be imported"),
    "a file that is no model": (f"generate {__file__} -p x", "is a file and no GGUF file"),
    "an unknown prompt": ("demo --prompt-name nope", "no shipped prompt 'nope'"),
    "a head that is nowhere": ("doctor /no/such", "there is no directory /no/such"),
    "no acceptance rate": ("plan --alpha 2 -k 5", "in 0..1"),
}


UNLOADED = [
    *(["--help"], ["--version"], ["drafters"], ["heads"]),
    *([verb, "--help"] for verb in VERBS),
    *(["data", verb, "--help"] for verb in ("prepare", "regenerate")),
    ["plan", "--text", "code", "--params", "8e9", "--device", "h100", "--json"],
]


@pytest.fixture(scope="module")
def tried() -> list[tuple[int, list[str], str]]:
    """Of each command in one process: its exit code, which of `HEAVY` are imported by then, and what was written."""
    words = [shlex.split(arguments) for arguments, _ in REFUSED_AT_ONCE.values()] + UNLOADED
    command = [sys.executable, "-c", TRIED, json.dumps(words), json.dumps(HEAVY)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL, env=offline)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_wrong_is_said_at_once(tried: list[tuple[int, list[str], str]]) -> None:
    for (case, (_, expected)), (code, imported, said) in zip(REFUSED_AT_ONCE.items(), tried, strict=False):
        assert (code, imported) == (2, []), (case, said)
        assert said.startswith("error: ") and expected in said and "Traceback" not in said, (case, said)


def test_hints_name_options_that_there_are() -> None:
    """No Python names but where Python is meant; each option is one of the verb, or of the verb that is named."""
    options = {
        " ".join(names): [name for one in verb.assemble_argument_collection() for name in one.names]
        for names, verb in verbs(build_app())
    }
    for verb, known in options.items():
        for option in OPTIONS:
            said = explain_unknown(f"--{option}", known, verb)
            of = [name for other in re.findall(r"forerun ([a-z]+)", said) for name in options.get(other, ())]
            named = re.findall(r"--[a-z-]+[a-z]|(?<!\S)-k", said.removeprefix(f"Unknown option: --{option}"))
            assert {*named} - {f"--{option}"} <= {*known, *of}, (verb, said)
            assert "in Python" in said or not re.search(
                r"[a-z]_[a-z]|LLM", said.replace("generation_config.json", "")
            ), said
        first = explain_unknown("-m", known, verb)
        assert ("MODEL" in known) == first.endswith(f"forerun {verb} MODEL"), first
    assert not [hint for hint in ARGUMENTS.values() if "--" in hint or "forerun " in hint or "Python" in hint]


@pytest.mark.parametrize("verb", ["generate", "chat", "serve", "certify"])
def test_options_of_llama_cpp_are_read_as_written(verb: str, forerun: Forerun) -> None:
    """``-ngl 99`` is no ``-n gl``."""
    for option in ("-ngl", "-np", "-no-cnv", "-fa", "-s", "-md", "--do-sample", "--assistant-model"):
        said = forerun(verb, "demo", option, "4").err
        assert re.match(f"error: {option} is (not needed|not an option of this command): ", said), said


def test_options_read_in_the_source_are_those_of_the_class() -> None:
    unset = (dataclasses.MISSING, dataclasses.MISSING)
    for name in DRAFTERS:
        fields = dataclasses.fields(drafter_class(name).Config)
        needed = {field.name: (field.default, field.default_factory) == unset for field in fields}
        assert list(declared_options(name).items()) == list(needed.items()), name


def test_what_needs_no_model_imports_none_of_its_libraries(tried: list[tuple[int, list[str], str]]) -> None:
    for arguments, (code, imported, said) in zip(UNLOADED, tried[len(REFUSED_AT_ONCE) :], strict=True):
        assert (code, imported) == (0, []), (arguments, said)
        assert arguments[-1:] != ["--help"] or " ".join(["forerun", *arguments[:-1]]) in said
        assert arguments != ["--help"] or all(verb in said for verb in VERBS)
