"""EAGLE-2: one layer drafts in feature space, in a tree that grows where the draft is surest.

Source: Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (arXiv 2406.16858);
SafeAILab/EAGLE, eagle/model/cnets1.py. HASS drafts (arXiv 2408.15766) have the same format and inference.
"""

from __future__ import annotations

from specbench.decoding.feature_drafter import DynamicDrafter


class Eagle2(DynamicDrafter):
    """EAGLE-1/2 weights, a dynamic tree. Deterministic proposals, so lossless when sampling too.

    Options:
        draft: a folder or Hub id with an EAGLE-1, EAGLE-2 or HASS draft.
        total_token: nodes of a tree, its root included.
        depth: levels expanded below the first; a tree is up to depth + 1 deep (the official evaluation uses 5).
        top_k: children of a node, and nodes expanded a level.
        draft.quantize: what the draft's linear layers are quantised to: none, int8, int4 or fp8.
    """

    name = "eagle2"
    accepts = ("eagle",)
