"""Ranks that run one engine together, step by step alike.

Every rank has the same requests and the same scheduler, so each knows by itself what the next step is: in steady decode
nothing is said between them but what the step's graph holds. Requests come from rank 0, once a call. A step whose batch
has changed is compared first, on the CPU, so that no rank replays another size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.errors import CommError
from stepgraph.comm.gather import Gather
from stepgraph.comm.group import Group
from stepgraph.engine.config import ModelConfig
from stepgraph.engine.errors import RequestError
from stepgraph.engine.model import DecoderModel
from stepgraph.engine.parallel.sampler import ShardedSampler
from stepgraph.engine.parallel.shard import Shard
from stepgraph.engine.params import SamplingParams
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.config import GraphConfig
from stepgraph.runtime.dispatch import Mode
from stepgraph.runtime.errors import CaptureError, ConfigError
from stepgraph.runtime.keys import capture_keys
from stepgraph.runtime.naming import describe
from stepgraph.runtime.platforms.capturing import is_capturing
from stepgraph.runtime.runner import GraphRunner

CANDIDATES = 64
_SAMPLED = 64  # rows of the embedding, which all ranks have whole, to tell checkpoints of one shape apart
_RUNS_AT_ONCE = "segments between breaks run as soon as they are recorded, before addresses can be exchanged"


def require_plain(*, lazy: bool, compiled: bool, adapters: bool, steps_per_launch: int) -> None:
    """Raises ConfigError: what an engine of several ranks cannot have."""
    if lazy:
        raise ConfigError("lazy graphs: ranks would record them at different times; capture all at the start")
    if compiled:
        raise ConfigError("compile: torch's compiler does not see the collectives of several ranks; switch it off")
    if adapters:
        raise ConfigError("adapters: they are whole, and of several ranks each has a part of the model")
    if steps_per_launch > 1:
        raise ConfigError(
            "steps_per_launch: with several ranks it is 1; a device that runs on by itself would not learn that "
            "another rank is gone"
        )


class TensorParallel:
    """This rank's part in an engine.

    all_reduce: of the group. candidates: tokens that each rank offers to rows with top-k, top-p or min-p, which are
    exact where what they keep lies among these. 0: no request may ask for them, and a step is smaller.
    """

    def __init__(self, group: Group, all_reduce: AllReduce, *, candidates: int = CANDIDATES) -> None:
        self.group, self.all_reduce, self.candidates = group, all_reduce, candidates
        self.gather = Gather(group, all_reduce)
        self._recorded: Mapping[BatchDescriptor, Mode] = {}  # while they are

    def shard(self, config: ModelConfig) -> Shard:
        """Of the model of this configuration. Raises ConfigError: its heads cannot be dealt out to the ranks."""
        return Shard(config, self.group.rank, self.group.world)

    def sampler(self, config: ModelConfig) -> ShardedSampler:
        candidates = min(self.candidates, config.vocab_size)  # no part has more; a top_k of any size may be asked for
        return ShardedSampler(self.gather, self.shard(config).vocab, config.vocab_size, candidates)

    def graphs(self, config: GraphConfig) -> GraphConfig:
        """A configuration with every size warmed up, so that all ranks take the same steps to it."""
        return replace(config, warmups=max(1, config.warmups))

    def require(self, params: SamplingParams) -> None:
        """Raises RequestError: filters that the candidates are too few for."""
        filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        if params.temperature > 0 and filters and not self.candidates:
            raise RequestError("top_k, top_p and min_p: ranks offer one token each here; start with candidates")
        if params.temperature > 0 and params.top_k > self.candidates > 0:
            raise RequestError(f"top_k is {params.top_k}, and each rank offers {self.candidates} candidates; lower it")

    def share(self, value: Any) -> Any:
        """Rank 0's, on all ranks."""
        return self.group.share(value)

    def share_call(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes of its arguments, on all ranks; the others' do not matter.

        Raises:
            RequestError: rank 0's, on all ranks, so that none waits for a call that was refused.
        """
        made = refused = None
        if self.group.rank == 0:
            try:
                made = make()
            except RequestError as error:
                refused = error
        made, refused = self.group.share((made, refused), "taking the prompts of a call")
        if refused is not None:
            raise refused
        return made

    def least(self, count: int) -> int:
        """The smallest of the ranks' counts: what all of them can hold."""
        return min(self.group.exchange(count, "counting what all can hold"))

    def agree_on_engine(self, config: ModelConfig, model: DecoderModel, **settings: Any) -> None:
        """Before the first step of an engine: steps of other shapes would end all ranks without a word.

        config: of the whole model. settings: what else a step follows from, with a meaningful repr.

        Raises:
            CommError: on all ranks, with what differs and each rank's.
        """
        step = max(1, len(model.embedding) // _SAMPLED)
        sampled = model.embedding[::step].to(device="cpu", dtype=torch.float32).contiguous()
        mine = {
            "candidates": self.candidates,
            **{name: repr(value) for name, value in settings.items()},
            **{f"model's {field.name}": repr(getattr(config, field.name)) for field in fields(config)},
            "dtype": str(model.dtype),
            "operations": model.operations.name,
            "digest of the embedding": hashlib.sha256(sampled.numpy().tobytes()).hexdigest()[:12],
        }
        everyone = self.group.exchange(mine, "making an engine")
        differing = [name for name in mine if any(theirs[name] != mine[name] for theirs in everyone)]
        if differing:
            listed = "; ".join(
                f"{name} ({', '.join(f'rank {rank}: {theirs[name]}' for rank, theirs in enumerate(everyone))})"
                for name in differing
            )
            raise CommError(f"ranks make different engines: {listed}; give all of them the same arguments")

    def agree_on_step(self, batch: Any) -> None:
        """Before a step whose batch has changed. batch: all that the step follows from, with a meaningful repr.

        Raises:
            CommError: on all ranks, where one has another batch.
        """
        digest = hashlib.sha256(repr(batch).encode()).digest()
        if not self.group.same(int.from_bytes(digest[:8], "big") >> 1, "launching a step whose batch has changed"):
            self.group.agree("the batch of a step", repr(batch))

    def check(self) -> None:
        """A step is over. Raises CommError: a rank is gone, or a sum is wrong since one was late."""
        self.group.went_on()
        self.all_reduce.check()

    def guarded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, as ranks run it: its collectives are noted by key, and no error of it passes as a dropped size.

        A size that one rank drops would leave the others in its collectives.
        """

        def run(**views: torch.Tensor) -> Any:
            if is_capturing(self.group.device):
                key = _key(views)
                full = self._recorded.get(key) is Mode.FULL
                self.all_reduce.begin(key, None if full else _RUNS_AT_ONCE)
            try:
                return step(**views)
            except (CaptureError, torch.OutOfMemoryError) as error:
                text = " ".join(str(error).split())
                raise CommError(f"rank {self.group.rank}, step of {describe(_key(views))}: {text}") from error

        return run

    @contextmanager
    def capturing(self, runner: GraphRunner) -> Iterator[None]:
        """Around the capture of all graphs: before it all want the same, and after it all have the same. A rank that
        fails is known to all.

        Raises:
            CommError: on all ranks.
        """
        try:
            buffers = runner.buffers
            keys = capture_keys(runner.config, max_requests=buffers.max_requests, max_tokens=buffers.max_tokens)
            self.group.agree("what to capture", [f"{describe(key)} {mode}" for key, mode in keys.items()])
            self._recorded = keys
            yield
            self._recorded = {}
            dropped = {describe(key): why for key, why in runner.capture_report.dropped.items()}
            if dropped:
                raise CommError(f"rank {self.group.rank} could not capture {dropped}")
            self.all_reduce.exchange()
        except BaseException as error:
            self.group.fail(str(error) or type(error).__name__)
            raise

    def frozen(self) -> dict[str, list[dict[str, Any]]]:
        """By captured size, what each graph has frozen of its collectives."""
        return {
            describe(key): [one.as_dict() for one in collectives]
            for key, collectives in self.all_reduce.log.by_key.items()
        }


def _key(views: dict[str, torch.Tensor]) -> BatchDescriptor:
    """Of a step, by the views that it is given; see `DecoderStep`."""
    if "query_lens" in views:
        return BatchDescriptor.relaxed(len(views["prompt_tokens"]))
    return BatchDescriptor.decode(len(views["tokens"]))
