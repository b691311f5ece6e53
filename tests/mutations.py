"""Faults planted in a copy of the source, one at a time: the tests named beside each must fail.

    python tests/mutations.py            # all of them, two at a time; ends with 1 if one survives
    python tests/mutations.py rules 12   # those whose floor or number is named

A fault is a change marked in a piece of the source, «old → new», which stands once in `src`: so the list outlives files
that move. Where the text has changed the command says so, and the fault is written anew.
"""

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
AT_ONCE = 2
LIMIT_S = 900  # After which tests that hang have failed


class Fault(NamedTuple):
    """One line of the source that is wrong, and where that must be noticed."""

    floor: str
    what: str
    old: str
    new: str
    tests: str  # Arguments of pytest

    def place(self, src: Path) -> Path:
        """The file that holds the old text; ValueError unless there is exactly one such place."""
        suffixes = (".py", ".c", ".h")
        found = [path for path in sorted(src.rglob("*.*")) if path.suffix in suffixes and self.old in path.read_text()]
        if len(found) != 1 or found[0].read_text().count(self.old) != 1:
            raise ValueError(f"{self.what}: {self.old!r} stands in {len(found)} files, once in one was expected")
        return found[0]


RULES = "tests/core/test_exact_laws.py tests/core/test_rules.py"
LADDER = "tests/decode/test_residuals.py"
SAMPLING = "tests/core/test_sampling.py"
TREE = "tests/core/test_tree.py"
HF, LOOPS = "tests/engine/test_huggingface.py", "tests/engine/test_training_loops.py"
WEIGHTS = "tests/engine/test_new_weights.py"
BLOCKS = "tests/model_kernels/test_blocks.py"
FLOORS: dict[str, dict[str, dict[str, str]]] = {
    "rules": {
        RULES: {
            "block verification forgets the weight of the node above": (
                "weights.append(min(«weights[-1] *  → »probs.ratio, 1.0))"
            ),
            "block verification tries a prefix with its weight, not with its share": (
                "if node == 0 or rng.flip(«share(mass, weight) → weight», node):"
            ),
            "the residual is not normalised before the share is taken": "total = mass + «max(1.0 - weight, 0.0) → 1.0»",
            "traversal does not carry a node's weight to its child": "(child, min(«weight *  → »probs.ratio, 1.0))",
            "traversal takes what is left for the new weight": "weight = «share(mass, weight) → mass»",
            "recursive rejection accepts half as often": (
                "not rng.flip(probs.ratio« →  / 2», child):\n                probs, _"
            ),
            "greedy-k walks on a sampled child that holds the token": (
                "deterministic = «(child for child in tree.children[node] if tree.drawn[child] is "
                "Drawn.DETERMINISTIC) → iter(tree.children[node])»"
            ),
            "a walk follows the first of two twins only": "        nodes = below« → [:1]»\n",
            "trees of several sampled siblings are verified as multipath": (
                'return "greedy_k"« if kind.multipath else "traversal" → »'
            ),
            "the residual leaves the weight out": "alpha=self.mass / «(mass * weight) → mass»",
            "an elder sibling drawn without replacement stays in the distribution": (
                "rest._draft = «_without(self._drawn_from()[0], token) → self._drawn_from()[0]»"
            ),
        },
        LADDER: {
            "on a device the residual is the absolute difference": (
                "(self.left - draft * factor).«clamp_min(0) → abs()»"
            ),
            "on a device an elder sibling stays in the distribution": "gone = removed & « → ~»possible",
            "on a device the weight after a rejection is the mass that is left": (
                "share = «torch.where(total > 0, weighted_mass / total, torch.ones_like(total)) → weighted_mass»"
            ),
        },
    },
    "rollouts": {
        f"{LOOPS} -k optimiser": {
            "a loaded model is repacked, and what its optimiser changes is not seen": "plain = «named and not → not» (",
            "packed copies of weights outlive a call, and an optimiser's step is not seen": (
                "            «parent._modules[name] = layer\n            layer.__dict__.pop → layer.__dict__.get»"
            ),
        },
        f"{HF} -k log_probabilities": {
            "log-probabilities are the draft's where a token was drawn from one": (
                "«scored = [self.probs(node).values.log() if processed else self._logits(node) for node in "
                "nodes] → drafts = self._scores.trees[self._index].draft_probs\n"
                "        scored = [drafts.get(node, self.probs(node).values).log() for node in nodes]»"
            ),
        },
        f"{HF} -k plain_sampling": {
            "the rejected token's replacement is drawn from p in place of the residual": (
                "left = «torch.sub(self.values, draft, alpha=self.mass / (mass * weight)).clamp_(min=0) → "
                "self.values.clone()»"
            ),
        },
        f"{LOOPS} -k one_engine": {
            "an engine that grows is made anew, and drafters forget": (
                "if served is None or served.ends != ends« →  or served.llm.target.rows < rows»:"
            ),
        },
        f"{LOOPS} -k dropout": {
            "dropout stays on while a model that is trained generates": "        «module.training = False → pass»\n",
        },
        f"{HF} -k own": {
            "logits of a token are those behind another output": (
                "self.scored.append(«self.seen[tuple(self.output)] → next(iter(self.seen.values()))»)"
            ),
        },
        "tests/engine/test_seeds.py -k neighbouring": {
            "the answers of neighbouring seeds share their random numbers": (
                "return «(seed & (2**64 - 1)) | index << 64 → seed + index»"
            ),
        },
        f"{LOOPS} -k while_it_generates": {
            "an optimiser's step in the middle of a rollout is not seen": (
                "if «now == self._before → len(now) == len(self._before)»:"
            ),
        },
        "tests/serve/test_rollouts.py -k lossy": {
            "log-probabilities of a lossy rule are given for those that were sampled from": (
                "params.greedy or params.allow_biased or « → asked or »not asked"
            ),
        },
        f"{WEIGHTS} -k began_with": {
            "a packed weight stays that of the former policy, and nobody reads it back": (
                "    «for _, weight, layers in packed:\n        weight.rewrite(layers) → packed.clear()»\n"
            ),
            "the prefix cache keeps what the former weights computed": (
                "        self.target.write_weights(opened.weights, opened.folder)\n«        self.forget()\n → »"
            ),
            "a rounded twin goes on drafting with the former weights": (
                "        self.forget()\n«        self.drafting.reread()\n → »"
            ),
        },
        f"{WEIGHTS} -k end_as_asked": {
            "requests that come while others run out join them before the weights change": (
                "kept_from is None or completion.order «< kept_from → >= 0»"
            ),
            "answers are cut off before it is known whether the checkpoint fits": (
                "        «opened = await self._by_worker(self.llm.engine.open_weights, model_path, "
                "self.llm.tokenizer)\n"
                "        async with self._between_requests(mode): → async with self._between_requests(mode):\n"
                "            opened = await self._by_worker(self.llm.engine.open_weights, model_path, "
                "self.llm.tokenizer)»\n"
            ),
        },
        f"{WEIGHTS} -k nothing_is_lost": {
            "token ids of another tokenizer are taken for the server's": (
                "if here.«vocabulary != there.vocabulary → vocab_size < 0»:"
            ),
        },
        "tests/deploy/test_sequences.py -k own_prediction": {
            "in vLLM a row that holds the same text is taken for another request's": (
                "if wish != self._wishes.pop(place, NOTHING) and index «not  → »in begun:"
            ),
        },
        "tests/deploy/test_sequences.py -k learn_from_their_own": {
            "in vLLM the memory of another group is drafted from": (
                "_prompt(length), «self._wishes.get(place, NOTHING).group → None»)"
            ),
        },
    },
    "sampling": {
        SAMPLING: {
            "the repetition penalty rewards": (
                "torch.where(values > 0, values «/ p.repetition_penalty, values * → * p.repetition_penalty, "
                "values /» p.repetition_penalty)"
            ),
            "min-p is taken for a logit": "scaled < «math.log(params.min_p) → -params.min_p»",
            "the nucleus leaves out the token that reaches top-p": "ordered.cumsum() «- ordered  → »< top_p",
            "a bad word is compared without its first token": "if tail« == word[:-1] → [1:] == word[1:-1]»:",
            "all positions of a text draw with the same numbers": "counter=[index, stream, «position → 0», 0]",
        },
        f"{SAMPLING} {LADDER}": {
            "for all rows at once the frequency penalty counts a token once": (
                "presence * (times > 0) + frequency * «times → (times > 0)»"
            ),
        },
        "tests/contract/test_greedy.py": {
            "penalties at a drafted node do not see what is drafted above it": (
                "return [*self.committed(index)«, *(tree.tokens[step] for step in tree.path(node)) → »]"
            ),
        },
        f"{SAMPLING} tests/engine/test_llm.py": {
            "an answer may end a token too early": "if len(output) « → + 1 »< p.min_tokens:",
        },
        f"{SAMPLING} tests/drafters/test_drawing.py": {
            "drafts draw with the numbers of the target": (
                "_uniforms(self._bits(self.position, «self.draft_stream → Stream.TARGET», 0).random_raw(), counters)"
            ),
        },
    },
    "tree": {
        TREE: {
            "deep nodes do not see all that is above them": "        steps *= «2 → 8»\n",
            "a joined tree has more nodes than it may": "added«[: max(0, nodes - base.size)] → »",
            "a sampled node of another tree is taken over": (
                "«or other.drawn[node] is not Drawn.DETERMINISTIC → »:\n            continue"
            ),
        },
        f"{TREE} tests/contract/test_recorded.py": {
            "sampled duplicates are merged": "mergeable = «drawn is Drawn.DETERMINISTIC and  → »not probe",
        },
        f"{TREE} tests/control": {
            "sampled nodes may be pruned after they were drawn": (
                "return self.resume is None and not self.probes« and not self.sampled → »"
            ),
        },
    },
    "step": {
        "tests/contract/test_ends.py": {
            "a stop token that was accepted is lost": (
                "verdict = Verdict(path=verdict.path[:length], next_token=«tree.tokens[node] → "
                "verdict.next_token», kind=Source.DRAFT)"
            ),
            "a draft may take the last token that a row has room for": (
                "min(depth, rows[index].tokens_left« - 1 → ») for"
            ),
        },
        "tests/engine/test_hidden_states.py tests/contract/test_cache.py": {
            "a drafter is shown the states of nodes that were not accepted": (
                "nodes = [[0, *«verdict.path → range(1, 1 + len(verdict.path))»] + [0]"
            ),
        },
        "tests/drafters/test_bad_probs.py": {
            "what was drawn from no distribution is scored": (
                "wrong = «{node: mass for node, mass in tree.masses.items() if not abs(mass - 1) < "
                "TOLERANCE} → dict[int, float]()»"
            ),
        },
    },
    "model": {
        "tests/model/test_cache.py tests/model/test_families.py": {
            "a token looks at one slot too many behind the committed ones": (
                "(slots - (block.lengths.unsqueeze(1)« - 1 → »)).clamp_(0, block.sees.shape[2] + 1)"
            ),
            "a sliding window is a position too wide": "return queries - keys <« → =» self.window",
            "a window is counted in slots, which siblings do not share": (
                "«torch.where(relative < 0, slots, self.node_positions.gather(1, node)) → slots.expand_as(relative)»"
            ),
        },
        "tests/model/test_families.py tests/model/test_self_check.py": {
            "positions of siblings rise as slots do": (
                "positions = (lengths + «self.depths → torch.arange(self.ids.shape[1])»).clamp(max=longest - 1)"
            ),
        },
        "tests/model/test_cache.py tests/contract/test_cache.py": {
            "padding is written over the first token": (
                "slots = torch.where(self.real, lengths + torch.arange(self.ids.shape[1]), «dump → 0»)"
            ),
        },
        "tests/model/test_cache.py": {
            "an accepted path is moved a slot too far": "row * stride + start + offset« →  + 1»\n",
            "the root is not kept": "self.hold(row, self.lengths[row] + «1 +  → »len(path))",
            "a cache of many rows places tokens without the slot for padding": (
                "return rows.unsqueeze(1) * «(self.slots + 1) → self.slots» + slot_ids"
            ),
        },
        "tests/model/test_cache.py tests/contract/test_clean_rows.py": {
            "what is left behind a text is not zeroed": "store[row, start : start + count] « → +»= 0",
        },
        "tests/model/test_cache.py tests/engine/test_prefix_reuse.py": {
            "a copied row lacks its last token": (
                "store«[target, :length] = store[source, :length] → [target, : length - 1] = store[source, : "
                "length - 1]»"
            ),
        },
    },
    "isolation": {
        "tests/engine/test_prefix_reuse.py": {
            "a free row of another domain serves a prompt": "shared[row] = 0 if lost «or free.salt != salt  → »else",
            "a running row of another domain is copied": (
                "for row, (tokens, domain) in running.items()« if domain == salt → »"
            ),
            "prefixes are shared token by token, so that times tell how far a guess is right": (
                "return max(0, length - 1)« // BLOCK * BLOCK → »"
            ),
        },
        "tests/contract/test_isolated.py": {
            "what is learned is learned from all domains together": (
                "            self._kept[salt] = « → next(iter(self._kept.values()), None) or »self._make()\n"
            ),
        },
    },
    "engine": {
        "tests/engine/test_new_weights.py": {
            "wake_up lets requests in while an update of the weights waits": (
                "await self._by_worker(self.«_resume → _end_pause»)"
            ),
        },
        "tests/engine/test_prefix_reuse.py": {
            "a row that a measurement wrote to is taken for what it held": (
                "lost = «free.writes != self._target.writes[row] or  → »("
            ),
        },
        "tests/engine/test_preemption.py": {
            "memory is claimed for a token less than a step may write": (
                "«1 + self.drafting.depth(completion.drafter, asked) → -8»)"
            ),
        },
        "tests/contract/test_ends.py": {
            "tokens behind the end of an answer stay in its row": "self.row.shorten(«surplus → 0»)",
        },
        "tests/engine/test_llm.py tests/engine/test_text.py": {
            "a stop string is looked for before min_tokens": "search=«length >= params.min_tokens → True»",
        },
        "tests/engine/test_text.py": {
            "a character that spans tokens is handed out before it is whole": (
                "incomplete = «not final and text.endswith(_INCOMPLETE) → False»"
            ),
        },
    },
    "policy": {
        "tests/control": {
            "drafting counts as free": "rate = tokens / time(«depth, index + 1 → 0, 0»)",
            "what drafting costs is not held against what it brings": (
                "gain = tokens - goodput * «(times[size] + ms) → times[size]»"
            ),
            "nodes are allocated whatever they cost": "gains.append(total« - goodput * times[least + len(order)] → »)",
            "depths behind a rejection count as rejected": (
                "for depth in range(«min(accepted + 1, drafted) → drafted»):"
            ),
        },
        "tests/control/test_trials.py": {
            "a dear trial comes as soon as a cheap one": (
                "self._due = step + «max(self.least, round(spent / SETTINGS.trial_share)) → self.least»"
            ),
        },
        "tests/control/test_simulated.py": {
            "what copies save is counted once for each row of the step": (
                "gain = rows_per_query * lost « → * step.batch »/ step.goodput"
            ),
        },
        "tests/control/test_lookups.py": {
            "what is put off is asked as rarely as a model is tried": "«    least = 1\n → »",
        },
        "tests/engine/test_cost.py": {
            "prices that were timed beside other work are kept": "if seen«[-1] >= least[-1] → »:",
            "costs between two measured sizes are those of the smaller one": (
                "return values[index - 1]« + share * (values[index] - values[index - 1]) → »"
            ),
        },
        "tests/contract/test_controlled.py": {
            "what is not asked forgets the answers that it did not draft for": (
                "«self.drafting.finish(drafter, row) → pass»"
            ),
        },
        "tests/control/test_parts.py": {
            "one slow pass is believed": "self._low[size] = sorted(ratios)[«(len(ratios) - 1) // 4 → -1»]",
        },
    },
    "drafters": {
        "tests/contract/test_cache.py": {
            "a draft model keeps a token that was rejected": (
                "«committed[len(above)] == self.tokens[node] → (node == 1 or committed[len(above)] == "
                "self.tokens[node])»:"
            ),
        },
        "tests/contract/test_recorded.py": {
            "what is recorded of a draft is the distribution before the request's parameters": (
                "«return children_of(probs.view(1, 1, -1), self.shape.widths[len(path)], draw, pick) → found "
                "= children_of(probs.view(1, 1, -1), self.shape.widths[len(path)], draw, pick)\n"
                "        return replace(found, probs=logits.float().softmax(-1).view(1, 1, -1))»"
            ),
        },
        "tests/drafters/test_drawing.py": {
            "siblings without replacement are drawn with replacement": "rest«.scatter(-1, token, 0.0) → »",
        },
        "tests/drafters/test_drawing.py tests/contract/test_recorded.py": {
            "what is recorded of a greedy-k draft is the whole distribution": "(parts, «rest → probs»)\n",
        },
        "tests/drafters/test_drawing.py tests/drafters/test_draft_model.py": {
            "how many nodes are submitted hangs on one level less": (
                "last = self.levels[min(depth, len(self.widths))].stop «- 1  → »if depth > 0 else 0"
            ),
        },
        "tests/heads/test_unrolling.py": {
            "a head's drafted nodes do not see what they descend from": (
                "sees = torch.cat([«inherited → torch.zeros_like(inherited)», own], dim=-1)"
            ),
            "a head drafts at the positions of one level below": (
                "positions = (last.lengths + last.depth« →  + 1»).unsqueeze(1).expand(-1, width)"
            ),
        },
        "tests/contract/test_controlled.py tests/engine/test_seeds.py": {
            "a seeded request is drafted for by drawing": (
                "seeded = «not sampler.greedy and sampler.params.seed is not None → False»"
            ),
        },
        "tests/drafters/test_ngram.py": {
            "a shorter text is not read again": (
                "row in self._texts and length < self.batch.rows[row, READ]:\n"
                "                «self._shrink(row, length) → pass»"
            ),
        },
        "tests/drafters/test_recycling.py": {
            "a matrix of successors is read a token too late": (
                "start = max(self._covered.get(row_id, 0), len(tokens) - fresh« - 1 → », 0)"
            ),
        },
    },
    "formats": {
        "tests/heads/test_layer_ids.py tests/heads/test_formats.py": {
            "layer ids are written as boundaries": (
                "return «[boundary - 1 for boundary in boundaries] → list(boundaries)»"
            ),
            "layer ids are read as boundaries": "return tuple(«layer + 1 for layer in layers → layers»)",
        },
        "tests/heads": {
            "a window without a list of layers is forgotten": (
                '        return {"sliding_window": «window → None»}\n    if not isinstance(kinds, list)'
            ),
            "transformers 5's rope base is not read": (
                'theta = float(rope.pop("rope_theta", None) « → and theta »or theta)'
            ),
            "a tied output head hides a head's own": '"tie_word_embeddings": «False → True»,\n        **window,',
        },
    },
    "training": {
        "tests/losses/test_chunked_loss.py": {
            "the loss takes the teacher's probabilities as they are, not over the student's tokens": (
                "losses -= (logits @ probs.«renormalised → full».transpose(1, 2)).squeeze(-1)"
            ),
            "the gradient of the true token is half as large": "torch.full_like(losses[..., None], -«1.0 → 0.5»)",
            "rows of weight 0 are counted": "figures.flatten(1)«.masked_fill_(target.weights == 0, 0.0) → »",
        },
    },
    "server": {
        "tests/serve/test_endpoints.py": {
            "a key that begins right is right": (
                "«hmac.compare_digest(given.strip().encode(), key.encode()) → key.startswith(given.strip())»"
            ),
        },
        "tests/serve/test_keys.py tests/serve/test_isolation.py": {
            "a salt of a client's own leads into any domain": '"salted", «self.key,  → »own)',
            "requests without keys share a domain": "domain=None if «shared → True» else",
        },
        "tests/serve/test_bounds.py tests/serve/test_refusals.py": {
            "a body may be as large as it likes if it does not say so": (
                "«            if read > self._most:\n                raise too_large\n → »"
            ),
        },
        "tests/serve/test_fuzz.py": {
            "a key that stands twice in a body is taken once": "    if len(found) «< → >» len(pairs):\n        twice",
        },
        "tests/serve/test_logs.py": {
            "the log shows what an error says, which may quote a prompt": (
                '(str(error))« if message else "withheld; --log-prompts shows it" → »'
            ),
        },
        "tests/serve/test_endpoints.py tests/serve/test_openai_client.py tests/serve/test_client_features.py": {
            "choices of several prompts have the same index": (
                "self.choice(«job * self.body.n +  → »answer.index, output, answer)"
            ),
        },
        "tests/serve/test_tools.py tests/serve/test_calls_read_back.py": {
            "what looks like a call and is none is lost": "yield Piece(Kind.CONTENT, «text.text[start:behind] → ''»)",
        },
    },
    "plan": {
        "tests/plan": {
            "an expected speed-up leaves the draft's own cost out": (
                "step = coverage * «(verify + draft.level_ms * depth) → verify» + (1 - coverage) * plain + "
                "draft.fixed_ms"
            ),
            "survival is the acceptance of each depth alone": "lambda survival, rate: «survival *  → »rate",
        },
    },
    "certify": {
        "tests/certify": {
            "a run without checks has passed": (
                "return «any(not check.left_out for check in self.checks) and all → all»(check.passed for "
                "check in self.checks)"
            ),
        },
    },
    "kernels": {
        "tests/model_kernels/test_native.py tests/model_kernels/test_trees.py": {
            "a query without padding takes its number for its place": (
                "return «p->starts ? p->kept[p->starts[batch] + at] - batch * p->count :  → »at;"
            ),
        },
    },
    "decode": {
        "tests/model_kernels/test_padding.py": {
            "logits of real nodes alone are read in the order of the rows that were asked for": (
                "self.logits[0, self._starts[«row → index»] + node]"
            ),
        },
        "tests/engine/test_numeric_failures.py": {
            "the new scores of a row that failed among unequal drafts go to the first row": (
                "scored.logits[0, « → 0 * »scored.flat.starts[indices]] = again"
            ),
        },
    },
    "control": {
        "tests/control/test_parts.py": {
            "what was seen on a slow machine stays as dear when it is fast again": (
                "return 1.0 if «then is None or self._fresh(size) → size» else"
            ),
            "a node counts as if it had no likelier sibling": (
                "survival[child] = «min(alone[child], left) → alone[child]»"
            ),
        },
        "tests/control tests/engine/test_cost.py": {
            "what passes of a batch took is kept as that of one row's nodes": (
                "nodes = round(«rows * (1 + self.shape.nodes(size, rows)) → 1 + self.shape.nodes(size, rows)»)"
            ),
        },
    },
    "blocks": {
        BLOCKS: {
            "the least value of a nested block is added": (
                "_mm512_mul_ps(«least ? _mm512_mul_ps(outer, all_lanes(-1.0f)) :  → »outer, _mm512_cvtepi32_ps(inner))"
            ),
            "a zero loses the sign of its scale": "f.least ? scales_of(f, b, part * WIDTH, 1) : all_lanes(«- → »0.0f)",
            "integers that were moved up stay so": "if («!LEAST → 0») words = add_words(words",
            "a state in 8 bits is cut, not rounded": "words[half] = «_mm256_cvtps_epi32 → _mm256_cvttps_epi32»(",
            "what rounding leaves of an outstanding group is left out": "if («*s.outstanding → 0») add_group(",
            "the least value is multiplied by half of the states": (
                "«INPUTS == GROUP ? last->total : last->pair → last->total»"
            ),
            "rows stay in the order of the file": "part.content.shape[1] * «part.order → np.arange(len(part.order))»",
            "rows behind the eighth take the sums of the first ones' states": (
                "states_in(room« + tile * size → », groups, count), panel)"
            ),
        },
        "tests/model/test_gguf_blocks.py": {
            "a file's weights are taken for the model's unseen": (
                "return StoredRows(tensor.type, content, order[:, 0])« if same else None → »"
            ),
        },
    },
}
"""The faults of each floor, by the tests that must notice them: what is wrong, and the change in the source's text,
marked as «old → new»."""


