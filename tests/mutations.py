"""Faults planted in a copy of the source, one at a time: the tests named beside each must fail.

    python tests/mutations.py            # all of them, two at a time; ends with 1 if one survives
    python tests/mutations.py rules 12   # those whose floor or number is named

A fault is found by its old text, which stands once in `src`: so the list outlives files that move. Where the text has
changed the command says so, and the fault is written anew.
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
FLOORS: dict[str, dict[str, tuple[str, str, str]]] = {
    "rules": {
        "block verification forgets the weight of the node above": (
            "weights.append(min(weights[-1] * probs.ratio, 1.0))",
            "weights.append(min(probs.ratio, 1.0))",
            RULES,
        ),
        "block verification tries a prefix with its weight, not with its share": (
            "if node == 0 or rng.flip(share(mass, weight), node):",
            "if node == 0 or rng.flip(weight, node):",
            RULES,
        ),
        "the residual is not normalised before the share is taken": (
            "total = mass + max(1.0 - weight, 0.0)",
            "total = mass + 1.0",
            RULES,
        ),
        "traversal does not carry a node's weight to its child": (
            "(child, min(weight * probs.ratio, 1.0))",
            "(child, min(probs.ratio, 1.0))",
            RULES,
        ),
        "traversal takes what is left for the new weight": (
            "weight = share(mass, weight)",
            "weight = mass",
            RULES,
        ),
        "recursive rejection accepts half as often": (
            "not rng.flip(probs.ratio, child):\n                probs, _",
            "not rng.flip(probs.ratio / 2, child):\n                probs, _",
            RULES,
        ),
        "greedy-k walks on a sampled child that holds the token": (
            "given = (child for child in tree.children[node] if tree.drawn[child] is Drawn.DETERMINISTIC)",
            "given = iter(tree.children[node])",
            RULES,
        ),
        "a walk follows the first of two twins only": (
            "        nodes = below\n",
            "        nodes = below[:1]\n",
            RULES,
        ),
        "trees of several sampled siblings are verified as multipath": (
            'return "greedy_k" if kind.multipath else "traversal"',
            'return "greedy_k"',
            RULES,
        ),
        "the residual leaves the weight out": (
            "alpha=self.mass / (mass * weight)",
            "alpha=self.mass / mass",
            RULES,
        ),
        "an elder sibling drawn without replacement stays in the distribution": (
            "rest._draft = _without(self._drawn_from()[0], token)",
            "rest._draft = self._drawn_from()[0]",
            RULES,
        ),
        "on a device the residual is the absolute difference": (
            "(self.left - draft * factor).clamp_min(0)",
            "(self.left - draft * factor).abs()",
            LADDER,
        ),
        "on a device an elder sibling stays in the distribution": (
            "gone = removed & possible",
            "gone = removed & ~possible",
            LADDER,
        ),
        "on a device the weight after a rejection is the mass that is left": (
            "share = torch.where(total > 0, kept / total, torch.ones_like(total))",
            "share = kept",
            LADDER,
        ),
    },
    "rollouts": {
        "a loaded model is repacked, and what its optimiser changes is not seen": (
            "plain = named and not (",
            "plain = not (",
            f"{LOOPS} -k optimiser",
        ),
        "packed copies of weights outlive a call, and an optimiser's step is not seen": (
            "            parent._modules[name] = layer\n            layer.__dict__.pop",
            "            layer.__dict__.get",
            f"{LOOPS} -k optimiser",
        ),
        "log-probabilities are the draft's where a token was drawn from one": (
            "scored = [self.probs(node).values.log() if processed else self._logits(node) for node in nodes]",
            "drafts = self._scores.trees[self._index].draft_probs\n"
            "        scored = [drafts.get(node, self.probs(node).values).log() for node in nodes]",
            f"{HF} -k log_probabilities",
        ),
        "the rejected token's replacement is drawn from p in place of the residual": (
            "left = torch.sub(self.values, draft, alpha=self.mass / (mass * weight)).clamp_(min=0)",
            "left = self.values.clone()",
            f"{HF} -k plain_sampling",
        ),
        "an engine that grows is made anew, and drafters forget": (
            "if served is None or served.ends != ends:",
            "if served is None or served.ends != ends or served.llm.target.rows < rows:",
            f"{LOOPS} -k one_engine",
        ),
        "dropout stays on while a model that is trained generates": (
            "        module.training = False\n",
            "        pass\n",
            f"{LOOPS} -k dropout",
        ),
        "logits of a token are those behind another output": (
            "self.scored.append(self.seen[tuple(self.output)])",
            "self.scored.append(next(iter(self.seen.values())))",
            f"{HF} -k own",
        ),
        "the answers of neighbouring seeds share their random numbers": (
            "return (seed & (2**64 - 1)) | index << 64",
            "return seed + index",
            "tests/engine/test_seeds.py -k neighbouring",
        ),
        "an optimiser's step in the middle of a rollout is not seen": (
            "if now == self._before:",
            "if len(now) == len(self._before):",
            f"{LOOPS} -k while_it_generates",
        ),
        "log-probabilities of a lossy rule are given for those that were sampled from": (
            "params.greedy or params.allow_biased or not asked",
            "params.greedy or params.allow_biased or asked or not asked",
            "tests/serve/test_rollouts.py -k lossy",
        ),
        "a packed weight stays that of the former policy, and nobody reads it back": (
            "    for _, weight, layers in packed:\n        weight.rewrite(layers)\n",
            "    packed.clear()\n",
            f"{WEIGHTS} -k began_with",
        ),
        "the prefix cache keeps what the former weights computed": (
            "        self.target.write_weights(opened.weights, opened.folder)\n        self.forget()\n",
            "        self.target.write_weights(opened.weights, opened.folder)\n",
            f"{WEIGHTS} -k began_with",
        ),
        "a rounded twin goes on drafting with the former weights": (
            "        self.forget()\n        self.drafting.reread()\n",
            "        self.forget()\n",
            f"{WEIGHTS} -k began_with",
        ),
        "requests that come while others run out join them before the weights change": (
            "kept_from is None or completion.order < kept_from",
            "kept_from is None or completion.order >= 0",
            f"{WEIGHTS} -k end_as_asked",
        ),
        "answers are cut off before it is known whether the checkpoint fits": (
            "        opened = await self._by_worker(self.llm.engine.open_weights, model_path, self.llm.tokenizer)\n"
            "        async with self._between_requests(mode):\n",
            "        async with self._between_requests(mode):\n            opened = await self._by_worker("
            "self.llm.engine.open_weights, model_path, self.llm.tokenizer)\n",
            f"{WEIGHTS} -k end_as_asked",
        ),
        "token ids of another tokenizer are taken for the server's": (
            "if here.vocabulary != there.vocabulary:",
            "if here.vocab_size < 0:",
            f"{WEIGHTS} -k nothing_is_lost",
        ),
        "in vLLM a row that holds the same text is taken for another request's": (
            "if wish != self._wishes.pop(place, NOTHING) and index not in begun:",
            "if wish != self._wishes.pop(place, NOTHING) and index in begun:",
            "tests/deploy/test_sequences.py -k own_prediction",
        ),
        "in vLLM the memory of another group is drafted from": (
            "_prompt(length), self._wishes.get(place, NOTHING).group)",
            "_prompt(length), None)",
            "tests/deploy/test_sequences.py -k learn_from_their_own",
        ),
    },
    "sampling": {
        "the repetition penalty rewards": (
            "torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)",
            "torch.where(values > 0, values * p.repetition_penalty, values / p.repetition_penalty)",
            SAMPLING,
        ),
        "for all rows at once the frequency penalty counts a token once": (
            "presence * (times > 0) + frequency * times",
            "presence * (times > 0) + frequency * (times > 0)",
            f"{SAMPLING} {LADDER}",
        ),
        "penalties at a drafted node do not see what is drafted above it": (
            "return [*self.committed(index), *(tree.tokens[step] for step in tree.path(node))]",
            "return [*self.committed(index)]",
            "tests/contract/test_greedy.py",
        ),
        "an answer may end a token too early": (
            "if len(output) < p.min_tokens:",
            "if len(output) + 1 < p.min_tokens:",
            f"{SAMPLING} tests/engine/test_llm.py",
        ),
        "min-p is taken for a logit": (
            "scaled < math.log(params.min_p)",
            "scaled < -params.min_p",
            SAMPLING,
        ),
        "the nucleus leaves out the token that reaches top-p": (
            "ordered.cumsum() - ordered < top_p",
            "ordered.cumsum() < top_p",
            SAMPLING,
        ),
        "a bad word is compared without its first token": (
            "if tail == word[:-1]:",
            "if tail[1:] == word[1:-1]:",
            SAMPLING,
        ),
        "all positions of a text draw with the same numbers": (
            "counter=[index, stream, position, 0]",
            "counter=[index, stream, 0, 0]",
            SAMPLING,
        ),
        "drafts draw with the numbers of the target": (
            "_uniforms(self._bits(self.position, self.draft_stream, 0).random_raw(), counters)",
            "_uniforms(self._bits(self.position, Stream.TARGET, 0).random_raw(), counters)",
            f"{SAMPLING} tests/drafters/test_drawing.py",
        ),
    },
    "tree": {
        "deep nodes do not see all that is above them": (
            "        steps *= 2\n",
            "        steps *= 8\n",
            TREE,
        ),
        "a joined tree has more nodes than it may": (
            "rest[: max(0, nodes - fixed)]",
            "rest",
            TREE,
        ),
        "a sampled node of another tree is taken over": (
            "or other.drawn[node] is not Drawn.DETERMINISTIC:\n            continue",
            ":\n            continue",
            TREE,
        ),
        "sampled duplicates are merged": (
            "given = drawn is Drawn.DETERMINISTIC and not probe",
            "given = not probe",
            f"{TREE} tests/contract/test_recorded.py",
        ),
        "sampled nodes may be pruned after they were drawn": (
            "return self.resume is None and not self.probes and not self.sampled",
            "return self.resume is None and not self.probes",
            f"{TREE} tests/control",
        ),
    },
    "step": {
        "a stop token that was accepted is lost": (
            "verdict = Verdict(path=verdict.path[:length], next_token=tree.tokens[node], kind=Source.DRAFT)",
            "verdict = Verdict(path=verdict.path[:length], next_token=verdict.next_token, kind=Source.DRAFT)",
            "tests/contract/test_ends.py",
        ),
        "a drafter is shown the states of nodes that were not accepted": (
            "nodes = [[0, *verdict.path] + [0]",
            "nodes = [[0, *range(1, 1 + len(verdict.path))] + [0]",
            "tests/engine/test_hidden_states.py tests/contract/test_cache.py",
        ),
        "a draft may take the last token that a row has room for": (
            "min(depth, rows[index].tokens_left - 1) for",
            "min(depth, rows[index].tokens_left) for",
            "tests/contract/test_ends.py",
        ),
        "what was drawn from no distribution is scored": (
            "wrong = {node: mass for node, mass in tree.masses.items() if not abs(mass - 1) < TOLERANCE}",
            "wrong = dict[int, float]()",
            "tests/drafters/test_bad_probs.py",
        ),
    },
    "model": {
        "a token looks at one slot too many behind the committed ones": (
            "(block.sees.gather(2, index) & inside.unsqueeze(1)) | (relative < 0).unsqueeze(1)",
            "(block.sees.gather(2, index) & inside.unsqueeze(1)) | (relative <= 1).unsqueeze(1)",
            "tests/model/test_cache.py tests/model/test_families.py",
        ),
        "a sliding window is a position too wide": (
            "return queries - keys < self.window",
            "return queries - keys <= self.window",
            "tests/model/test_cache.py tests/model/test_families.py",
        ),
        "a window is counted in slots, which siblings do not share": (
            "torch.where(relative < 0, slots, self.node_positions.gather(1, node))",
            "slots.expand_as(relative)",
            "tests/model/test_cache.py tests/model/test_families.py",
        ),
        "positions of siblings rise as slots do": (
            "positions = (lengths + self.depths).clamp(max=longest - 1)",
            "positions = (lengths + torch.arange(self.ids.shape[1])).clamp(max=longest - 1)",
            "tests/model/test_families.py tests/model/test_self_check.py",
        ),
        "padding is written over the first token": (
            "slots = torch.where(self.real, lengths + torch.arange(self.ids.shape[1]), dump)",
            "slots = torch.where(self.real, lengths + torch.arange(self.ids.shape[1]), 0)",
            "tests/model/test_cache.py tests/contract/test_cache.py",
        ),
        "an accepted path is moved a slot too far": (
            "row * stride + start + offset\n",
            "row * stride + start + offset + 1\n",
            "tests/model/test_cache.py",
        ),
        "the root is not kept": (
            "self.lengths[row] += 1 + len(path)",
            "self.lengths[row] += len(path)",
            "tests/model/test_cache.py",
        ),
        "what is left behind a text is not zeroed": (
            "store[row, start : start + count] = 0",
            "store[row, start : start + count] += 0",
            "tests/model/test_cache.py tests/contract/test_clean_rows.py",
        ),
        "a copied row lacks its last token": (
            "store[target, :length] = store[source, :length]",
            "store[target, : length - 1] = store[source, : length - 1]",
            "tests/model/test_cache.py tests/engine/test_prefix_reuse.py",
        ),
        "a cache of many rows places tokens without the slot for padding": (
            "return rows.unsqueeze(1) * (self.slots + 1) + slot_ids",
            "return rows.unsqueeze(1) * self.slots + slot_ids",
            "tests/model/test_cache.py",
        ),
    },
    "isolation": {
        "a free row of another domain serves a prompt": (
            "shared[row] = 0 if lost or kept.salt != salt else",
            "shared[row] = 0 if lost else",
            "tests/engine/test_prefix_reuse.py",
        ),
        "a running row of another domain is copied": (
            "for row, (tokens, domain) in running.items() if domain == salt",
            "for row, (tokens, domain) in running.items()",
            "tests/engine/test_prefix_reuse.py",
        ),
        "prefixes are shared token by token, so that times tell how far a guess is right": (
            "return max(0, length - 1) // BLOCK * BLOCK",
            "return max(0, length - 1)",
            "tests/engine/test_prefix_reuse.py",
        ),
        "what is learned is learned from all domains together": (
            "            self._kept[salt] = self._make()\n",
            "            self._kept[salt] = next(iter(self._kept.values()), None) or self._make()\n",
            "tests/contract/test_isolated.py",
        ),
    },
    "engine": {
        "wake_up lets requests in while an update of the weights waits": (
            "await self._by_worker(self._resume)",
            "await self._by_worker(self._end_pause)",
            "tests/engine/test_new_weights.py",
        ),
        "a row that a measurement wrote to is taken for what it held": (
            "lost = kept.writes != self._target.writes[row] or (",
            "lost = (",
            "tests/engine/test_prefix_reuse.py",
        ),
        "memory is claimed for a token less than a step may write": (
            "1 + self.drafting.depth(completion.drafter, asked))",
            "-8)",
            "tests/engine/test_preemption.py",
        ),
        "tokens behind the end of an answer stay in its row": (
            "self.row.shorten(surplus)",
            "self.row.shorten(0)",
            "tests/contract/test_ends.py",
        ),
        "a stop string is looked for before min_tokens": (
            "search=length >= params.min_tokens",
            "search=True",
            "tests/engine/test_llm.py tests/engine/test_text.py",
        ),
        "a character that spans tokens is handed out before it is whole": (
            "incomplete = not final and text.endswith(_INCOMPLETE)",
            "incomplete = False",
            "tests/engine/test_text.py",
        ),
    },
    "policy": {
        "drafting counts as free": (
            "rate = tokens / time(depth, index + 1)",
            "rate = tokens / time(0, 0)",
            "tests/control",
        ),
        "what drafting costs is not held against what it brings": (
            "gain = tokens - goodput * (times[size] + ms)",
            "gain = tokens - goodput * times[size]",
            "tests/control",
        ),
        "nodes are allocated whatever they cost": (
            "gains.append(total - goodput * times[least + len(order)])",
            "gains.append(total)",
            "tests/control",
        ),
        "a dear trial comes as soon as a cheap one": (
            "self._due = step + max(self.least, round(spent / SETTINGS.trial_share))",
            "self._due = step + self.least",
            "tests/control/test_trials.py",
        ),
        "what copies save is counted once for each row of the step": (
            "gain = rows_per_query * lost / step.goodput",
            "gain = rows_per_query * lost * step.batch / step.goodput",
            "tests/control/test_simulated.py",
        ),
        "what is put off is asked as rarely as a model is tried": (
            "    least = 1\n",
            "",
            "tests/control/test_lookups.py",
        ),
        "prices that were timed beside other work are kept": (
            "if seen[-1] >= least[-1]:",
            "if seen:",
            "tests/engine/test_cost.py",
        ),
        "what is not asked forgets the answers that it did not draft for": (
            "self.drafting.finish(drafter, row)",
            "pass",
            "tests/contract/test_controlled.py",
        ),
        "depths behind a rejection count as rejected": (
            "for depth in range(min(accepted + 1, drafted)):",
            "for depth in range(drafted):",
            "tests/control",
        ),
        "costs between two measured sizes are those of the smaller one": (
            "return values[index - 1] + share * (values[index] - values[index - 1])",
            "return values[index - 1]",
            "tests/engine/test_cost.py",
        ),
        "one slow pass is believed": (
            "self._low[size] = sorted(ratios)[(len(ratios) - 1) // 4]",
            "self._low[size] = sorted(ratios)[-1]",
            "tests/control/test_parts.py",
        ),
    },
    "drafters": {
        "a draft model keeps a token that was rejected": (
            "committed[len(above)] == self.tokens[node]:",
            "(node == 1 or committed[len(above)] == self.tokens[node]):",
            "tests/contract/test_cache.py",
        ),
        "what is recorded of a draft is the distribution before the request's parameters": (
            "return children_of(probs.view(1, 1, -1), self.shape.widths[len(path)], draw, pick)",
            "found = children_of(probs.view(1, 1, -1), self.shape.widths[len(path)], draw, pick)\n"
            "        return replace(found, probs=logits.float().softmax(-1).view(1, 1, -1))",
            "tests/contract/test_recorded.py",
        ),
        "siblings without replacement are drawn with replacement": (
            "rest.scatter(-1, token, 0.0)",
            "rest",
            "tests/drafters/test_drawing.py",
        ),
        "what is recorded of a greedy-k draft is the whole distribution": (
            "(parts, rest)\n",
            "(parts, probs)\n",
            "tests/drafters/test_drawing.py tests/contract/test_recorded.py",
        ),
        "how many nodes are submitted hangs on one level less": (
            "last = self.levels[min(depth, len(self.widths))].stop - 1 if depth > 0 else 0",
            "last = self.levels[min(depth, len(self.widths))].stop if depth > 0 else 0",
            "tests/drafters/test_drawing.py tests/drafters/test_draft_model.py",
        ),
        "a head's drafted nodes do not see what they descend from": (
            "sees = torch.cat([inherited, own], dim=-1)",
            "sees = torch.cat([torch.zeros_like(inherited), own], dim=-1)",
            "tests/heads/test_unrolling.py",
        ),
        "a head drafts at the positions of one level below": (
            "positions = (last.lengths + last.depth).unsqueeze(1).expand(-1, width)",
            "positions = (last.lengths + last.depth + 1).unsqueeze(1).expand(-1, width)",
            "tests/heads/test_unrolling.py",
        ),
        "a seeded request is drafted for by drawing": (
            "seeded = not sampler.greedy and sampler.params.seed is not None",
            "seeded = False",
            "tests/contract/test_controlled.py tests/engine/test_seeds.py",
        ),
        "a shorter text is not read again": (
            "row in self._texts and length < self.batch.rows[row, READ]:\n                self._shrink(row, length)",
            "row in self._texts and length < self.batch.rows[row, READ]:\n                pass",
            "tests/drafters/test_ngram.py",
        ),
        "a matrix of successors is read a token too late": (
            "start = max(self._covered.get(row_id, 0), len(tokens) - fresh - 1, 0)",
            "start = max(self._covered.get(row_id, 0), len(tokens) - fresh, 0)",
            "tests/drafters/test_recycling.py",
        ),
    },
    "formats": {
        "layer ids are written as boundaries": (
            "return [boundary - 1 for boundary in boundaries]",
            "return list(boundaries)",
            "tests/heads/test_layer_ids.py tests/heads/test_formats.py",
        ),
        "layer ids are read as boundaries": (
            "return tuple(layer + 1 for layer in layers)",
            "return tuple(layers)",
            "tests/heads/test_layer_ids.py tests/heads/test_formats.py",
        ),
        "a window without a list of layers is forgotten": (
            '        return {"sliding_window": window}\n    if not isinstance(kinds, list)',
            '        return {"sliding_window": None}\n    if not isinstance(kinds, list)',
            "tests/heads",
        ),
        "transformers 5's rope base is not read": (
            'theta = float(rope.pop("rope_theta", None) or theta)',
            'theta = float(rope.pop("rope_theta", None) and theta or theta)',
            "tests/heads",
        ),
        "a tied output head hides a head's own": (
            '"tie_word_embeddings": False,\n        **window,',
            '"tie_word_embeddings": True,\n        **window,',
            "tests/heads",
        ),
    },
    "training": {
        "the loss takes the teacher's probabilities as they are, not over the student's tokens": (
            "losses -= (logits @ probs.renormalised.transpose(1, 2)).squeeze(-1)",
            "losses -= (logits @ probs.full.transpose(1, 2)).squeeze(-1)",
            "tests/losses/test_chunked_loss.py",
        ),
        "the gradient of the true token is half as large": (
            "torch.full_like(losses[..., None], -1.0)",
            "torch.full_like(losses[..., None], -0.5)",
            "tests/losses/test_chunked_loss.py",
        ),
        "rows of weight 0 are counted": (
            "figures.flatten(1).masked_fill_(target.weights == 0, 0.0)",
            "figures.flatten(1)",
            "tests/losses/test_chunked_loss.py",
        ),
    },
    "server": {
        "a key that begins right is right": (
            "hmac.compare_digest(given.strip().encode(), key.encode())",
            "key.startswith(given.strip())",
            "tests/serve/test_endpoints.py",
        ),
        "a salt of a client's own leads into any domain": (
            '"salted", self.key, own)',
            '"salted", own)',
            "tests/serve/test_keys.py tests/serve/test_isolation.py",
        ),
        "requests without keys share a domain": (
            "domain=None if shared else",
            "domain=None if True else",
            "tests/serve/test_keys.py tests/serve/test_isolation.py",
        ),
        "a body may be as large as it likes if it does not say so": (
            "            if read > self._most:\n                raise too_large\n",
            "",
            "tests/serve/test_bounds.py tests/serve/test_refusals.py",
        ),
        "a key that stands twice in a body is taken once": (
            "    if len(found) < len(pairs):\n        twice",
            "    if len(found) > len(pairs):\n        twice",
            "tests/serve/test_fuzz.py",
        ),
        "the log shows what an error says, which may quote a prompt": (
            '(str(error)) if message else "withheld; --log-prompts shows it"',
            "(str(error))",
            "tests/serve/test_logs.py",
        ),
        "choices of several prompts have the same index": (
            "self.choice(job * self.body.n + answer.index, output, answer)",
            "self.choice(answer.index, output, answer)",
            "tests/serve/test_endpoints.py tests/serve/test_openai_client.py tests/serve/test_client_features.py",
        ),
        "what looks like a call and is none is lost": (
            "yield Piece(Kind.CONTENT, text.text[start:behind])",
            "yield Piece(Kind.CONTENT, '')",
            "tests/serve/test_tools.py tests/serve/test_calls_read_back.py",
        ),
    },
    "plan": {
        "an expected speed-up leaves the draft's own cost out": (
            "step = coverage * (verify + draft.level_ms * depth) + (1 - coverage) * plain + draft.fixed_ms",
            "step = coverage * verify + (1 - coverage) * plain + draft.fixed_ms",
            "tests/plan",
        ),
        "survival is the acceptance of each depth alone": (
            "lambda survival, rate: survival * rate",
            "lambda survival, rate: rate",
            "tests/plan",
        ),
    },
    "certify": {
        "a run without checks has passed": (
            "return any(not check.left_out for check in self.checks) and all(check.passed for check in self.checks)",
            "return all(check.passed for check in self.checks)",
            "tests/certify",
        ),
    },
    "kernels": {
        "a query without padding takes its number for its place": (
            "return p->starts ? p->kept[p->starts[batch] + at] - batch * p->count : at;",
            "return at;",
            "tests/model_kernels/test_native.py tests/model_kernels/test_trees.py",
        ),
    },
    "decode": {
        "logits of real nodes alone are read in the order of the rows that were asked for": (
            "self.logits[0, self._starts[row] + node]",
            "self.logits[0, self._starts[index] + node]",
            "tests/model_kernels/test_padding.py",
        ),
        "the new scores of a row that failed among unequal drafts go to the first row": (
            "scored.logits[0, scored.flat.starts[indices]] = again",
            "scored.logits[0, 0 * scored.flat.starts[indices]] = again",
            "tests/engine/test_numeric_failures.py",
        ),
    },
    "control": {
        "what was seen on a slow machine stays as dear when it is fast again": (
            "return 1.0 if then is None or self._fresh(size) else",
            "return 1.0 if size else",
            "tests/control/test_parts.py",
        ),
        "a node counts as if it had no likelier sibling": (
            "survival[child] = min(alone[child], left)",
            "survival[child] = alone[child]",
            "tests/control/test_parts.py",
        ),
        "what passes of a batch took is kept as that of one row's nodes": (
            "nodes = round(rows * (1 + self.shape.nodes(size, rows)))",
            "nodes = round(1 + self.shape.nodes(size, rows))",
            "tests/control tests/engine/test_cost.py",
        ),
    },
    "blocks": {
        "the least value of a nested block is added": (
            "_mm512_mul_ps(least ? _mm512_mul_ps(outer, all_lanes(-1.0f)) : outer, _mm512_cvtepi32_ps(inner))",
            "_mm512_mul_ps(outer, _mm512_cvtepi32_ps(inner))",
            BLOCKS,
        ),
        "a zero loses the sign of its scale": (
            "f.least ? scales_of(f, b, part * WIDTH, 1) : all_lanes(-0.0f)",
            "f.least ? scales_of(f, b, part * WIDTH, 1) : all_lanes(0.0f)",
            BLOCKS,
        ),
        "integers that were moved up stay so": (
            "if (!LEAST) words = add_words(words",
            "if (0) words = add_words(words",
            BLOCKS,
        ),
        "a state in 8 bits is cut, not rounded": (
            "words[half] = _mm256_cvtps_epi32(",
            "words[half] = _mm256_cvttps_epi32(",
            BLOCKS,
        ),
        "what rounding leaves of an outstanding group is left out": (
            "if (*s.outstanding) add_group(",
            "if (0) add_group(",
            BLOCKS,
        ),
        "the least value is multiplied by half of the states": (
            "INPUTS == GROUP ? last->total : last->pair",
            "last->total",
            BLOCKS,
        ),
        "rows stay in the order of the file": (
            "part.content.shape[1] * part.order",
            "part.content.shape[1] * np.arange(len(part.order))",
            BLOCKS,
        ),
        "rows behind the eighth take the sums of the first ones' states": (
            "states_in(room + tile * size, groups, count), panel)",
            "states_in(room, groups, count), panel)",
            BLOCKS,
        ),
        "a file's weights are taken for the model's unseen": (
            "return StoredRows(tensor.type, content, order[:, 0]) if same else None",
            "return StoredRows(tensor.type, content, order[:, 0])",
            "tests/model/test_gguf_blocks.py",
        ),
    },
}
"""The faults of each floor: what is wrong, the old text of the source, the new one, and the tests that must notice."""
FAULTS = [Fault(floor, what, *rest) for floor, faults in FLOORS.items() for what, rest in faults.items()]


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
