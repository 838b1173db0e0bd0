"""Multi-token-prediction layers: the target's own draft layers, which transformers does not load with the target.

Layer k reads the embedding of token i+k and the state of layer k-1 at position i (of the target's final norm for k=1)
and its head names token i+k+1: norm each, join (embedding first), project, one decoder layer, norm, head. The decoder
layer is of the target's own class (GLM-4, DeepSeek's latent attention, experts…), so the block is a copy of the
target's last layer with other weights.

Sources: DeepSeek-V3 (arXiv 2412.19437, §2.2); layouts and order as in transformers' `MtpModel` and vLLM's
deepseek_mtp, glm4_moe_mtp and qwen3_next_mtp. What is passed on to the next layer is the normed state, as there.
"""

from __future__ import annotations

import copy
import inspect
import re
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from specbench.errors import SpecbenchError
from specbench.models import packed
from specbench.models.cache import SlotCache
from specbench.models.checkpoint import Checkpoint, list_checkpoint, open_checkpoint
from specbench.models.detect import expect
from specbench.models.draft_net import DraftNet
from specbench.models.fill import fill, own_weight
from specbench.models.target import Target

if TYPE_CHECKING:
    from specbench.decoding.context import Layout

_MOST_LAYERS = 16  # more are not looked for
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class _Keys:
    """Where a checkpoint keeps one layer: keys of its parts, and how its decoder layer's begin."""

    enorm: str
    hnorm: str
    eh_proj: str
    norm: str
    block: str
    head: str
    embed: str

    def key(self, name: str) -> str:
        """The key of a name inside `_Layer`."""
        part, _, rest = name.partition(".")
        return self.block + rest if part == "block" else getattr(self, part) + "." + rest


def open_mtp(target: Target, draft: str | Checkpoint | None = None) -> tuple[MtpNet, Checkpoint]:
    """The target's multi-token-prediction layers, and the checkpoint they came from.

    Args:
        draft: where they are; None: in the target's own folder.

    Raises:
        SpecbenchError: no folder to read, no such layers there, or weights that are missing, misshapen or too many.
    """
    first = target.config.num_hidden_layers
    if isinstance(draft, str):
        expect(list_checkpoint(draft), ("mtp",), "mtp")
    if not isinstance(draft, Checkpoint):
        draft = open_checkpoint(*_folder(target, draft), mtp_prefixes(target))
    _refuse_packed(draft)
    layouts = _layouts(draft, first)
    if not layouts:
        raise SpecbenchError(
            f"{draft.ref} has no multi-token-prediction layers: no weight mtp.fc.weight and none "
            f"model.layers.{first}.eh_proj.weight",
            "use a target that was trained with them, or name the folder that holds them with mtp:draft=FOLDER",
        )
    net = MtpNet(target, len(layouts))
    _refuse_packed_parts(net, target)
    fill(
        net,
        _fused(draft, net),
        device=target.device,
        key_of=lambda name: layouts[int(name.split(".")[1])].key(name.split(".", 2)[2]),
        ignored=[key for keys in layouts for key in (keys.head, keys.embed)],
    )
    for layer, keys in zip(net.layers, layouts, strict=True):
        layer.embed_weight = own_weight(draft, keys.embed, target.embeddings)
        layer.head_weight = own_weight(draft, keys.head, target.lm_head)
    return net, draft


def mtp_prefixes(target: Target) -> tuple[str, ...]:
    """How the keys of such layers begin in the checkpoint of a target."""
    first = target.config.num_hidden_layers
    return ("mtp.", *(f"model.layers.{first + i}." for i in range(_MOST_LAYERS)))


