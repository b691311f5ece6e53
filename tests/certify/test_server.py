"""`forerun certify --server`: a sound server passes, and each planted fault is caught and shown by a small request."""

import asyncio
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.bench.client import Samples
from forerun.certify import CertifyPlan, Check
from forerun.certify.served import ServedModel, ServedRequest, ServerExam, serving_model, smallest_request
from forerun.certify.server import certify_server, greedy_checks, structured_check
from forerun.certify.server_samples import sampled_checks, two_samples
from forerun.cli import main
from forerun.endpoints import ServerError
from serve.conftest import serving

TEXTS = ["the cat sat on the mat and the cat sat on the mat", "a dog sat on the log and the dog sat on a log"]
PLAN = CertifyPlan(prompts=2, prompt_tokens=24, max_tokens=12, detect=0.3, sample_tokens=3)
WORDS = 12
Body = dict[str, Any]


class Simulated:
    """A server without a network, whose model knows how likely each of a few tokens is behind two others."""

    url, model, engine = "http://simulated", "simulated", "simulation"

    def __init__(self) -> None:
        self.chance = random.Random(1)
        self.drafts = 0

    async def metrics(self) -> Samples:
        self.drafts += 1
        names = ("drafts", "draft_tokens", "accepted_tokens")
        return {f"vllm:spec_decode_num_{name}_total": {(): float(self.drafts)} for name in names}

    async def post(self, path: str, body: Body) -> Body:
        await asyncio.sleep(0)  # Others ask at the same time
        if path == "/detokenize":
            return {"prompt": "".join(f"<{token}>" for token in body["tokens"])}
        if path == "/tokenize":
            return {"tokens": [ord(letter) % WORDS for letter in body["prompt"]]}
        if path == "/v1/chat/completions":
            properties = body["response_format"]["json_schema"]["schema"]["properties"]
            answer = {name: one.get("enum", [True])[0] for name, one in properties.items()}
            return {"choices": [{"message": {"content": json.dumps(answer)}, "finish_reason": "stop"}]}
        return {"choices": [self.choice(body, index) for index in range(body.get("n", 1))]}

    def choice(self, body: Body, index: int) -> Body:
        """One answer."""
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [1, 2]
        text, seed = [0, *prompt], body.get("seed")
        chance = self.chance if seed is None else random.Random(seed + index)
        told: Body = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        for position in range(body["max_tokens"]):
            probs = self.probs(text)
            token = self.token(body, probs, position, chance)
            text.append(token)
            told["tokens"].append(f"token_id:{token}")
            told["token_logprobs"].append(math.log(probs[token]))
            told["top_logprobs"].append({f"token_id:{one}": math.log(prob) for one, prob in enumerate(probs)})
        answer = text[1 + len(prompt) :]
        return {"index": index, "text": str(answer), "token_ids": answer, "logprobs": told, "finish_reason": "length"}

    def probs(self, text: list[int]) -> list[float]:
        """How likely each token is."""
        drawn = random.Random(100 * text[-2] + text[-1])
        weights = [math.exp(drawn.gauss(0, 1.2)) for _ in range(WORDS)]
        return [weight / sum(weights) for weight in weights]

    def token(self, body: Body, probs: list[float], position: int, chance: random.Random) -> int:
        """The next token."""
        if body["temperature"] == 0:
            return probs.index(max(probs))
        return chance.choices(range(WORDS), probs)[0]


class TooLenient(Simulated):
    """It accepts the likeliest token, where it may be drafted, seven times in ten whatever its probability."""

    def token(self, body: Body, probs: list[float], position: int, chance: random.Random) -> int:
        likeliest = probs.index(max(probs))
        lenient = body["temperature"] > 0 and position > 0 and chance.random() < 0.7
        return likeliest if lenient else super().token(body, probs, position, chance)


class WrongFromTheFifth(Simulated):
    """Its answers of more than four tokens begin with the least likely one."""

    def wrong(self, body: Body) -> bool:
        """Whether this request shows it."""
        return body["temperature"] == 0 and body["max_tokens"] > 4

    def token(self, body: Body, probs: list[float], position: int, chance: random.Random) -> int:
        return probs.index(min(probs)) if self.wrong(body) else super().token(body, probs, position, chance)


