"""DFlash: a block of tokens guessed in one pass of a small network that reads the target's hidden states.

Sources: Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036; z-lab/dflash);
DDTree (arXiv 2604.12989; liranringel/ddtree); for Markov heads DSpark (arXiv 2607.05147; deepseek-ai/DeepSpec).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Literal

import torch

from specbench.decoding.context import Context
from specbench.decoding.draft import Draft, Outcome
from specbench.decoding.draft_length import K, draft_length
from specbench.decoding.learned import LearnedDrafter
from specbench.decoding.marginal_tree import best_first, count_nodes
from specbench.decoding.method import Request
from specbench.decoding.sampling import Sampling, drawn, exponentials, probabilities
from specbench.decoding.tree import MOST_NODES
from specbench.models.checkpoint import Checkpoint
from specbench.models.device import send
from specbench.models.dflash import DFlashNet, open_dflash
from specbench.models.drafts import open_heads, quantised
from specbench.models.fixed_pass import SLOTS, Compute, Tensors
from specbench.models.quantize import Quantize
from specbench.models.target import Target


class DFlash(LearnedDrafter):
    """DFlash's block as a chain, or (DDTree) the likeliest tree of its positions' marginals.

    Drafts are each position's argmax at every temperature, and judged as the deterministic proposals they are:
    lossless. A draft with a Markov head (DSpark) draws its tokens left to right when the target samples, and is
    judged by their q. DSpark's confidence head, whose threshold is 0 by default, is not used.

    Options:
        draft: the DFlash draft, a folder or a Hub id.
        tree: chain, or ddtree.
        nodes: DDTree's budget of nodes.
        k: tokens of the block's chain that are proposed, or auto; 0 is all of them. The block is guessed whole.
        draft.quantize: what the draft's linear layers are quantised to: none, int8, int4 or fp8.
    """

    def __init__(
        self,
        target: Target,
        *,
        draft: str | Checkpoint | None = None,
        tree: Literal["chain", "ddtree"] = "chain",
        nodes: int = 64,
        k: K = 0,
        quantize: Quantize = "none",
    ) -> None:
        if not 1 <= nodes <= MOST_NODES:
            raise ValueError(f"nodes must be 1 to {MOST_NODES}")
        checkpoint = open_heads(draft, "dflash", ("dflash", "dspark"))
        self.net: DFlashNet = open_dflash(checkpoint, target)
        who = quantised(self.net, checkpoint.identity("DFlash draft"), quantize, target)
        super().__init__(target, self.net, who, self.net.cache)
        self.settings = self.net.settings
        if tree == "ddtree" and self.settings.markov is not None:
            raise ValueError(
                "ddtree needs guesses that do not depend on each other; this draft has a Markov head"
            )
        if tree == "ddtree" and k:
            raise ValueError("k is for chains; nodes bounds a tree")
        whole = self.settings.drafts
        if k != "auto" and not 0 <= k <= whole:
            raise ValueError(f"k must lie between 1 and {whole}, or be 0 for all of the block")
        self.length = draft_length(k or whole, whole)
        self.tree, self.nodes = tree, nodes
        self.taps = tuple(dict.fromkeys(self.settings.taps(target)))
        self.max_nodes = nodes if tree == "ddtree" else self.length.longest

    def prepare(self, request: Request) -> None:
        super().prepare(request)
        longest = request.capacity + self.settings.block + 1
        self.net.reserve(len(request.prompts), longest)
        self.make_ahead(request, longest)

    def begin(self, prompts: list[list[int]]) -> None:
        self.length.begin(len(prompts))
        self._prompts = [len(prompt) for prompt in prompts]
        self._context = Context(self.net)
        self._context.rewind([0] * len(prompts))

    def observe(self, outcome: Outcome) -> None:
        self.length.observe(outcome)
        if all(outcome.finished):
            return
        kept = self._prompts if outcome.prefill else [accepted + 1 for accepted in outcome.accepted]
        counts = [0 if done else count for count, done in zip(kept, outcome.finished, strict=True)]
        taps = [outcome.taps[name].to(self.net.device) for name in self.settings.taps(self.target)]
        features = outcome.along_path(torch.cat(taps, -1))
        positions, slots = self._context.occupy(features.shape[1], counts)
        if outcome.prefill:
            self.net.remember(features, positions, slots)
        else:
            inputs = {"features": features, "positions": positions, SLOTS: slots}
            self.fixed("remember", self._remember, inputs, bucket=True)
        self._roots = [tokens[-1] if tokens else 0 for tokens in outcome.tokens]

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        wanted = self.length.wanted(budgets)
        if not any(wanted):
            return [Draft()] * len(budgets)
        roots = send(self._roots, self.net.device)[:, None]
        if self.tree == "ddtree":
            return self._trees(roots, wanted)
        tokens, probs = self._chains(roots, generators, wanted)
        drafts = [
            Draft(tokens[row, :n], probs=None if probs is None else probs[row, :n]) if n else Draft()
            for row, n in enumerate(wanted)
        ]
        return self.length.proposed(drafts)

    def _remember(self, inputs: Tensors, _length: int) -> Tensors:
        self.net.remember(inputs["features"], inputs["positions"], inputs[SLOTS])
        return {}

    def _guess(self, variant: Hashable, compute: Compute, roots: torch.Tensor) -> Tensors:
        """`compute` on the block behind each row's last token, int64 `[B, 1]`."""
        inputs = {"roots": roots, "start": self._context.starts()}
        return self.fixed(variant, compute, inputs, self._context.reach(self.settings.block))

    def _block(self, inputs: Tensors, length: int) -> Tensors:
        """Hidden states `[B, drafts, H]` of the block, and logits `[B, drafts, V]`."""
        hidden = self.net.block(inputs["roots"][:, 0], self._context, inputs["start"], length)
        return {"hidden": hidden, "logits": self.net.logits(hidden)}

    def _trees(self, roots: torch.Tensor, wanted: list[int]) -> list[Draft]:
        """DDTree's drafts, at most `wanted[b]` deep."""
        if all(n in (0, self.settings.drafts) for n in wanted):
            found = self._guess("tree", self._whole_tree, roots)
            tokens, parents = found["tokens"], found["parents"]
        else:  # near an end
            logits = self._guess("block", self._block, roots)["logits"]
            tokens, parents = best_first(logits.float().log_softmax(-1), self.nodes, wanted)
        counts = [count_nodes(self.nodes, self.target.vocab_size, depth) for depth in wanted]
        return [Draft(tokens[row, :n], parents[row, :n]) if n else Draft() for row, n in enumerate(counts)]

    def _whole_tree(self, inputs: Tensors, length: int) -> Tensors:
        """Tokens and parents `[B, n]` of each row's tree, as deep as the block."""
        log_probs = self._block(inputs, length)["logits"].float().log_softmax(-1)
        tokens, parents = best_first(log_probs, self.nodes, [log_probs.shape[1]] * len(log_probs))
        return {"tokens": tokens, "parents": parents}

    def _chains(
        self, roots: torch.Tensor, generators: Sequence[torch.Generator] | None, wanted: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens `[B, n]`, the first `wanted[b]` of them to be proposed, and q `[B, n, V]` where they were drawn."""
        if self.settings.markov is None:
            return self._guess("likeliest", self._likeliest, roots)["tokens"], None
        steps, sampling = self.depth(max(wanted), self.length.uncut(wanted)), self.request.sampling
        if sampling.greedy:
            return self._guess(("chain", steps), partial(self._chain, steps), roots)["tokens"], None
        assert generators is not None
        block = self._guess("block", self._block, roots)
        logits, hidden = block["logits"][:, :steps], block["hidden"][:, :steps]
        noise = exponentials(steps, logits.shape[-1], generators, wanted)
        # A pass of its own, which reads no slots: the noise is too large for each length to have a buffer.
        given = {"logits": logits, "hidden": hidden, "roots": roots, "noise": noise}
        found = self.fixed(("drawn", sampling), partial(self._drawn, sampling), given)
        return found["tokens"], found["probs"]

    def _likeliest(self, inputs: Tensors, length: int) -> Tensors:
        return {"tokens": self._block(inputs, length)["logits"].argmax(-1)}

    def _chain(self, steps: int, inputs: Tensors, length: int) -> Tensors:
        """The first so many tokens, each the likeliest, `[B, steps]`."""
        block = self._block(inputs, length)
        hidden, logits = block["hidden"][:, :steps], block["logits"][:, :steps]
        tokens = self._left_to_right(inputs["roots"], hidden, logits, lambda scores, _step: scores.argmax(-1))
        return {"tokens": tokens}

    def _drawn(self, sampling: Sampling, inputs: Tensors, _length: int) -> Tensors:
        """Tokens `[B, steps]` drawn by exponential variates `[B, steps, V]`, and what they were drawn from."""
        probs: list[torch.Tensor] = []

        def choose(scores: torch.Tensor, step: int) -> torch.Tensor:
            probs.append(probabilities(scores, sampling))
            return drawn(probs[-1], inputs["noise"][:, step])

        tokens = self._left_to_right(inputs["roots"], inputs["hidden"], inputs["logits"], choose)
        return {"tokens": tokens, "probs": torch.stack(probs, 1)}

    def _left_to_right(
        self,
        roots: torch.Tensor,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        choose: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> torch.Tensor:
        """DSpark: each token knows the one before by the Markov head. Tokens `[B, steps]`.

        Args:
            roots: int64, the last tokens of the text in column 0.
            hidden, logits: of the block, `[B, steps, …]`.
            choose: a token `[B]` by its logits `[B, V]` and its step.
        """
        head, tokens = self.net.markov_head, [roots[:, 0]]
        state = head.start(len(roots))
        for step in range(logits.shape[1]):
            bias, state = head.step(tokens[-1], hidden[:, step], state)
            tokens.append(choose(logits[:, step] + bias, step))
        return torch.stack(tokens[1:], 1)
