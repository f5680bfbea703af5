"""Layout signatures: stable ids over the canonical form of a recurrent layer's cache layout."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from replayssm_orch.actors.records import Family, LayerLayout, TensorLayout


@dataclass(frozen=True, slots=True)
class Signature:
    """What decides which kernels compile for a layer: family, architecture and every cache tensor's layout.

    Layer names, groups, ranks, device names and device indices are left out, so that ranks compare.
    """

    family: Family
    arch: str
    tensors: tuple[TensorLayout, ...]

    @property
    def id(self) -> str:
        """SHA-256 (hex) over the canonical JSON form: equal exactly when the signatures are equal."""
        return hashlib.sha256(canonical_json(self).encode()).hexdigest()


def canonical_json(signature: Signature) -> str:
    """The one JSON text of a signature: sorted keys, no spaces, ASCII; tensors in the cache's order."""
    form = {
        "arch": signature.arch,
        "family": signature.family,
        "tensors": [
            {"dtype": t.dtype, "name": t.name, "shape": list(t.shape), "stride": list(t.stride)}
            for t in signature.tensors
        ],
    }
    return json.dumps(form, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def signature_of(layout: LayerLayout, arch: str) -> Signature:
    """The signature of one layer of a rank on a device of architecture `arch` (`sm_90a`, `cpu-x86_64`)."""
    return Signature(family=layout.family, arch=arch, tensors=layout.tensors)
