"""Gets programs into a table: loads them from the store, compiles what is not there.

Hot programs are waited for. The others are compiled by child processes, which write them to the
store, while this process only loads them in background threads and goes on serving.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from bucketing.compile_child import ChildStartError, CompileChild, CompileError
from bucketing.program_key import ProgramKey
from bucketing.program_store import ProgramStore
from bucketing.programs import CompileReport, ProgramTable, compile_program

# A child may die of something that passes (memory, a signal): each program gets a second try.
ATTEMPTS = 2
# Loading is single-threaded and releases the GIL: two at once take the time of one.
# measured: 2 cores, 2026-11-30, an executable of 3.4 MB: 0.64 s alone, 0.63 s for two
_LOADERS = 2


class CompileService:
    """Fills a table of programs, now or in the background.

    Attributes:
        table: where programs appear, each as soon as it is loaded.
        store: where they are kept, and where children put them.
        failed: programs given up on, and why; the rest goes on without them.
    """

    def __init__(
        self,
        table: ProgramTable,
        lower: Callable[..., jax.stages.Lowered],
        store: ProgramStore,
        *,
        command: Sequence[str] = (),
        job: Mapping[str, Any] | None = None,
        children: int = 1,
        on_done: Callable[[CompileReport], Any] | None = None,
        on_failed: Callable[[ProgramKey, str], Any] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            table: to fill.
            lower: traces and lowers the program of a key.
            store: keeps them; ``ProgramStore.temporary`` where nothing is to be kept.
            command: starts a child (see ``compile_child.serve_parent``).
            job: the child's job; the service adds the store's "root" and "fingerprint".
            children: processes that compile in the background.
            on_done: called with the report of every program, from whichever thread it is.
            on_failed: called with the key and the reason when a program is given up.
        """
        self.table = table
        self.failed: dict[ProgramKey, str] = {}
        self._lower = lower
        self._on_done = on_done
        self._on_warm: Callable[[CompileReport], Any] | None = None
        self._on_failed = on_failed
        self.store = store
        self._crew = _Crew(
            command,
            {**(job or {}), "root": str(store.folder.parent), "fingerprint": store.fingerprint},
            children,
        )
        # At exit, too: no child outlives us, and no thread is inside XLA while it is torn down.
        self._finalizer = weakref.finalize(self, self._crew.close)

    def warm(
        self,
        keys: Iterable[ProgramKey],
        on_done: Callable[[CompileReport], Any] | None = None,
    ) -> None:
        """Return when all these programs are in the table: loaded, or compiled here and stored.

        A failure to compile is the caller's: it raises.

        Args:
            keys: the programs, in the order to compile them.
            on_done: called with each report meanwhile, beside the service's own.
        """
        self._on_warm = on_done
        try:
            missing = [key for key in dict.fromkeys(keys) if key not in self.table]
            with ThreadPoolExecutor(_LOADERS) as loaders:
                loaded = loaders.map(self._load, missing)
                missing = [key for key, there in zip(missing, loaded, strict=True) if not there]
            for key in missing:
                if key not in self.table:  # a child may have been quicker
                    program, report = compile_program(self._lower, key)
                    if self.store.lasting:
                        report = self.store.save(key, program, report)
                    self._add(key, program, report)
        finally:
            self._on_warm = None

    def start(self, keys: Iterable[ProgramKey]) -> None:
        """Get these programs in the background, in this order, and return at once."""
        wanted = [key for key in dict.fromkeys(keys) if key not in self.table]
        self._crew.add(wanted, self._serve)

    @property
    def pending(self) -> tuple[ProgramKey, ...]:
        """Programs asked for in the background that are neither there nor given up."""
        return self._crew.pending

    def wait(self, timeout: float | int | None = None) -> bool:
        """Wait until nothing is pending; False if ``timeout`` seconds passed first."""
        return self._crew.wait(timeout)

    def close(self) -> None:
        """End children and threads now; the programs in the table stay usable."""
        self._finalizer()

    def _serve(self, worker: "_Worker", key: ProgramKey) -> None:
        """Get one program in a background thread."""
        try:
            if key in self.table or self._load(key):
                return
            worker.child().compile(key)
            if not self._load(key, source="compiled"):
                raise CompileError("what the child stored could not be loaded")
        except Exception as error:  # a background program is never worth the engine
            worker.drop_child()
            # A child that does not start is not this program's fault, and no other has a chance.
            cannot_start = isinstance(error, ChildStartError | OSError)
            for lost in self._crew.give_up(key, all_waiting=cannot_start):
                self.failed[lost] = reason = f"{type(error).__name__}: {error}"
                if self._on_failed is not None:
                    self._on_failed(lost, reason)

    def _load(self, key: ProgramKey, *, source: str = "loaded") -> bool:
        """Load a program from the store into the table, if it is there."""
        loaded = self.store.load(key)
        if loaded is None:
            return False
        program, report = loaded
        if source == "compiled":
            report = report._replace(source="compiled", seconds=report.compile_seconds)
        self._add(key, program, report)
        return True

    def _add(self, key: ProgramKey, program: jax.stages.Compiled, report: CompileReport) -> None:
        if self.table.add(key, program, report):
            for told in (self._on_done, self._on_warm):
                if told is not None:
                    told(report)


