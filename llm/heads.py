"""Heads: all of PEFT behind one class. Each agent is one LoRA adapter on the shared, frozen trunk.

Switching heads sets the LoRA layers' active adapter directly: `set_adapter` and `disable_adapter()` would silently set
`requires_grad` of every other adapter. A head may carry small extra matrices (the retriever's projection, the critic's
value layer), kept in their own safetensors file so that plain `PeftModel.from_pretrained` loads the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import nn

from jointrag.data.errors import HeadError

META = "jointrag.json"  # what plain PEFT does not need to know: fingerprint, trunk, roles
EXTRA = "extra.safetensors"
LORA = "adapter_model.safetensors"


def tensors_hash(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the sha256 over names, shapes and bytes of tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name, t in sorted(tensors, key=lambda x: x[0]):
        data = t.detach().cpu().contiguous()
        digest.update(f"{name}{tuple(data.shape)}{data.dtype}".encode())
        digest.update(data.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Heads:
    """The LoRA heads of one trunk. A name like `rewriter@warm` is a frozen copy of `rewriter`."""

    def __init__(self, trunk: Any, r: int, alpha: int, trunk_path: str, activation: str, seed: int = 0) -> None:
        self.config = LoraConfig(
            r=r, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear", bias="none", task_type="CAUSAL_LM"
        )
        self.trunk_path, self.activation, self.seed = trunk_path, activation, seed
        for p in trunk.parameters():
            p.requires_grad_(False)
        self.trunk_hash = tensors_hash(trunk.named_parameters())
        self.trunk = trunk
        self.peft: Any = None
        self.layers: list[Any] = []  # of LoraLayer
        self.extra: dict[str, dict[str, nn.Parameter]] = {}
        self.names: list[str] = []
        self._key: dict[str, str] = {}  # what PEFT calls a head: "a", "keys" or "my.agent" would be no name for it

    def add(self, name: str, extra: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """Add a head that changes nothing yet; `extra` maps further matrices to their shapes (zeros)."""
        if name in self.names:
            raise HeadError(f"head {name!r} exists already; expected a new name")
        key = int.from_bytes(hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:7], "big")
        at = f"head{len(self.names)}"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            if self.peft is None:
                try:
                    self.peft = get_peft_model(self.trunk, self.config, adapter_name=at)
                except ValueError as e:
                    raise HeadError(
                        f"llm.model: PEFT cannot put LoRA on this trunk ({e}); expected another model"
                    ) from e
            else:
                self.peft.add_adapter(at, self.config)
        self.layers = [m for m in self.peft.modules() if isinstance(m, LoraLayer)]
        self.names.append(name)
        self._key[name] = at
        for layer in self.layers:  # get_peft_model casts or freezes by its own rules: one rule here
            for part in (layer.lora_A, layer.lora_B):
                part[at].float().requires_grad_(True)
        device = self.layers[0].lora_A[at].weight.device
        self.extra[name] = {k: nn.Parameter(torch.zeros(s, device=device)) for k, s in (extra or {}).items()}
        self.peft.eval()

    def use(self, name: str | None) -> None:
        """Make `name` act in the following forward passes; None = the bare trunk."""
        if name is not None and name not in self.names:
            raise HeadError(f"no head {name!r}; expected one of {self.names}")
        for layer in self.layers:
            layer._disable_adapters = name is None
            if name is not None:
                layer._active_adapter = [self._key[name]]

    def named(self, name: str) -> dict[str, nn.Parameter]:
        """Return the parameters of a head by stable names."""
        out: dict[str, nn.Parameter] = {}
        for i, layer in enumerate(self.layers):
            out[f"{i:04d}.A"] = layer.lora_A[self._key[name]].weight
            out[f"{i:04d}.B"] = layer.lora_B[self._key[name]].weight
        return out | {f"extra.{k}": v for k, v in self.extra[name].items()}

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return a copy of a head's parameters."""
        return {k: v.detach().cpu().clone() for k, v in self.named(name).items()}

    def set_state(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        """Overwrite a head's parameters."""
        own = self.named(name)
        if own.keys() != state.keys() or any(own[k].shape != state[k].shape for k in own):
            raise HeadError(
                f"the stored head does not fit head {name!r}: other layers, another rank (llm.lora.r), or a "
                f"projection for vectors of another size (index.dim) or for no retriever; use one trained with these"
            )
        with torch.no_grad():
            for k, v in own.items():
                v.copy_(state[k])

    def copy(self, source: str, target: str) -> None:
        """Make `target` a frozen copy of `source` (added where new)."""
        if target not in self.names:
            self.add(target, {k: tuple(v.shape) for k, v in self.extra[source].items()})
        self.set_state(target, self.state(source))
        for p in self.named(target).values():
            p.requires_grad_(False)

    def hash(self, name: str) -> str:
        """Return the sha256 of a head's parameters."""
        return tensors_hash(self.named(name).items())

    def check_trunk(self) -> None:
        """Assert that training left the trunk as it was."""
        base = [(n.replace(".base_layer", ""), p) for n, p in self.trunk.named_parameters() if "lora_" not in n]
        assert tensors_hash(base) == self.trunk_hash, "the frozen trunk has changed"

    def save(self, name: str, folder: Path, fingerprint: str, markers: Mapping[str, Sequence[int]]) -> None:
        """Write a head so that plain `PeftModel.from_pretrained(trunk, folder)` loads it (safetensors only).

        `markers`: the role marker's tokens of each agent that acts by the head. PEFT switches a late head on at one of
        them, the first one's: to use a shared head for another role, set `alora_invocation_tokens` to that role's.
        """
        folder.mkdir(parents=True, exist_ok=True)
        weights = {}
        modules = {id(m): n for n, m in self.peft.named_modules()}
        for layer in self.layers:
            at, key = modules[id(layer)], self._key[name]
            weights[f"{at}.lora_A.weight"] = layer.lora_A[key].weight.detach().cpu().contiguous().clone()
            weights[f"{at}.lora_B.weight"] = layer.lora_B[key].weight.detach().cpu().contiguous().clone()
        save_file(weights, folder / LORA, metadata={"format": "pt"})
        config = self.config.to_dict()  # type: ignore[no-untyped-call]
        config |= {"base_model_name_or_path": self.trunk_path, "inference_mode": True, "peft_type": "LORA"}
        config["target_modules"] = sorted({modules[id(layer)].rsplit(".", 1)[-1] for layer in self.layers})
        if self.activation == "late":
            config["alora_invocation_tokens"] = list(next(iter(markers.values())))
        write_json(folder / "adapter_config.json", config)
        if self.extra[name]:
            save_file({k: v.detach().cpu().contiguous() for k, v in self.extra[name].items()}, folder / EXTRA)
        meta = {
            "template": fingerprint,
            "trunk": self.trunk_hash,
            "roles": {role: list(tokens) for role, tokens in markers.items()},
            "activation": self.activation,
        }
        write_json(folder / META, meta)

    def load(self, name: str, folder: Path, fingerprint: str) -> None:
        """Read a head saved by `save` into the existing head `name`; another trunk, template or rank is refused."""
        try:
            meta = json.loads((folder / META).read_text())
            trunk, template, activation = meta["trunk"], meta["template"], meta["activation"]
            alpha = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
            weights = load_file(folder / LORA)
            extra = load_file(folder / EXTRA) if (folder / EXTRA).exists() else {}
        except Exception as e:
            raise HeadError(f"{folder}: no readable head ({e}); expected {LORA}, adapter_config.json and {META}") from e
        if trunk != self.trunk_hash:
            raise HeadError(
                f"{folder}: a head of another trunk; expected one trained on {self.trunk_path!r}: train it anew"
            )
        if template != fingerprint:
            raise HeadError(
                f"{folder}: trained with other prompts or tokenizer; expected this template: restore the prompts"
            )
        if alpha != self.config.lora_alpha:
            raise HeadError(
                f"{folder}: trained with lora alpha {alpha}, got {self.config.lora_alpha}: set llm.lora.alpha to it"
            )
        if activation != self.activation:
            raise HeadError(
                f"{folder}: trained with activation {activation!r}, got {self.activation!r}: set llm.activation to it"
            )
        modules = {id(m): n for n, m in self.peft.named_modules()}
        state = {f"extra.{k}": v for k, v in extra.items()}
        try:
            for i, layer in enumerate(self.layers):
                state[f"{i:04d}.A"] = weights[f"{modules[id(layer)]}.lora_A.weight"]
                state[f"{i:04d}.B"] = weights[f"{modules[id(layer)]}.lora_B.weight"]
        except KeyError as e:
            raise HeadError(f"{folder}: tensor {e} is missing; expected a head of this trunk's layers") from e
        self.set_state(name, state)


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(value, indent=1, sort_keys=True, default=_plain) + "\n")
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    """JSON for what PEFT keeps in configs."""
    return sorted(value) if isinstance(value, set) else getattr(value, "value", str(value))
