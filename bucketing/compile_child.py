"""A child process that compiles: the parent's end and the child's end of one line-wise protocol.

Down: a JSON line with the job, then one line per key. Up: a line when the job is understood, then
one per key, done or failed. The pipe down is also the child's lifeline: when it closes, because the
parent closed it or died in whatever way, the child ends at once, even in the middle of a
compilation.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from bucketing.program_key import ProgramKey, decode_key, encode_key

_REASON_CHARACTERS = 600


class CompileError(RuntimeError):
    """A child could not compile a program; it says why."""


class ChildStartError(CompileError):
    """A child ended before it could compile anything: the next one would fare no better."""


class CompileChild:
    """A running child."""

    def __init__(self, command: Sequence[str], job: Mapping[str, Any]) -> None:
        """Start it.

        Args:
            command: program and arguments; the program must call ``serve_parent``.
            job: what the child needs to know, as JSON values.

        Raises:
            OSError: the command cannot be started.
        """
        # What it prints while it works must not get between the progress bars; it is quoted when
        # the child dies.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the child)
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        except OSError:
            self._errors.close()
            raise
        self._job: str | None = json.dumps(dict(job))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def compile(self, key: ProgramKey) -> None:
        """Let the child compile and store a program; wait for it.

        Raises:
            ChildStartError: the child never got ready.
            CompileError: it failed, or the child died.
        """
        if self._job is not None:
            if not self._ask(self._job):
                raise ChildStartError(self._obituary())
            self._job = None
        answer = self._ask(json.dumps(encode_key(key)))
        if not answer:
            raise CompileError(self._obituary())
        content = json.loads(answer)
        if content["key"] != encode_key(key):
            raise CompileError(f"the child answered for {content['key']}, not for {key}")
        if content["error"]:
            raise CompileError(content["error"])

    def close(self) -> None:
        """End the child at once, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # a line was still on its way to the child
                continue

    def _ask(self, line: str) -> str:
        """Send a line and wait for the answer; empty if the child is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            return self._process.stdout.readline()
        except OSError:  # the pipe broke
            return ""

    def kill(self) -> None:
        """End the process; a ``compile`` that waits for it in another thread fails."""
        self._process.kill()

    def _obituary(self) -> str:
        """How the child ended and the last line it printed."""
        self._process.kill()
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1][:_REASON_CHARACTERS]}" if lines else ""
        return f"the compiling child ended with code {code}{last}"


def serve_parent(
    prepare: Callable[[Mapping[str, Any]], Callable[[ProgramKey], None]],
) -> None:
    """Be the child: read the job, then compile key after key until the parent goes away.

    Args:
        prepare: takes the job and returns the function that compiles and stores one program; an
            exception it raises fails that program only.
    """
    # Whatever a library prints must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    lines = _lines_until_orphaned(sys.stdin)
    job = json.loads(next(lines))
    compile_key = prepare(job)
    print("ready", file=answers, flush=True)
    for line in lines:
        content = json.loads(line)
        error = ""
        try:
            compile_key(decode_key(content))
        except Exception as caught:  # compilers fail in many ways; the parent decides what follows
            error = f"{type(caught).__name__}: {caught}"[:_REASON_CHARACTERS]
        print(json.dumps({"key": content, "error": error}), file=answers, flush=True)


def _lines_until_orphaned(stream: TextIO) -> Iterator[str]:
    """The parent's lines; the process ends the moment there can be no more."""
    arrived: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            arrived.put(line)
        # Not sys.exit: the main thread may be inside the compiler for minutes.
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield arrived.get()
