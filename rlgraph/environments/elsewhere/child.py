"""The program that holds environments in another Python: it reads calls as lines of JSON, and writes what they return.

    python child.py MODULE_OR_FILE:CLASS OPTIONS [rows]

It imports the standard library alone; rlgraph need not be installed there. What the class prints goes to standard error.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys


def find_module(name):  # no annotations: any Python 3.9 and newer
    """Import a module or a file."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    sys.path.insert(0, os.path.dirname(os.path.abspath(name)))
    spec = importlib.util.spec_from_file_location("environment_of_rlgraph", name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def call_function(function, *given, **named):
    """Call a function, in a thread if it is not async."""
    if inspect.iscoroutinefunction(function):
        return await function(*given, **named)
    return await asyncio.to_thread(function, *given, **named)


async def answer_call(make, options, held, call, name, value):
    """Do one call for the environment `name`."""
    if call == "reset":
        held[name] = await asyncio.to_thread(lambda: make(**value, **options))
        return await call_function(held[name].reset)
    if call == "step":
        return await call_function(held[name].step, value)
    gone = held.pop(name, None)
    return None if gone is None else await call_function(gone.close)


async def serve(make, options, out):
    """Answer lines until there are no more."""
    held, tasks = {}, set()

    async def one(line):
        number, call, name, value = json.loads(line)
        try:
            text = json.dumps([number, None, await answer_call(make, options, held, call, name, value)])
        except Exception as error:  # noqa: BLE001 (whatever an environment raises ends its conversation)
            text = json.dumps([number, f"{type(error).__name__}: {str(error)[:300]}", None])
        out.write(text + "\n")
        out.flush()

    while True:
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            return
        task = asyncio.ensure_future(one(line))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def main():
    where, _, what = sys.argv[1].rpartition(":")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of the class are not answers
    module, options = find_module(where), json.loads(sys.argv[2])
    if sys.argv[3:] == ["rows"]:
        out.write(json.dumps(module.rows(**options)) + "\n")
        return out.flush()
    return asyncio.run(serve(vars(module)[what], options, out))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # whatever threads of environments are left