class WrongInCompany(WrongFromTheFifth):
    """They do so where another one is answered at the same time."""

    running = 0

    def wrong(self, body: Body) -> bool:
        return body["temperature"] == 0 and self.running > 1

    async def post(self, path: str, body: Body) -> Body:
        self.running += 1
        try:
            return await super().post(path, body)
        finally:
            self.running -= 1


class WrongBesideSampled(WrongFromTheFifth):
    """Its greedy answers are wrong where a sampled one is answered at the same time."""

    sampled = 0

    def wrong(self, body: Body) -> bool:
        return body["temperature"] == 0 and self.sampled > 0

    async def post(self, path: str, body: Body) -> Body:
        self.sampled += body.get("temperature", 0) > 0
        try:
            return await super().post(path, body)
        finally:
            self.sampled -= body.get("temperature", 0) > 0


class StalePrefix(Simulated):
    """What begins as a prompt before it is answered as that one was."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[int, ...], Body] = {}

    async def post(self, path: str, body: Body) -> Body:
        if body.get("temperature") != 0 or body["max_tokens"] == 1 or len(body["prompt"]) < 20:
            return await super().post(path, body)
        key = tuple(body["prompt"][:20])
        if key not in self.kept:
            self.kept[key] = await super().post(path, body)
        return self.kept[key]


class NoSeed(Simulated):
    """It draws without the seed that it is given."""

    def choice(self, body: Body, index: int) -> Body:
        return super().choice({**body, "seed": None}, index)


class OneForAll(Simulated):
    """All answers to one request are the first."""

    def choice(self, body: Body, index: int) -> Body:
        return super().choice({"seed": 1, **body}, 0)


class OpenJson(Simulated):
    """Its JSON has a brace too many."""

    async def post(self, path: str, body: Body) -> Body:
        found = await super().post(path, body)
        if "response_format" in body:
            found["choices"][0]["message"]["content"] += "}"
        return found


class NoLogprobs(Simulated):
    """It states 0 nats for every drafted token, as llama.cpp does (ggml-org/llama.cpp issue 27972)."""

    def choice(self, body: Body, index: int) -> Body:
        found = super().choice(body, index)
        told = found["logprobs"]
        told["token_logprobs"] = [told["token_logprobs"][0], *[0.0] * (len(told["tokens"]) - 1)]
        return found


class OpenAiAlone(Simulated):
    """It knows nothing that is not OpenAI's, and not all of that."""

    async def post(self, path: str, body: Body) -> Body:
        if path == "/tokenize" or body.get("n", 1) > 1 or "response_format" in body or "top_k" in body:
            raise ServerError(f"{path} answered 400: not here")
        found = await super().post(path, body)
        return {"choices": [{"text": one["text"], "finish_reason": "length"} for one in found["choices"]]}


def examined(server: Simulated, part: Callable[[ServerExam], Iterable[Check]]) -> dict[str, Check]:
    """One part of the checks by their names."""
    with asyncio.Runner() as runner:
        served = ServedModel(server, runner)  # type: ignore[arg-type]
        served.probe()
        prompts = [served.encode(text)[: PLAN.prompt_tokens] for text in TEXTS]
        quiet: dict[str, Any] = {"against": None, "progress": lambda words: None}
        exam = ServerExam(served=served, prompts=prompts, plan=PLAN, dtype="float32", **quiet)
        return {check.name: check for check in part(exam)}


def compared(server: Simulated, other: Simulated, plan: CertifyPlan = PLAN) -> dict[str, Check]:
    """All checks of a server and another one by their names."""
    with asyncio.Runner() as runner:
        pair = [ServedModel(one, runner) for one in (server, other)]  # type: ignore[arg-type]
        for one in pair:
            one.probe()
        report = certify_server(pair[0], TEXTS, plan, against=pair[1], dtype="float32")
    assert json.loads(json.dumps(report.record()))["passed"] is report.passed
    return {check.name: check for check in report.checks}


def failed(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if not check.passed}


def body_of(command: str) -> Body:
    """What a printed command sends."""
    found: Body = json.loads(command.partition(" -d ")[2].strip("'"))
    return found


SEEDED = "sampled distribution, n = 4, seeded, 1 client"


