"""EAGLE-2: one layer drafts in feature space, in a tree that grows where the draft is surest.

Source: Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (arXiv 2406.16858);
SafeAILab/EAGLE, eagle/model/cnets1.py. HASS drafts (arXiv 2408.15766) have the same format and inference.
"""

from __future__ import annotations

from specbench.decoding.feature_drafter import DynamicDrafter, open_draft
from specbench.models.checkpoint import Checkpoint
from specbench.models.detect import expect
from specbench.models.eagle import open_eagle
from specbench.models.target import Target


class Eagle2(DynamicDrafter):
    """EAGLE-1/2 weights, a dynamic tree. Deterministic proposals, so lossless when sampling too.

    Options:
        draft: a folder or Hub id with an EAGLE-1, EAGLE-2 or HASS draft.
        total_token: nodes of a tree, its root included.
        depth: levels expanded below the first; a tree is up to depth + 1 deep (the official evaluation uses 5).
        top_k: children of a node, and nodes expanded a level.
    """

    def __init__(
        self,
        target: Target,
        *,
        draft: str | Checkpoint | None = None,
        total_token: int = 60,
        depth: int = 5,
        top_k: int = 10,
    ) -> None:
        checkpoint = open_draft(draft, "eagle2")
        expect(checkpoint, ("eagle",), "eagle2")
        super().__init__(target, open_eagle(checkpoint, target), checkpoint, total_token, depth, top_k)
