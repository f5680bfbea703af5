"""The layout engine's request lifecycle: reset or move slots; after a step advance trackers and publish prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from replayssm_orch.actors.layout_layers import LayoutGdnLayer, LayoutLayer, LayoutMamba2Layer, RecurrentKernels
from replayssm_orch.actors.trackers import advance, reset
from replayssm_orch.actors.warmups.capabilities import LifecycleGroup
from replayssm_orch.actors.warmups.protocol import MambaSpec


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    layers: tuple[LayoutLayer, ...]
    spec: MambaSpec
    table: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Publication:
    """Per request int32 `[max_num_reqs]`: source and destination slot, ring origin and replay count; -1 where none."""

    src: torch.Tensor
    dst: torch.Tensor
    base: torch.Tensor
    count: torch.Tensor
    active: torch.Tensor
    num_active: torch.Tensor


class ReplayLifecycle:
    """The two lifecycle steps over groups of layers that share a block table; call signatures are vLLM's.

    Per-request tensors are in batch order; `idx_mapping` maps a batch position to its row of the block tables.
    """

    def __init__(self, groups: Sequence[_Group], max_num_reqs: int, kernels: RecurrentKernels) -> None:
        self._groups = tuple(groups)
        self._max_num_reqs = max_num_reqs
        self._kernels = kernels

    @classmethod
    def create(
        cls, groups: Sequence[LifecycleGroup], max_num_reqs: int, *, kernels: RecurrentKernels
    ) -> ReplayLifecycle:
        """Groups of (layers of a layout engine, Mamba spec, int32 block table `[rows, columns]`)."""
        return cls(
            [_Group(cast("tuple[LayoutLayer, ...]", tuple(layers)), spec, table) for layers, spec, table in groups],
            max_num_reqs,
            kernels,
        )

    def reset_new_slots(
        self, *, idx_mapping: torch.Tensor, src_cols: torch.Tensor, dst_cols: torch.Tensor, num_reqs: int
    ) -> None:
        """Give each request the slot in its `dst_cols` column, with trackers at zero.

        A source column at or above 0 moves a live request instead: state, rings and both trackers go along.
        """
        for group in self._groups:
            table = group.table[idx_mapping[:num_reqs]]
            dst = _at(table, dst_cols[:num_reqs])
            moved = (src_cols[:num_reqs] >= 0) & (dst > 0)
            trackers = group.layers[0].trackers
            reset(trackers.ring_start, trackers.committed, torch.where(moved, 0, dst))
            src, dst = _at(table, src_cols[:num_reqs])[moved].long(), dst[moved].long()
            for layer in group.layers:
                for view in layer.kv_cache:
                    view[dst] = view[src]
            for tracker in (trackers.ring_start, trackers.committed):
                tracker[dst] = tracker[src]

    def postprocess(
        self,
        *,
        idx_mapping: torch.Tensor,
        query_metadata: torch.Tensor,
        query_metadata_is_cumulative: bool,
        num_computed_tokens: torch.Tensor,
        num_computed_is_post_step: bool,
        num_accepted_tokens: torch.Tensor,
        is_prefilling: torch.Tensor,
        live_cols: torch.Tensor | None,
        num_reqs: int,
    ) -> None:
        """Advance the trackers of one step and, in align mode, publish the state of each block that it finished.

        The live slot is in column `live_cols` (column 0 where None). A request with no tokens in this step (its query
        length is 0) is left alone; a prefilling one gets trackers at zero. The published state is the live checkpoint
        with the ring replayed up to the boundary; the destination's own trackers are reset.
        """
        queries = query_metadata[: num_reqs + 1].diff() if query_metadata_is_cumulative else query_metadata[:num_reqs]
        accepted = num_accepted_tokens[:num_reqs]
        end = num_computed_tokens[:num_reqs] + (0 if num_computed_is_post_step else accepted)
        decoding = (queries > 0) & ~is_prefilling[:num_reqs]
        for group in self._groups:
            table = group.table[idx_mapping[:num_reqs]]
            live = table[:, 0] if live_cols is None else _at(table, live_cols[:num_reqs])
            trackers, window = group.layers[0].trackers, group.layers[0].window
            assert window is not None, f"{group.layers[0].name} has no ReplaySSM rings"
            reset(trackers.ring_start, trackers.committed, torch.where((queries > 0) & ~decoding, live, 0))
            advance(trackers.ring_start, trackers.committed, torch.where(decoding, live, 0), accepted, window)
            if group.spec.mamba_cache_mode == "align":
                self._publish(group, table, live, end, torch.where(decoding, accepted, 0))

    def _publish(
        self, group: _Group, table: torch.Tensor, live: torch.Tensor, end: torch.Tensor, step: torch.Tensor
    ) -> None:
        block = group.spec.block_size
        boundary = end // block * block
        dst = _at(table, boundary // block - 1)
        beyond = end - boundary
        # In place only exactly at the boundary: beyond it the live request still needs the older checkpoint.
        wanted = (beyond < step) & (boundary > 0) & (live > 0) & (dst > 0) & ((dst != live) | (beyond == 0))
        trackers = group.layers[0].trackers
        count = trackers.committed[live.long()] - beyond
        publication = self._publication(wanted, live, dst, trackers.ring_start[live.long()], count)
        if isinstance(group.layers[0], LayoutGdnLayer):
            self._materialize_gdn(cast("tuple[LayoutGdnLayer, ...]", group.layers), publication)
        else:
            self._materialize_mamba2(cast("tuple[LayoutMamba2Layer, ...]", group.layers), publication)
        reset(trackers.ring_start, trackers.committed, torch.where(wanted, dst, 0))

    def _publication(
        self, wanted: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, base: torch.Tensor, count: torch.Tensor
    ) -> _Publication:
        def rows(values: torch.Tensor, otherwise: int) -> torch.Tensor:
            padded = torch.full((self._max_num_reqs,), otherwise, dtype=torch.int32, device=values.device)
            padded[: len(values)] = torch.where(wanted, values, otherwise)
            return padded

        # Published rows first, -1 after them, without a host synchronisation.
        position = torch.arange(self._max_num_reqs, dtype=torch.int32, device=wanted.device)
        listed = torch.full_like(position, self._max_num_reqs)
        listed[: len(wanted)] = torch.where(wanted, position[: len(wanted)], self._max_num_reqs)
        listed = listed.sort().values
        return _Publication(
            src=rows(src, -1),
            dst=rows(dst, -1),
            base=rows(base, 0),
            count=rows(count, -1),
            active=torch.where(listed < self._max_num_reqs, listed, -1).to(torch.int32),
            num_active=wanted.sum(dtype=torch.int32).reshape(1),
        )

    def _materialize_gdn(self, layers: Sequence[LayoutGdnLayer], publication: _Publication) -> None:
        for layer in layers:
            u_ring, k_ring, g_ring = layer.replayssm_rings
            self._kernels.gdn_materialize(
                state=layer.kv_cache[1],
                src_slots=publication.src,
                dst_slots=publication.dst,
                k_cache=k_ring,
                u_cache=u_ring,
                g_cache=g_ring,
                cache_base=publication.base,
                count=publication.count,
                active_request_indices=publication.active,
                num_active=publication.num_active,
            )

    def _materialize_mamba2(self, layers: Sequence[LayoutMamba2Layer], publication: _Publication) -> None:
        window = layers[0].window
        assert window is not None
        self._kernels.mamba2_materialize(
            layers,
            src_slots=publication.src.clamp(min=0).expand(len(layers), -1).contiguous(),
            dst_slots=publication.dst.clamp(min=0).expand(len(layers), -1).contiguous(),
            ring_start=publication.base,
            replay_prefix_len=publication.count,
            active_request_indices=publication.active,
            max_window=window.window,
        )


def _at(table: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return table.gather(1, columns.clamp(min=0).long()[:, None])[:, 0]
