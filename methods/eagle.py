"""EAGLE, the newest that the draft is: EAGLE-3 for an EAGLE-3 draft, EAGLE-2 for an EAGLE-1 or EAGLE-2 draft.

Both grow the same dynamic trees, so what the weights are decides everything. Sources: see `eagle2` and `eagle3`.
"""

from __future__ import annotations

from specbench.decoding.feature_drafter import DynamicDrafter


class Eagle(DynamicDrafter):
    """Takes `eagle3` or `eagle2`, by the draft's weights, and says which in `taken` and in the draft's identity.

    Options: as of `eagle2` and `eagle3`.
    """

    name = "eagle"

    def opened(self) -> None:
        self.taken = "eagle3" if self.kind == "EAGLE-3" else "eagle2"
        self._identity["notes"].append(f"eagle took {self.taken}")
