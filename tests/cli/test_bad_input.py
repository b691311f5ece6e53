"""Bad input of every verb is one clear error and exit code 2: nothing on stdout, nothing left behind.

What is refused before a library is imported: `test_first_second`.
"""

import json
import shlex
from pathlib import Path

import pytest

from cli.conftest import Forerun
from cli.test_export import FOR_DEMO
from forerun.heads.files import write_head
from heads.samples import TARGET, sample

REFUSED = [
    ("generate demo hello", "give the prompt with --prompt"),
    ("generate demo -p x --adapter /no/adapter", "/no/adapter"),
    ("drafters list", "`forerun drafters` lists them"),
    ("serve demo --tensor-parallel-size 2", "tp_plan='auto'"),
    ("train eagle3", "target is missing (--target, or target: in the recipe)"),
    ("demo --prompt-name edits", "Did you mean 'edit'"),
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
