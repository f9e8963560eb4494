"""System calls at random, made inside of the sandbox: nothing outside changes, whatever they are."""

import asyncio
import os
import time
from collections.abc import Iterator

import pytest
from support.sandbox_escapes import PRELUDE
from support.sandbox_outside import World, users, world

from rlgraph.nodes.sandbox import Limits, ToolError, run

SECONDS = float(os.environ.get("RLGRAPH_FUZZ_SECONDS", "20"))
LIMITS = Limits(seconds=4, memory_bytes=512 << 20, output_bytes=1 << 20, file_bytes=4 << 20)
FUZZ = """
import random
random.seed({seed})
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, True)
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)  # ends calls that wait
# What may end it or its output, and what waits: seldom tried, so that a run makes many calls.
RARE = {{60, 231, 15,1, 3, 436, 9, 10, 11, 12, 13, 14, 25, 28, 33, 292, 37, 38, 234, 34, 7, 23, 35, 232, 281, 271, 270, 230, 128, 130, 202}}
ARM_RARE = {{93, 94, 139, 64, 57, 436, 222, 226, 215, 214, 134, 135, 216, 233, 24, 103, 131, 73, 72, 101, 22, 115, 137, 133, 98}}
RARE = ARM_RARE if ARM else RARE
import mmap
arena = mmap.mmap(-1, 8 << 20)
base = ctypes.addressof(ctypes.c_char.from_buffer(arena))
good(libc.mprotect(ctypes.c_void_p(base + (4 << 20)), 4 << 20, 0))  # what a call writes past its end, it does not
pointers = [base + (i << 17) for i in range(32)]
for pointer, path in zip(pointers, (secret, public, own, folder, '/', '.', '/proc/self/mem', '/dev/null', '/tmp/f', '/usr/lib', shared)):
    ctypes.memmove(pointer, path.encode() + b'\\0', len(path) + 1)
for pointer in pointers[11:20]:
    ctypes.memmove(pointer, os.urandom(256), 256)
def value():
    kind = random.randrange(8)
    if kind < 3: return random.choice(pointers)
    if kind == 3: return random.choice((0, -1, 1, 2, -100, victim, os.getpid(), 1, port, segment))
    if kind == 4: return random.randrange(16)
    if kind == 5: return 1 << random.randrange(63)
    if kind == 6: return random.getrandbits(random.randrange(1, 64))
    return random.choice((4096, 64, 8, 0o777, 0x10000000, 0x40000000))
tried, allowed, end = set(), 0, time.monotonic() + 3
for turn in range(10 ** 9):
    number = random.randrange(470)
    if number in RARE and random.random() < 0.97: continue
    result = libc.syscall(*(ctypes.c_long(v) for v in (number, *(value() for _ in range(6)))))
    tried.add(number)
    allowed += result >= 0
    if turn % 200 == 0: os.write(1, f'{{turn}} {{len(tried)}} {{allowed}}\\n'.encode())
    if time.monotonic() > end: break
os.write(1, f'{{turn}} {{len(tried)}} {{allowed}}\\n'.encode())
os._exit(0)
"""


@pytest.fixture(params=users())
def outside(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(request.param) as made:
        yield made


async def fuzzed(code: str) -> str:
    try:
        return await run(code, LIMITS)
    except ToolError as error:  # killed by what it did to itself, or stopped: what it wrote before is in the message
        return str(error)


async def both(outside: World, seed: int) -> list[str]:
    start = PRELUDE + outside.names.replace(str(outside.mine), "/tmp")
    return await asyncio.gather(*(fuzzed(start + FUZZ.format(seed=seed + i)) for i in range(2)))


@pytest.mark.sandbox
@pytest.mark.stage("jobs")
@pytest.mark.timeout(0)
def test_random_system_calls_change_nothing_outside(outside: World) -> None:
    before, end, seed = outside.state(), time.monotonic() + SECONDS / len(users()), 0
    calls, most, allowed = 0, 0, 0
    while time.monotonic() < end:
        for said in asyncio.run(both(outside, seed)):
            counts = [line.split() for line in said.splitlines() if len(line.split()) == 3 and line.replace(" ", "").isdigit()]
            if counts:
                calls, most, allowed = calls + int(counts[-1][0]), max(most, int(counts[-1][1])), allowed + int(counts[-1][2])
        seed += 2
        state = outside.state()
        assert not [what for what, value in state.items() if value != before[what]], f"seed {seed}"
    print(f"{calls} calls of up to {most} numbers in one run, {allowed} allowed, {seed} runs")
    assert calls > 100 * SECONDS / len(users())
    assert most > 200
    assert allowed > 0