def read_change(change: str) -> tuple[str, str]:
    """The old text and the new one."""
    before, rest = change.split("«")
    changed, behind = rest.split("»")
    old, new = changed.split(" → ")
    return before + old + behind, before + new + behind


FAULTS = [
    Fault(floor, what, *read_change(change), tests)
    for floor, by_tests in FLOORS.items()
    for tests, changes in by_tests.items()
    for what, change in changes.items()
]


def main() -> int:
    """Plant the faults whose floor or number is named, or all; 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="FLOOR|NUMBER")
    wanted = parser.parse_args().wanted
    chosen = [(n, f) for n, f in enumerate(FAULTS, 1) if not wanted or str(n) in wanted or f.floor in wanted]
    places = {number: fault.place(ROOT / "src") for number, fault in chosen}
    for name in ("pytest", "hypothesis", "scipy.stats", "torch", "transformers", "numba"):
        importlib.import_module(name)  # once, for all processes that are forked
    running, survived = dict[int, tuple[int, Fault, float]](), 0
    with tempfile.TemporaryDirectory() as folder:
        sound = Fault("none", "nothing is wrong", "import", "import", "tests/core/test_rules.py -k says_what_it_is")
        _, status = os.waitpid(_test(Path(folder) / "0", sound, ROOT / "src/forerun/__init__.py"), 0)
        if os.waitstatus_to_exitcode(status) != 0:
            parser.error("the tests fail where nothing is wrong")
        while chosen or running:
            if chosen and len(running) < AT_ONCE:
                number, fault = chosen.pop(0)
                running[_test(Path(folder) / str(number), fault, places[number])] = number, fault, time.monotonic()
                continue
            pid, status = os.wait()
            number, fault, began = running.pop(pid)
            ended = os.waitstatus_to_exitcode(status)
            said = {0: "SURVIVED", 1: "caught", -signal.SIGALRM: "caught, hangs"}.get(ended, f"FAILED with {ended}")
            survived += not said.startswith("caught")
            seconds, where = time.monotonic() - began, places[number].name
            sys.stdout.write(f"{number:3} {seconds:4.0f} s {said}: {fault.what} ({where})\n")
            sys.stdout.flush()
    sys.stdout.write(f"{survived} faults were not caught\n")
    return int(survived > 0)


def _test(folder: Path, fault: Fault, place: Path) -> int:
    """Begin a process that runs the fault's tests on a copy of the source with the fault in it; its id."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    wrong = folder / place.relative_to(ROOT)
    wrong.write_text(wrong.read_text().replace(fault.old, fault.new))
    if pid := os.fork():
        return pid
    code = 9
    try:  # what raises here must not unwind the parent's frames
        signal.alarm(LIMIT_S)
        os.chdir(ROOT)
        sys.path.insert(0, str(folder / "src"))
        os.environ["PYTHONPATH"] = str(folder / "src")  # for commands that tests run
        sys.dont_write_bytecode = True
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
        quiet = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = importlib.import_module("pytest").main([*quiet, *fault.tests.split()])
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
