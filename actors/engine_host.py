"""The engine host actor: runs vLLM's engine (scheduler and start-up order) over a run's shards."""

from __future__ import annotations

import tempfile
import threading
import traceback
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from replayssm_orch.actors.failures import one_line
from replayssm_orch.actors.rank_log import redirect_output
from replayssm_orch.actors.records import EngineSpec, EngineStatus, PhaseEvent, RankFailure, RankLayouts, Request
from replayssm_orch.configs.models import write_model_dir


class EngineHost:
    """Holds one vLLM engine. A threaded actor: `status` and `release` answer while `start` runs."""

    def __init__(self, run_id: str) -> None:
        redirect_output(run_id, "engine")
        self._events: list[PhaseEvent] = []
        self._held: tuple[RankLayouts, ...] | None = None
        self._released = threading.Event()
        self._engine: Any = None

    def start(self, spec: EngineSpec, shards: Sequence[Any]) -> tuple[str, ...] | RankFailure:
        """Bring the engine up in vLLM's own order, holding before its warm-up until `release`.

        Returns notes for the report (optional arguments that this vLLM cannot have), or why it failed.
        """
        try:
            return self._start(spec, tuple(shards))
        except BaseException as error:
            return _failure(error)

    def _start(self, spec: EngineSpec, shards: tuple[Any, ...]) -> tuple[str, ...]:
        from replayssm_orch.actors import vllm_adapter

        vllm_adapter.require_vllm(spec.device)
        args, notes = vllm_adapter.engine_arguments(spec.args, spec.optional_args)
        from vllm import LLM

        from replayssm_orch.actors import executor

        def hold() -> None:
            self._held = tuple(_layouts(shards))
            if not self._released.wait(spec.hold_timeout):
                raise TimeoutError(f"the hold before {executor.HOLD_BEFORE} was not released in {spec.hold_timeout} s")

        executor.attach(executor.Attachment(shards=shards, tp=spec.tp, on_event=self._events.append, hold=hold))
        with tempfile.TemporaryDirectory(prefix="replayssm-orch-model-") as directory:
            model = spec.model
            if spec.hf_config is not None:
                model = directory
                write_model_dir(spec.hf_config, Path(directory))
            self._engine = LLM(
                model=model,
                tensor_parallel_size=spec.tp,
                pipeline_parallel_size=spec.pp,
                distributed_executor_backend=executor.ShardExecutor,
                **args,
            )
        return notes

    def status(self, since: int) -> EngineStatus:
        """Phase events from number `since` on, and every rank's layouts once the engine is held."""
        return EngineStatus(events=tuple(self._events[since:]), held=self._held)

    def release(self) -> None:
        """End the hold: vLLM goes on to its warm-up and graph capture."""
        self._released.set()

    def serve(self, requests: Sequence[Request]) -> int | RankFailure:
        """Serve the requests as one batch with greedy sampling; returns the number of tokens that came out.

        Prompts are cut to what the model's length leaves beside `max_tokens`.
        """
        try:
            from vllm import SamplingParams

            model = self._engine.llm_engine.model_config
            outputs = self._engine.generate(
                [_prompt(request, model.get_vocab_size(), model.max_model_len) for request in requests],
                [
                    SamplingParams(temperature=0.0, max_tokens=r.max_tokens, ignore_eos=True, detokenize=False)
                    for r in requests
                ],
                use_tqdm=False,
            )
        except BaseException as error:
            return _failure(error)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


def _prompt(request: Request, vocabulary: int, max_model_len: int) -> dict[str, list[int]]:
    length = max(1, min(request.prompt_tokens, max_model_len - request.max_tokens))
    return {"prompt_token_ids": list(islice(cycle(range(1, vocabulary)), length))}


def _layouts(shards: tuple[Any, ...]) -> list[RankLayouts]:
    import ray

    layouts: list[RankLayouts] = ray.get([shard.layouts.remote() for shard in shards])
    return layouts


def _failure(error: BaseException) -> RankFailure:
    """The failure of a rank where one is the cause, else the engine's own."""
    seen: BaseException | None = error
    while seen is not None:
        failure = getattr(seen, "failure", None)
        if isinstance(failure, RankFailure):
            return failure
        seen = seen.__cause__ or seen.__context__
    return RankFailure(
        rank=None,
        stage=None,
        phase="engine start",
        error=one_line(error),
        traceback="".join(traceback.format_exception(error)),
        exit_code=int(getattr(error, "exit_code", 1)),
    )