class _Worker:
    """One background thread's child, started when it is first needed."""

    def __init__(self, crew: "_Crew") -> None:
        self._crew = crew
        self._child: CompileChild | None = None

    def child(self) -> CompileChild:
        if self._child is None:
            self._child = self._crew.start_child()
        return self._child

    def drop_child(self) -> None:
        """End it; the next program gets a fresh one, whatever state this one was in."""
        child, self._child = self._child, None
        if child is not None:
            self._crew.end_child(child)


Serve = Callable[[_Worker, ProgramKey], None]


class _Crew:
    """The threads and children of a service, and the keys they share; knows nothing of programs.

    Apart from the service, because a finalizer must not refer to what it finalizes.
    """

    def __init__(self, command: Sequence[str], job: dict[str, Any], children: int) -> None:
        if children < 1:
            raise ValueError(f"children is {children}; allowed: at least 1.")
        self.closed = False
        self._command = tuple(command)
        self._job = job
        self._most = children
        self._changed = threading.Condition()
        self._waiting: deque[ProgramKey] = deque()
        self._busy: list[ProgramKey] = []
        # Failures by key; those of children that do not start under None.
        self._attempts: dict[ProgramKey | None, int] = {}
        self._threads: set[threading.Thread] = set()
        self._alive: set[CompileChild] = set()

    @property
    def pending(self) -> tuple[ProgramKey, ...]:
        with self._changed:
            return (*self._busy, *self._waiting)

    def add(self, keys: Iterable[ProgramKey], serve: Serve) -> None:
        """Queue keys; threads run only while there are any."""
        with self._changed:
            if self.closed:
                raise RuntimeError("the compile service is closed; it starts nothing any more.")
            known = {*self._busy, *self._waiting}
            self._waiting.extend(key for key in keys if key not in known)
            for _ in range(min(self._most, len(self._waiting)) - len(self._threads)):
                # Daemons: an exit must not wait for a compilation.
                thread = threading.Thread(target=self._run, args=(serve,), daemon=True)
                self._threads.add(thread)
                thread.start()

    def give_up(self, key: ProgramKey, *, all_waiting: bool) -> list[ProgramKey]:
        """Queue a failed key again, or say which keys will never come.

        Args:
            key: it failed.
            all_waiting: whatever it was will befall all that wait.
        """
        with self._changed:
            if self.closed:
                return []
            tries = None if all_waiting else key
            self._attempts[tries] = self._attempts.get(tries, 0) + 1
            if self._attempts[tries] < ATTEMPTS:
                self._waiting.append(key)
                return []
            lost = [key, *(self._waiting if all_waiting else ())]
            if all_waiting:
                self._waiting.clear()
            return lost

    def wait(self, timeout: float | int | None) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: self.closed or not (self._busy or self._waiting), timeout
            )

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._waiting.clear()
            for child in self._alive:
                child.kill()
            threads = set(self._threads)
            self._changed.notify_all()
        for thread in threads - {threading.current_thread()}:
            thread.join()

    def start_child(self) -> CompileChild:
        # Under the lock, so that close() either sees the child or prevents it.
        with self._changed:
            if self.closed or not self._command:
                state = "is closed" if self.closed else "was given no command that starts a child"
                raise ChildStartError(f"the compile service {state}")
            child = CompileChild(self._command, self._job)
            self._alive.add(child)
            return child

    def end_child(self, child: CompileChild) -> None:
        with self._changed:
            self._alive.discard(child)
        child.close()

    def _run(self, serve: Serve) -> None:
        """Serve key after key until none is left."""
        worker = _Worker(self)
        try:
            while (key := self._take()) is not None:
                try:
                    serve(worker, key)
                finally:
                    with self._changed:
                        self._busy.remove(key)
                        self._changed.notify_all()
        finally:
            worker.drop_child()
            with self._changed:
                # A callback that raised ends its thread; nobody may wait for what it had to do.
                self._threads.discard(threading.current_thread())
                if not self._threads:
                    self._waiting.clear()
                self._changed.notify_all()

    def _take(self) -> ProgramKey | None:
        with self._changed:
            if not self._waiting:
                # From here on add() starts another thread.
                self._threads.discard(threading.current_thread())
                return None
            key = self._waiting.popleft()
            self._busy.append(key)
            return key
