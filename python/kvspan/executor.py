"""Running a query: rewrite, plan, then every generate call as soon as what it waits for is done.

    result = kvspan.run(query, engine=engine)
    result.answers[0]   # the text
    result.result       # the query with every generate replaced by what it said: a query again

Calls that do not depend on each other run side by side, up to a limit. The first failure, or
Ctrl-C, cancels everything that is still running; with ``keep_going`` a failure costs only what was
to read the missing answer.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from kvspan.audit import AuditLog
from kvspan.engine import GenerateRequest
from kvspan.engine.opened import OpenedEngines
from kvspan.errors import KvspanError, UsageError, shorten_path
from kvspan.query.checks import describe
from kvspan.query.context import SpanHistory as SpanHistory
from kvspan.query.nodes import Node
from kvspan.query.optimizer import Fired, optimize
from kvspan.query.plan import Call, Plan, Say, make_plan, put_answers
from kvspan.query.prompt import Answered, to_prompt
from kvspan.query.retrieval import CorpusPaths, Retriever, retriever_for
from kvspan.query.spans import note_spans
from kvspan.results import CallResult as CallResult
from kvspan.results import Failure as Failure
from kvspan.results import Line
from kvspan.results import RunResult as RunResult
from kvspan.run_options import DEFAULT_CONCURRENCY as DEFAULT_CONCURRENCY
from kvspan.run_options import DEFAULT_TEMPERATURE as DEFAULT_TEMPERATURE
from kvspan.run_options import OnAudit as OnAudit
from kvspan.run_options import OnPrint as OnPrint
from kvspan.run_options import OnText as OnText
from kvspan.run_options import Opener as Opener
from kvspan.run_options import Options as Options
from kvspan.run_options import derive_seed as derive_seed

if TYPE_CHECKING:
    from kvspan.engine import Capabilities, Engine


_BESIDE = ("engine", "open", "on_text")  # what run and arun take besides options


def run(
    query: Node,
    *,
    engine: Engine | None = None,
    open: Opener | None = None,
    on_text: OnText | None = None,
    **options: Any,
) -> RunResult:
    """Run a query and wait for its outcome.

    engine: runs all calls, whatever models they name. Without it one is opened per model the query
        names, and closed at the end; keep an engine open to reuse what it has cached.
    open: opens those engines; ``kvspan.open_engine`` by default.
    on_text: called with (path, text) as answers come in, on the event loop's thread.
    model: used instead of every model the query names, and for a query that asks nothing.
    seed: with it, the same query gives the same answers (each call derives its own from its path).
    scope, placement, salt: see ``kvspan.engine.GenerateRequest``.
    temperature, max_tokens: for generates that set none (None: 0.6, and the engine's default).
    max_concurrency: calls that may run at the same time.
    order: "pinned" keeps the spans of every plus in the order they are written in; "canonical"
        sorts them by content, so that equal sets give equal prompts; "recent" puts those first that
        stand in ``history`` (a SpanHistory), which makes the prompt depend on the runs before.
    nested: what outer generates read of inner ones in a plus. "answer": the answer with the KV it
        was generated with, after its own prompt; "text": the answer as any other span, computed
        after the outer anchor; "whole": the inner input, too, beside the answer.
    keep_going: after a failure, be it of a call or to open the engine of one of several models, run
        all that does not depend on it; see RunResult.failures.
    corpora: file or folder of each corpus that retrieve nodes name; see ``kvspan.retrieve``.
    retriever: finds the fragments of augment and retrieve nodes, in the place of the default one.
    on_print: called with the line of every print node, on the event loop's thread.
    on_audit: called with a record of every request when it is over; see ``kvspan.audit``.

    Raises UsageError for a bad query or option, KvspanError when a call fails; both name the path.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise UsageError("run() was called inside a running event loop: use await arun(...)")
    job = _Job(query, Options.of(options, _BESIDE), on_text, engine)
    try:
        job.open(open or _default_opener)
        # asyncio.run writes out what the main task returns as it puts SIGINT back, only to throw
        # it away; of a large result that takes longer than the run.
        asyncio.run(job.run())
        return job.result
    finally:
        job.close()


async def arun(
    query: Node,
    *,
    engine: Engine | None = None,
    open: Opener | None = None,
    on_text: OnText | None = None,
    **options: Any,
) -> RunResult:
    """``run`` for callers that have an event loop.

    Rewriting, planning, retrieval and opening engines go on in a thread: a large query takes a
    while, and the loop has other things to do.
    """
    job = await asyncio.to_thread(_Job, query, Options.of(options, _BESIDE), on_text, engine)
    try:
        await asyncio.to_thread(job.open, open or _default_opener)
        await job.run()
        return job.result
    finally:
        job.close()


def _default_opener(model: str) -> Engine:
    from kvspan.engine import open_engine

    return open_engine(model)


def plan_query(
    query: Node,
    model: str | None,
    *,
    retriever: Retriever | None = None,
    corpora: CorpusPaths | None = None,
    **rewriting: Any,
) -> tuple[Plan, tuple[Fired, ...]]:
    """Rewrite and plan a query; all that can be wrong with it is found here.

    model: for a query that asks nothing. retriever, corpora: as for ``run``.
    rewriting: see ``kvspan.query.optimizer.optimize``.
    """
    if not isinstance(query, Node):
        raise UsageError("not a query", expected="a query node", found=describe(query))
    retriever = retriever_for(query, retriever, corpora)
    optimized = optimize(query, default_model=model, retriever=retriever, **rewriting)
    return make_plan(optimized.query), optimized.trace


class _Job:
    """One run of one query."""

    def __init__(
        self, query: Node, options: Options, on_text: OnText | None, engine: Engine | None
    ) -> None:
        self.query = query
        self.options = options
        self.on_text = on_text
        self.engines = OpenedEngines(engine)
        self.results: dict[int, CallResult] = {}
        self.failures: dict[int, Failure] = {}
        self.said: list[Say] = []
        self.interrupt: asyncio.Future[None] | None = None
        self._plan(self.capabilities if engine else None)

    def _plan(self, capabilities: Callable[[str], Capabilities] | None) -> None:
        options = self.options
        self.plan, self.trace = plan_query(
            self.query,
            options.model,
            retriever=options.retriever,
            corpora=options.corpora,
            order=options.order,
            nested=options.nested,
            scope=options.scope,
            history=options.history,
            capabilities=capabilities,
        )
        self.audit = AuditLog(options.on_audit, self.trace, options.order, options.nested)

    def capabilities(self, model: str) -> Capabilities:
        """Of the engine that runs calls to a model."""
        return self.engines.capabilities(self.options.model or model)

    def open(self, opener: Opener) -> None:
        """Open the engines that are needed, and plan again if they cannot do all."""
        if self.engines.only is None:
            names = (self.options.model or call.node.model for call in self.plan.calls)
            for model in dict.fromkeys(names):
                try:
                    self.engines.open(model, opener)
                except KvspanError as error:
                    if not self.options.keep_going:
                        self._refuse(model, error)
            opened, failed = self.engines.engines, self.engines.failed
            if failed and not opened:  # there is nothing to go on with
                self._refuse(*next(iter(failed.items())))
            able = [self.capabilities(model) for model in opened]
            if not all(can.spans and can.answers for can in able):
                self._plan(self.capabilities)
        if self.options.history is not None:
            note_spans(self.plan.query, self.options.history)

    def _refuse(self, model: str, error: KvspanError) -> NoReturn:
        """Raise the error of opening an engine, placed where the query first names its model."""
        # Other mistakes, a bad device for example, have nothing to do with the query.
        usage = isinstance(error, UsageError) and str(error).startswith("model")
        if not usage or self.options.model or error.path:
            raise error
        first = next(call for call in self.plan.calls if call.node.model == model)
        raise error.at(f"{first.path}.g.model") from error

    def close(self) -> None:
        self.engines.close()

    async def run(self) -> None:
        started = time.perf_counter()
        await self._run_steps()
        ids = self.plan.answers
        texts = [self.results[id].result.text if id in self.results else None for id in ids]
        self.result = RunResult(
            result=await asyncio.to_thread(put_answers, self.plan.query, texts),
            answers=[text for text in texts if text is not None],
            answer_ids=[id for id in ids if id in self.results],
            calls=[self.results[call.id] for call in self.plan.calls if call.id in self.results],
            query=self.plan.query,
            trace=self.trace,
            seed=self.options.seed,
            scope=self.options.scope,
            placement=self.options.placement,
            seconds=time.perf_counter() - started,
            failures=[self.failures[id] for id in sorted(self.failures)],
            lines=[Line(say.path, say.text) for say in sorted(self.said, key=lambda say: say.id)],
        )

    async def _run_steps(self) -> None:
        steps = self.plan.steps
        followers: list[list[int]] = [[] for _ in steps]
        missing = [len(step.waits_for) for step in steps]
        for step in steps:
            for earlier in step.waits_for:
                followers[earlier].append(step.id)
        ready = [step.id for step in steps if not step.waits_for]  # sorted, so a heap already
        running: dict[asyncio.Future[Any], int] = {}
        self.interrupt = asyncio.get_running_loop().create_future()

        def finish(done: int) -> None:
            for follower in followers[done]:
                missing[follower] -= 1
                if not missing[follower]:
                    heapq.heappush(ready, follower)

        try:
            while ready or running:
                while ready and len(running) < self.options.max_concurrency:
                    step = steps[heapq.heappop(ready)]
                    if isinstance(step, Say):
                        self._say(step)
                        finish(step.id)
                    elif isinstance(step, Call) and not self._hopeless(step):
                        running[asyncio.ensure_future(self._call(step))] = step.id
                    else:
                        finish(step.id)
                if not running:
                    continue
                await asyncio.wait([*running, self.interrupt], return_when=asyncio.FIRST_COMPLETED)
                if self.interrupt.done():
                    self.interrupt.result()
                # In the order of the plan, so that of several failures the same one is reported.
                for task, id in sorted(running.items(), key=lambda item: item[1]):
                    if task.done():
                        del running[task]
                        self._settle(task, id)
                        finish(id)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self.interrupt.cancel()

    def _say(self, step: Say) -> None:
        self.said.append(step)
        if self.options.on_print is not None:
            self.options.on_print(step.text)

    def _settle(self, task: asyncio.Future[Any], id: int) -> None:
        try:
            task.result()
        except KvspanError as error:
            if not self.options.keep_going:
                raise
            call = self.plan.steps[id]
            assert isinstance(call, Call)
            self.failures[id] = Failure(id, call.path, str(error))

    def _hopeless(self, call: Call) -> bool:
        """Whether an answer that a call was to read has failed to come; it has then failed too."""
        missing = next((self.failures[id] for id in call.inputs if id in self.failures), None)
        if missing is None:
            return False
        cause = missing.cause or missing.path
        place = shorten_path(call.path)
        message = f"{place}: not run: it reads the answer of {shorten_path(cause)}, which failed"
        self.failures[call.id] = Failure(call.id, call.path, message, cause)
        return True

    async def _call(self, call: Call) -> None:
        request = self._request(call)
        record = self.audit.begin(request, dropped=call.dropped)
        try:
            await self._generate(call, request)
        except BaseException as error:
            self.audit.end(record, error=error)
            raise
        self.audit.end(record, result=self.results[call.id].result)

    async def _generate(self, call: Call, request: GenerateRequest) -> None:
        try:
            engine = self.engines.of(request.model)
        except KvspanError as error:
            raise _placed(error, f"{call.path}.g.model") from error
        try:
            if call.dropped and request.max_tokens == 1:
                result = await engine.prepare(request)
            else:
                result = await engine.generate(request, self._listener(call))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise KvspanError("the engine cancelled the call", path=call.path) from None
        except Exception as error:
            raise _placed(error, call.path) from error
        assert request.temperature is not None
        self.results[call.id] = CallResult(
            id=call.id,
            path=call.path,
            model=request.model,
            seed=request.seed,
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            result=result,
            dropped=call.dropped,
        )

    def _request(self, call: Call) -> GenerateRequest:
        node, options = call.node, self.options
        where = f"{call.path}.g.input"
        try:
            answers = (self._answered(id) for id in call.inputs)
            prompt = to_prompt(node.input, where, answers, plain=node.plain)
        except UsageError:
            raise KvspanError("every answer it was to read came back empty", path=where) from None
        temperature = node.temperature
        if temperature is None:
            temperature = options.temperature
        return GenerateRequest(
            prompt=prompt,
            model=self.options.model or node.model,
            # 0 is spnl's word for "the server's default".
            max_tokens=node.max_tokens or options.max_tokens or None,
            temperature=DEFAULT_TEMPERATURE if temperature is None else float(temperature),
            seed=derive_seed(options.seed, call.path),
            scope=call.options.get("scope", options.scope),  # type: ignore[arg-type]
            placement=call.options.get("placement", options.placement),  # type: ignore[arg-type]
            salt=call.options.get("salt", options.salt),
            keep_answer=node.kept,
            path=call.path,
        )

    def _answered(self, id: int) -> Answered:
        call, result = self.plan.steps[id], self.results[id].result
        assert isinstance(call, Call)
        return result.text, result.answer if call.node.kept else None

    def _listener(self, call: Call) -> Callable[[str], None] | None:
        if self.on_text is None or call.dropped:
            return None
        on_text, interrupt = self.on_text, self.interrupt

        def deliver(text: str) -> None:
            # Engines call this from the event loop, where an exception would only be logged.
            try:
                on_text(call.path, text)
            except Exception as error:
                if interrupt is not None and not interrupt.done():
                    interrupt.set_exception(error)

        return deliver


def _placed(error: Exception, path: str) -> KvspanError:
    """The error with the path of the call, unless it has one, and of the same kind."""
    if isinstance(error, KvspanError):
        return error.at(path)
    return KvspanError(f"generate failed: {type(error).__name__}: {error}", path=path)