def test_a_sound_server_passes() -> None:
    checks = compared(Simulated(), Simulated())
    assert not failed(checks), checks
    assert not [name for name, check in checks.items() if check.left_out]
    assert list(checks) == [
        "greedy equality, 1 client",
        "greedy equality, 16 clients",
        "greedy equality, among sampled completions",
        "prefix cache, cold and warm",
        "log-probabilities",
        "same seed, same text",
        "sampled distribution, n = 4, no seed, 16 clients",
        SEEDED,
        "sampled distribution, each token of longer completions",
        "structured outputs",
        "greedy equality with http://simulated",
        "sampled completions beside http://simulated",
        "speculation",
    ]
    ids = [check.id for check in checks.values()]
    greedy = ["greedy_alone", "greedy_together", "greedy_mixed", "prefix_cache", "logprobs", "seed"]
    sampled = ["sampled_unseeded", "sampled_seeded", "sampled_tokens", "structured"]
    assert ids == [*greedy, *sampled, "greedy_beside", "sampled_beside", "speculation"]
    assert "completions detect a total variation of 0.2" in checks[SEEDED].summary
    assert checks["structured outputs"].figures["valid"] == 17


def test_a_rule_that_accepts_too_often_is_caught() -> None:
    checks = compared(Simulated(), TooLenient())
    assert failed(checks) == {"sampled completions beside http://simulated"}
    checks = examined(TooLenient(), sampled_checks)
    assert failed(checks) == {name for name in checks if name.startswith("sampled distribution")}
    assert "came" in checks[SEEDED].summary and body_of(checks[SEEDED].shown_by[0])["max_tokens"] < 4


def test_another_greedy_token_is_caught_and_shrunk() -> None:
    check = examined(WrongFromTheFifth(), greedy_checks)["greedy equality, 1 client"]
    assert not check.passed and check.figures["bugs"] > 0 and "nats likelier" in check.summary
    assert re.search(r"completion is '<\d+>'; asked for that token alone the server says '<\d+>',", check.summary)
    [command] = check.shown_by
    assert body_of(command)["max_tokens"] == 5 and len(body_of(command)["prompt"]) == 1
    checks = compared(WrongFromTheFifth(), Simulated())
    other = checks["greedy equality with http://simulated"]
    assert not other.passed and "NOT a tie" in other.summary and len(other.shown_by) == 2


def test_a_fault_of_neighbours_is_caught() -> None:
    """One request alone is answered rightly."""
    checks = examined(WrongInCompany(), greedy_checks)
    assert failed(checks) == {"greedy equality, 16 clients", "greedy equality, among sampled completions"}
    assert checks["greedy equality, 16 clients"].figures["copies"] == 2


def test_a_fault_of_mixed_batches_is_caught() -> None:
    """A greedy answer among greedy ones is right."""
    checks = examined(WrongBesideSampled(), greedy_checks)
    assert failed(checks) == {"greedy equality, among sampled completions"}
    greedy, sampled = checks["greedy equality, among sampled completions"].shown_by
    assert body_of(greedy)["temperature"] == 0 and body_of(sampled)["temperature"] == 1


def test_a_stale_prefix_is_caught() -> None:
    checks = examined(StalePrefix(), greedy_checks)
    assert "prefix cache, cold and warm" in failed(checks) and "greedy equality, 1 client" not in failed(checks)
    before, command = checks["prefix cache, cold and warm"].shown_by
    assert body_of(before)["prompt"][:20] == body_of(command)["prompt"][:20]
    assert body_of(before)["prompt"] != body_of(command)["prompt"]


def test_a_broken_seed_is_caught() -> None:
    checks = examined(NoSeed(), sampled_checks)
    assert failed(checks) == {"same seed, same text"}
    assert "it is answered" in checks["same seed, same text"].summary and checks["same seed, same text"].shown_by


def test_one_answer_for_all_choices_is_caught() -> None:
    assert SEEDED in failed(examined(OneForAll(), sampled_checks))


def test_invalid_json_is_caught() -> None:
    check = structured_check_of(OpenJson())
    assert not check.passed and "no JSON" in check.summary
    [command] = check.shown_by
    schema = body_of(command)["response_format"]["json_schema"]["schema"]
    assert [*schema["properties"]] == ["colour"]


def structured_check_of(server: Simulated) -> Check:
    [check] = examined(server, lambda exam: [structured_check(exam)]).values()
    return check


def test_wrong_logprobs_are_caught() -> None:
    checks = examined(NoLogprobs(), greedy_checks)
    assert failed(checks) == {"log-probabilities"}
    assert "is stated with 0" in checks["log-probabilities"].summary
    assert body_of(checks["log-probabilities"].shown_by[0])["max_tokens"] == 2


