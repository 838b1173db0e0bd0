"""Targets and drafters: the slot cache, loading, identity, the alias registry."""

import logging

# transformers imports torchao where it is installed, and that tells at length which of its extensions do not load.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
