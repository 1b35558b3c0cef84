"""What sessions are held against: the user's model as mlx-lm runs it, with no code of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from ds4cli.settings import Settings

Pick = Callable[[mx.array, list[int]], int]


class Reference:
    """A stock model and stock caches. It shares its weights with `model`, and no code with us."""

    def __init__(
        self,
        model: Any,
        kv_bits: int | None = None,
        kv_group_size: int = Settings.kv_group_size,
    ):
        self.model = stock(model)
        self._kv = (kv_group_size, kv_bits) if kv_bits else None

    def rows(self, tokens: Sequence[int], calls: Sequence[int]) -> mx.array:
        """Logits rows (n, V) of `tokens`, fed in calls of these sizes; row i follows token i."""
        caches, rows, done = self.caches(), [], 0
        for size in calls:
            rows.append(self._feed(tokens[done : done + size], caches))
            done += size
        assert done == len(tokens), (done, len(tokens))
        return mx.concatenate(rows)

    def rows_of_calls(self, tokens: Sequence[int], calls: Sequence[tuple[int, int]]) -> mx.array:
        """Logits rows (n, V) of `tokens`, fed in calls of which each kept and was fed so many: what
        was not kept is made up, as rows do not depend on what follows them."""
        caches, rows, done = self.caches(), [], 0
        for kept, fed in calls:
            block = list(tokens[done : done + kept])
            before = copy.deepcopy(caches) if fed > kept else caches
            rows.append(self._feed(block + [tokens[0]] * (fed - kept), before)[:kept])
            if fed > kept:
                self._feed(block, caches)
            done += kept
        assert done == len(tokens), (done, len(tokens))
        return mx.concatenate(rows)

    def plain(self, prompt: Sequence[int], n: int, pick: Pick) -> list[int]:
        """n tokens after `prompt`, one a call; `pick(row (V,), tokens)` says which."""
        caches, tokens = self.caches(), list(prompt)
        row = self._feed(prompt, caches)[-1]
        for _ in range(n):
            tokens.append(pick(row, tokens))
            row = self._feed(tokens[-1:], caches)[-1]
        return tokens[len(prompt) :]

    def caches(self) -> list[Any]:
        """Empty caches, the model's own."""
        caches = make_prompt_cache(self.model)
        if self._kv is None:
            return caches
        return [QuantizedKVCache(*self._kv) if type(c) is KVCache else c for c in caches]

    def _feed(self, tokens: Sequence[int], caches: list[Any]) -> mx.array:
        logits = self.model(mx.array([*tokens], mx.int32)[None], cache=caches)[0]
        mx.eval(logits)
        return logits


def stock(model: nn.Module) -> Any:
    """A twin of `model` over the same weights, each module in the class that mlx-lm gave it.

    Engines put single modules into recording subclasses that keep name and module of the original;
    the twin's modules get the last class of that name in their line.
    """
    twins: dict[int, Any] = {}

    def twin(node: Any) -> Any:
        if isinstance(node, nn.Module):
            return twins[id(node)] if id(node) in twins else module_twin(node)
        if isinstance(node, dict):
            return {key: twin(value) for key, value in node.items()}
        if isinstance(node, (list, tuple)):
            return type(node)(twin(item) for item in node)
        return node

    def module_twin(module: nn.Module) -> nn.Module:
        new = twins[id(module)] = copy.copy(module)
        new.__class__ = _original(type(module))
        vars(new).update({name: twin(value) for name, value in vars(module).items()})
        dict.update(new, {name: twin(value) for name, value in dict(module).items()})
        return new

    return twin(model)


def _original(cls: type) -> type:
    same = [c for c in cls.__mro__ if (c.__name__, c.__module__) == (cls.__name__, cls.__module__)]
    return same[-1]
