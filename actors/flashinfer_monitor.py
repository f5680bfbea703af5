"""Counts FlashInfer's compilations in a process: CuTe DSL compilations and nvcc module builds."""

from __future__ import annotations

import importlib
from typing import Any

from replayssm_orch.actors.records import Compilation


class FlashInferMonitor:
    """An independent count for shards without vLLM, whose `jit_monitor` sees the same CuTe DSL compilations."""

    def __init__(self) -> None:
        self._seen: list[Compilation] = []
        self._armed = False

    def arm(self) -> None:
        """Hook `cutlass.cute.compile` and `JitSpecNvcc.build`, and count from now on. Idempotent."""
        if self._armed:
            return
        cute: Any = importlib.import_module("cutlass.cute")
        cute.compile = _CountedCompile(cute.compile, self._seen)
        spec = importlib.import_module("flashinfer.jit.core").JitSpecNvcc
        build = spec.build

        def counted_build(jit_spec: Any, *args: Any, **kwargs: Any) -> Any:
            self._seen.append(Compilation("nvcc", "module build", jit_spec.name))
            return build(jit_spec, *args, **kwargs)

        spec.build = counted_build
        self._armed = True

    def take(self) -> tuple[Compilation, ...]:
        """The compilations since the last call, oldest first."""
        seen = tuple(self._seen)
        self._seen.clear()
        return seen


class _CountedCompile:
    """Stands for `cute.compile`, subscription with options included, and passes everything on."""

    def __init__(self, compile_: Any, seen: list[Compilation]) -> None:
        self._compile = compile_
        self._seen = seen

    def __getitem__(self, options: Any) -> _CountedCompile:
        return _CountedCompile(self._compile[options], self._seen)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kernel = args[0] if args else None
        name = getattr(kernel, "__name__", type(kernel).__name__)
        self._seen.append(Compilation("CuTeDSL", "JIT compilation", name))
        return self._compile(*args, **kwargs)