def test_what_a_server_lacks_is_said() -> None:
    checks = compared(OpenAiAlone(), OpenAiAlone())
    assert not failed(checks)
    left_out = {name: check.summary for name, check in checks.items() if check.left_out}
    assert {"log-probabilities", "structured outputs"} < left_out.keys() and len(left_out) == 5
    assert "no log-probabilities" in left_out["log-probabilities"] and "400" in left_out["structured outputs"]
    assert "more cannot be said" in checks["greedy equality, 1 client"].summary


def test_two_samples_part_where_they_do() -> None:
    plan = CertifyPlan(sample_tokens=2, cells=6)
    one = [(0, index % 2, index % 3) for index in range(600)]
    alike = [(0, (index + 1) % 2, (index + 2) % 3) for index in range(600)]
    other = [(0, 0, index % 3) for index in range(600)]
    assert two_samples(one, alike, plan)[0] < 1
    statistic, freedom, cells = two_samples(one, other, plan)
    assert statistic > 300 and freedom == cells - 1


def test_the_smallest_request_is_found() -> None:
    start = ServedRequest(prompt=tuple(range(40)), max_tokens=20, copies=16, before=tuple(range(30)))

    def shows(request: ServedRequest) -> str | None:
        return "wrong" if 37 in request.prompt and request.max_tokens > 5 and request.copies > 1 else None

    found, fault = smallest_request(start, shows, tries=100)
    assert fault == "wrong" and found.before == (29,)
    assert (found.prompt, found.max_tokens, found.copies) == ((37, 38, 39), 6, 2)
    assert smallest_request(start, lambda request: None) == (start, None)


def test_tokens_that_are_named_by_their_text() -> None:
    """SGLang's log-probabilities name tokens by their text, and the ids of the answer stand beside them."""
    with asyncio.Runner() as runner:
        served = ServedModel(Simulated(), runner)  # type: ignore[arg-type]
        told = {"tokens": [" a", " b"], "token_logprobs": [-1, -2], "top_logprobs": [{" a": -1, " c": -3}, {" b": -2}]}
        choice = {"index": 0, "text": " a b", "logprobs": told, "token_ids": [7, 8], "finish_reason": "length"}
        [answer] = served.read({"choices": [choice]})
    assert served.continued((1,), answer.tokens) == (1, 7, 8)
    other = next(token for token in answer.likeliest[0] if token not in answer.tokens)
    assert served.continued((1,), [other]) is None


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    """Our own server, which drafts."""
    with serving(checkpoint, speculative={"method": "ngram", "adaptive": False}) as live:
        yield live.url


def test_the_command(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Our own server passes; and what cannot be asked is said."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TEXTS))
    words = ["certify", "--server", url, "--prompt-file", str(prompts), "--prompts", "1", "--max-tokens", "6"]
    assert main([*words, "--detect", "0.9", "--dtype", "float32"]) == 0
    said, told = capsys.readouterr()
    assert "certified: what forerun does on tiny, float32" in said and "drafted tokens were accepted" in said
    stages = [line.partition(":")[0] for line in told.splitlines() if line.startswith("stage")]
    assert stages == [f"stage {number} of 4" for number in range(1, 5)]
    assert "  pass  greedy equality, 1 client" in told
    for wrong, complaint in (
        (["--server", "http://127.0.0.1:9"], "no server answers"),
        (["other", "--server", url], "serves tiny"),
        (["--server", url, "--drafter", "ngram"], "drafts and samples in its own way"),
        (["--against", url, "MODEL"], "--server, which is missing"),
        ([], "needs a model, or a server"),
    ):
        assert main(["certify", *wrong]) == 2
        assert complaint in capsys.readouterr().err


@pytest.mark.slow
def test_a_lossy_rule_of_ours_is_caught(checkpoint: Path, draft_checkpoint: Path) -> None:
    """It accepts what is plausible, and so too often."""
    config = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 3, "adaptive": False}
    lossy = {**config, "rule": "typical", "draw": "deterministic"}
    with serving(checkpoint, speculative=lossy) as live, serving_model(live.url) as served:
        report = certify_server(served, TEXTS, replace(PLAN, detect=0.4), dtype="float32")
    wrong = [check for check in report.checks if not check.passed]
    assert wrong and all(check.name.startswith("sampled distribution") and check.shown_by for check in wrong)
