"""EAGLE-3: as EAGLE-2, from hidden states of three depths of the target, with a head and a vocabulary of its own.

Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(arXiv 2503.01840); SafeAILab/EAGLE, eagle/model/cnets.py. Variants of other trainers: `specbench.models.eagle`.
"""

from __future__ import annotations

from specbench.decoding.feature_drafter import DynamicDrafter


class Eagle3(DynamicDrafter):
    """EAGLE-3 weights, a dynamic tree. Deterministic proposals, so lossless when sampling too.

    Options:
        draft: a folder or Hub id with an EAGLE-3 draft, in any of its spellings; or `random`, to time one without.
        total_token: nodes of a tree, its root included.
        depth: levels expanded below the first; a tree is up to depth + 1 deep (the official evaluation uses 5).
        top_k: children of a node, and nodes expanded a level.
        draft.quantize: what the draft's linear layers are quantised to: none, int8, int4 or fp8.
    """

    name = "eagle3"
    accepts = ("eagle3",)
