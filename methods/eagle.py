"""EAGLE, the newest that the draft is: EAGLE-3 for an EAGLE-3 draft, EAGLE-2 for an EAGLE-1 or EAGLE-2 draft.

Both grow the same dynamic trees, so what the weights are decides everything. Sources: see `eagle2` and `eagle3`.
"""

from __future__ import annotations

from specbench.decoding.feature_drafter import DynamicDrafter


class Eagle(DynamicDrafter):
    """The newest EAGLE that the draft's weights are: runs `eagle3` or `eagle2`, and says which.

    Options:
        draft, total_token, depth, top_k, draft.quantize: as of eagle2 and eagle3.
    """

    name = "eagle"

    def notes(self, kind: str) -> list[str]:
        return [kind, f"eagle took {'eagle3' if kind == 'EAGLE-3' else 'eagle2'}"]