class MtpNet(DraftNet):
    """The layers, each with its own cache. Embeddings and head are the target's unless the checkpoint has others."""

    def __init__(self, target: Target, count: int) -> None:
        super().__init__(count)
        base = target.model.get_decoder() if hasattr(target.model, "get_decoder") else target.model.base_model
        if not hasattr(base, "rotary_emb"):
            raise SpecbenchError(
                f"{type(target.model).__name__} has no rotary positions, which its MTP layers would need",
                "use a target of the DeepSeek, GLM or Qwen families",
            )
        types = getattr(target.config, "layer_types", None) or target.kinds
        self.kinds, self.window = (types[-1],), target.window
        self.layers: Any = nn.ModuleList(_Layer(target, base, index) for index in range(count))
        self._shared: tuple[Any, Any, Any] = base.rotary_emb, target.embeddings, target.lm_head
        self._by_type = "layer_type" in inspect.signature(base.rotary_emb.forward).parameters

    def run(self, layer: int, tokens: torch.Tensor, hidden: torch.Tensor, at: Layout) -> torch.Tensor:
        """Normed states `[B, T, H]` of a layer.

        Args:
            tokens: int64 `[B, T]`, each one place behind the token `hidden` belongs to (by `layer` places more).
            hidden: `[B, T, H]`, of the layer before, or of the target's final norm.
            at: where the pass writes and looks. All layers may use the same: a constant shift of positions is nothing
                to rotary attention.
        """
        rotary, embeddings, _ = self._shared
        own = self.layers[layer].embed_weight
        embedded = embeddings(tokens) if own is None else embedding(tokens, own)
        kind = self.kinds[0]
        by_type = {"layer_type": kind} if self._by_type else {}
        rope = rotary(hidden, position_ids=at.positions, **by_type)
        self.cache.start(at.slots, at.masks[kind].shape[-1])
        return self.layers[layer](embedded.to(hidden), hidden, at, at.masks[kind], rope, self.cache)

    def logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[B, V]` on this network's device of normed states `[B, H]`."""
        own, head = self.layers[layer].head_weight, self._shared[2]
        if own is None:
            return head(hidden.to(head.weight.device)).to(self.device)
        return linear(hidden, own)


class _Layer(nn.Module):
    """One prediction layer, its weights still to come."""

    def __init__(self, target: Target, base: Any, index: int) -> None:
        super().__init__()
        width = target.config.hidden_size
        self.enorm, self.hnorm, self.norm = (_blank(base.norm, target) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False, device="meta", dtype=target.dtype)
        self.block = _blank(base.layers[-1], target)
        for module in self.block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
        forward = inspect.signature(inspect.unwrap(type(self.block).forward))
        self.embed_weight: nn.Parameter | None = None
        self.head_weight: nn.Parameter | None = None
        self._cache_argument = "cache" if "cache" in forward.parameters else "past_key_values"

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        at: Layout,
        mask: torch.Tensor,
        rope: Any,
        cache: SlotCache,
    ) -> torch.Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        where = {self._cache_argument: cache, "position_ids": at.positions, "position_embeddings": rope}
        out = self.block(x, attention_mask=mask, **where)
        return self.norm(out[0] if isinstance(out, tuple) else out)


def _blank(module: nn.Module, target: Target) -> Any:
    """A copy of a target's module without its weights: they are on the meta device, and take no memory.

    Its linear layers are torch's own, whatever multiplies in the target: its layers may be stored packed, quantised,
    or changed for speed, and those that are still to come are stored plainly.
    """
    config = target.config
    stored = module.state_dict(keep_vars=True).values()
    memo: dict[int, Any] = {id(config): config}
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and type(layer).__module__.startswith("specbench."):
            memo[id(layer)] = _plain(layer, layer.weight.dtype)
        elif packed.is_packed(layer):
            memo[id(layer)] = _plain(layer, target.dtype)
    for tensor in stored:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


def _plain(layer: Any, dtype: torch.dtype) -> nn.Linear:
    bias = getattr(layer, "bias", None) is not None
    return nn.Linear(layer.in_features, layer.out_features, bias=bias, device="meta", dtype=dtype)


def _folder(target: Target, draft: str | None) -> tuple[str, str | None]:
    """REF and revision of the folder that holds the layers."""
    if draft is not None:
        return draft, None
    identity = target.identity
    if identity is None or identity.source not in ("hub", "local"):
        raise SpecbenchError(
            "mtp reads layers from the target's checkpoint, and this target has no folder of safetensors",
            "use a target from the Hub or a folder, or name one with mtp:draft=FOLDER",
        )
    return identity.hub_id or identity.ref, identity.revision


def _layouts(checkpoint: Checkpoint, first: int) -> list[_Keys]:
    """The layers there are, in the layout of Qwen (`mtp.*`) or of DeepSeek and GLM (behind the target's layers)."""
    state = checkpoint.state
    if "mtp.fc.weight" in state:
        numbers = {int(m[1]) for key in state if (m := re.match(r"mtp\.layers\.(\d+)\.", key))}
        shared = _Keys(
            enorm="mtp.pre_fc_norm_embedding",
            hnorm="mtp.pre_fc_norm_hidden",
            eh_proj="mtp.fc",
            norm="mtp.norm",
            block="",
            head="mtp.lm_head.weight",
            embed="mtp.embed_tokens.weight",
        )
        return [replace(shared, block=f"mtp.layers.{n}.") for n in sorted(numbers)]
    found: list[_Keys] = []
    while f"model.layers.{first + len(found)}.eh_proj.weight" in state:
        at = f"model.layers.{first + len(found)}."
        parts = {
            "enorm": "enorm",
            "hnorm": "hnorm",
            "eh_proj": "eh_proj",
            "norm": "shared_head.norm",
            "block": "",
        }
        own = {"head": "shared_head.head.weight", "embed": "embed_tokens.weight"}
        found.append(_Keys(**{part: at + name for part, name in (parts | own).items()}))
    return found


def _refuse_packed(checkpoint: Checkpoint) -> None:
    """Raise SpecbenchError if a checkpoint stores such layers packed."""
    key = next((key for key, tensor in checkpoint.state.items() if not packed.is_plain(tensor)), None)
    if key is None:
        return
    stored = packed.read(checkpoint.config)
    how = f" ({stored.words})" if stored else ""
    raise SpecbenchError(
        f"{checkpoint.ref} stores its multi-token-prediction layers quantised{how}: {key} is "
        f"{str(checkpoint.state[key].dtype).removeprefix('torch.')}",
        "name a folder that holds them in bfloat16 or wider, such as what this was made from, with mtp:draft=FOLDER",
    )


def _refuse_packed_parts(net: nn.Module, target: Target) -> None:
    """Raise SpecbenchError if something of the target that its prediction layers are made like, or use, is packed."""
    name = target.identity.name if target.identity is not None else "the target"
    part = next((part for part, tensor in net.state_dict().items() if not packed.is_plain(tensor)), None)
    if part is None and packed.is_packed(target.lm_head):
        part = "lm_head"
    if part is not None:
        raise SpecbenchError(
            f"mtp cannot draft for {name}: its {part.split('block.')[-1]} is kept quantised here",
            "use a target whose experts and head are not, such as what it was made from",
        )


def _fused(checkpoint: Checkpoint, net: nn.Module) -> Checkpoint:
    """Experts stored one by one, joined as transformers keeps them: `gate_up_proj` and `down_proj` of all experts."""
    if not any(name.endswith("experts.gate_up_proj") for name in net.state_dict()):
        return checkpoint
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    state = {}
    for key, tensor in checkpoint.state.items():
        if match := _EXPERT.fullmatch(key):
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            state[key] = tensor
    for at, parts in experts.items():
        numbers = range(max(number for number, _ in parts) + 1)
        for number, part in product(numbers, ("gate", "up", "down")):
            if (number, part) not in parts:
                lost = f"{at}.{number}.{part}_proj.weight"
                raise SpecbenchError(f"{checkpoint.ref} has no weight {lost}", "download or copy it again")
        joined = [torch.cat([parts[number, "gate"], parts[number, "up"]]) for number in numbers]
        state[at + ".gate_up_proj"] = torch.stack(joined)
        state[at + ".down_proj"] = torch.stack([parts[number, "down"] for number in numbers])
    return replace(checkpoint, state=state)
