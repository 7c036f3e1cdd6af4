"""The models of one server: which are loaded, which requests wait for one, and when one is unloaded.

A model is unloaded only while no request uses it. Models are loaded one at a time, in the order in which requests first
asked for them, with all requests that wait for the same model.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from onegraph.api.memory import Memory
from onegraph.serve.errors import ENDING
from onegraph.serve.prompts import Prompts
from onegraph.serve.worker import Full, Stopped, Worker

LOG = logging.getLogger(__name__)
T = TypeVar("T")
POLL = 0.02  # seconds between two looks at whether a model is idle, of which loading it takes many times more
CLOSE = 5  # seconds that the end of the server waits for a model that is being loaded

# load(check, announce) -> a worker that has not started. `check` raises once the server ends: call it while loading.
# `announce` raises where the model does not fit beside the loaded ones: call it before memory is allocated.
Load = Callable[[Callable[[], None], Callable[[Memory], None]], Worker]


class LoadError(Exception):
    """A model could not be loaded; the next request for it tries again."""


class _DoesNotFit(Exception):
    """Another model has to be unloaded first."""


class Loaded(NamedTuple):
    """A model that is loaded."""

    worker: Worker
    prompts: Prompts


@dataclass(eq=False)
class _Waiter:
    count: int  # of answers
    loaded: asyncio.Future[Loaded]


class Model:
    """One model of a server.

    Args:
        name: as requests give it. adapters: names of its adapters, which are as good.
        max_model_len: maximum number of tokens of a prompt and its answer.
        limit: number of answers that may be computed or wait.

    loaded: None while it is not.
    """

    def __init__(self, name: str, load: Load, *, max_model_len: int, limit: int, adapters: Sequence[str] = ()) -> None:
        self.names, self.load = (name, *adapters), load
        self.max_model_len, self.limit = max_model_len, limit
        self.loaded: Loaded | None = None
        self.waiting: list[_Waiter] = []
        self.leaving = False  # it takes no requests until it is unloaded
        self.loads = 0
        self.past: Counter[str] = Counter()  # `Worker.totals` of workers that are closed

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def totals(self) -> Counter[str]:
        """As `Worker.totals`, since the server began."""
        return self.past + (Counter() if self.loaded is None else self.loaded.worker.totals)


class Models:
    """All models of a server. Except for `start`, its methods are called in the event loop.

    most: models that may be loaded at once. keep_alive: seconds without a request after which a model is unloaded; None
    for never.
    """

    def __init__(self, models: Sequence[Model], *, most: int = 1, keep_alive: float | None = None) -> None:
        self.all, self._most, self._keep_alive = list(models), most, keep_alive
        self._queue: list[Model] = []  # that requests wait for
        self._ended = False
        self._changing = asyncio.Lock()  # held while models are loaded and unloaded
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, name: str, worker: Worker) -> Models:
        """One model, whose worker has not started."""
        llm = worker.llm
        adapters = tuple(llm.engine.adapters)
        about: dict[str, Any] = {"max_model_len": llm.max_model_len, "limit": worker.limit, "adapters": adapters}
        return cls([Model(name, lambda check, announce: worker, **about)])

    @property
    def names(self) -> list[str]:
        """Each model, then its adapters."""
        return [name for model in self.all for name in model.names]

    def find(self, name: str | None) -> Model | None:
        return next((model for model in self.all if name in model.names), None)

    @property
    def workers(self) -> dict[Model, Worker]:
        """Of the models that are loaded."""
        return {model: model.loaded.worker for model in self.all if model.loaded is not None}

    @property
    def failure(self) -> str | None:
        """Why the engine of a loaded model is not running."""
        return next((worker.failure for worker in self.workers.values() if worker.failure is not None), None)

    def start(self) -> None:
        """Loads the first one. Raises what loading raises, and Stopped."""
        self._load(self.all[0])

    def try_reserve(self, model: Model, count: int) -> Loaded | None:
        """The model, with `count` places in its queue (`Worker.reserve`); None where it has to be loaded. Raises Full,
        Stopped."""
        if self._ended:
            raise Stopped(ENDING)
        if model.loaded is None or model.leaving:
            return None
        model.loaded.worker.reserve(count)
        return model.loaded

    async def reserve(self, model: Model, count: int) -> Loaded:
        """As `try_reserve`, once it is loaded. Raises LoadError, too. Cancelled, it no longer waits."""
        if sum(each.count for each in model.waiting) + count > model.limit:
            raise Full
        waiter = _Waiter(count, asyncio.get_running_loop().create_future())
        model.waiting.append(waiter)
        if model not in self._queue:
            self._queue.append(model)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve_queue())
        try:
            return await waiter.loaded
        except asyncio.CancelledError:
            if not waiter.loaded.cancelled() and waiter.loaded.exception() is None:  # loaded at the same moment
                waiter.loaded.result().worker.release(count)
            raise
        finally:
            if waiter in model.waiting:
                model.waiting.remove(waiter)

    async def unload_idle(self) -> None:
        """Unloads what has had no request for `keep_alive` seconds, until cancelled."""
        while self._keep_alive is not None:
            await asyncio.sleep(min(1.0, self._keep_alive / 2))
            async with self._changing:
                for model, worker in self.workers.items():
                    if worker.idle_s > self._keep_alive:
                        await self._unload(model)

    def end(self) -> None:
        """Every request that has no answer yet gets an error."""
        self._ended = True
        for model in self.all:
            self._answer(model, Stopped(ENDING))
            if model.loaded is not None:
                model.loaded.worker.stop()
                model.loaded.prompts.close()

    async def close(self) -> None:
        """`end`, and unloads everything."""
        self.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE), self._changing:  # what is being loaded ends
                pass
        for model in self.workers:
            await self._unload(model)

    # ---------------------------------------------------------------------------------------------------------- within

    async def _serve_queue(self) -> None:
        while self._queue:
            async with self._changing:
                model, found = self._queue[0], None
                try:
                    if model.loaded is None:
                        await self._load_for_waiting(model)
                except Exception as error:
                    found = error
                self._queue.remove(model)
                self._answer(model, found)

    def _answer(self, model: Model, error: Exception | None) -> None:
        """What waits for the model gets it, or the error."""
        for waiter in model.waiting:
            if waiter.loaded.done():
                continue
            try:
                if error is not None:
                    raise error
                assert model.loaded is not None
                model.loaded.worker.reserve(waiter.count)
                waiter.loaded.set_result(model.loaded)
            except Exception as refused:
                waiter.loaded.set_exception(refused)
        model.waiting.clear()

    async def _load_for_waiting(self, model: Model) -> None:
        """Raises LoadError, Stopped."""
        while model.waiting:
            if len(self.workers) >= self._most:
                await self._make_room(model)
                continue
            try:
                return await _in_thread(lambda: self._load_or_tell(model))
            except _DoesNotFit:
                await self._make_room(model)

    async def _make_room(self, model: Model) -> None:
        """Unloads the least recently used other model as soon as it is idle; none where nothing waits any more."""
        victim, worker = min(self.workers.items(), key=lambda each: (each[1].idle_s == 0, -each[1].idle_s))
        victim.leaving = True
        try:
            while model.waiting and worker.idle_s == 0:
                await asyncio.sleep(POLL)
            if model.waiting:
                await self._unload(victim)
        finally:
            victim.leaving = False

    def _load(self, model: Model) -> None:
        """In the caller's thread."""

        def check() -> None:
            if self._ended:
                raise Stopped(ENDING)

        def announce(memory: Memory) -> None:
            if not memory.fits and self.workers:
                raise _DoesNotFit

        check()
        worker = model.load(check, announce)
        try:
            check()
            worker.start()
        except BaseException:
            worker.close()
            worker.llm.close()
            raise
        model.loaded = Loaded(worker, Prompts(worker.llm))
        model.loads += 1

    def _load_or_tell(self, model: Model) -> None:
        """Raises LoadError for whatever goes wrong, without what was loaded until then."""
        try:
            return self._load(model)
        except (_DoesNotFit, Stopped) as error:
            why: Exception = type(error)(*error.args)
        except Exception as error:
            text = " ".join(str(error).split())[:500] or type(error).__name__
            why = LoadError(f"the model {model.name!r} could not be loaded: {text}")
            LOG.error("%s", why)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        raise why

    async def _unload(self, model: Model) -> None:
        assert model.loaded is not None
        worker, prompts = model.loaded
        model.past, model.loaded = model.totals, None
        prompts.close()
        await _in_thread(worker.close)
        await _in_thread(worker.llm.close)
        if not self._ended:
            LOG.info("unloaded %s", model.name)


async def _in_thread(work: Callable[[], T]) -> T:
    """What `work` gives, in a thread for which the end of the process does not wait."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="models", daemon=True).start()
    return await done
