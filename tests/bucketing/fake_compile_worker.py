"""A compile worker without a compiler: hands out prepared files, and misbehaves on demand.

The job names the folder of prepared programs and, per key, a list of misdeeds, one for each time
the key is asked for; how often that was is counted in files, as children come and go.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, os.getcwd())

from bucketing.compile_child import serve_parent
from bucketing.program_key import key_name


def prepare(job):
    prepared, target = Path(job["prepared"]), Path(job["root"]) / job["fingerprint"][:32]
    if job.get("cannot_start"):
        sys.stderr.write("no such accelerator\n")
        raise SystemExit(7)

    def compile_key(key):
        name = key_name(key)
        asked = prepared / f"{name}.asked"
        asked.touch()
        with asked.open("a") as log:
            log.write(f"{os.getpid()}\n")
        times = len(asked.read_text().splitlines())
        misdeeds = job.get("misdeeds", {}).get(name, [])
        misdeed = misdeeds[times - 1] if times <= len(misdeeds) else "none"
        if misdeed == "die":
            sys.stderr.write("out of memory\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if misdeed == "hang":
            time.sleep(3600)
        if misdeed == "fail":
            raise ValueError("the compiler says no")
        if misdeed == "babble":
            sys.stdout.write("this is no answer\n")
        copy_program(prepared, target, name, half=misdeed == "die while writing")

    return compile_key


def copy_program(prepared, target, name, *, half):
    for binary in prepared.glob("*.bin"):
        content = binary.read_bytes()
        if half:
            (target / f"{binary.name}.x.tmp").write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        temporary = target / f"{binary.name}.{os.getpid()}"
        temporary.write_bytes(content)
        temporary.chmod(0o600)
        temporary.replace(target / binary.name)
    shutil.copy(prepared / f"{name}.json", target / f"{name}.json")


if __name__ == "__main__":
    serve_parent(prepare)
