#!/usr/bin/env python3
"""A CUDA program that goes on when its VM is restored, on a machine as for run.py:

    FOLDER/suspension.py BINARIES OUT [--seconds SECONDS]

A guest boots and starts a program by a native context. Its VM is saved while it runs (`snapshot --accel save`), killed, and
restored with another worker. There, the program is suspended and resumed once more (`move-accel`). What it prints is compared
with an uninterrupted run on the host. OUT gets consoles, logs and times.txt. Fails unless all steps are equal.
"""
import argparse
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import guests
from disk import Disk
from run import HERE, Machine, note, output, used

STEPS, SECONDS = 100, 2
# Where the agent finds the library and the program that it suspends others by.
LIBRARY, CHECKPOINT = "lib/gantry-cuda", "bin/gantry-checkpoint"


class Steps:
    """What a program has printed, by step."""

    def __init__(self, expected):
        self.expected, self.seen = expected, {}

    def take(self, lines):
        for line in lines:
            if match := re.match(r"step (\d+) (\w+)", line):
                step, value = int(match[1]), match[2]
                if self.expected[step] != value:
                    raise guests.Ended(f"step {step} is {value}, natively {self.expected[step]}")
                self.seen[step] = value

    def next(self, guest, count, seconds):
        """Waits for so many further steps."""
        for _ in range(count):
            before, match = guest.until(r"step \d+ \w+", seconds)
            self.take([*before, match[0]])


def build(machine, image):
    """The guest's disk. Returns what the program prints natively, by step."""
    root, nothing = machine.path("root"), machine.path("nothing")
    # Only the program below is compiled, and it needs no library of CUDA's.
    os.makedirs(nothing)
    for name in ("nvcc", "ldconfig"):
        with open(os.path.join(nothing, name), "w") as file:
            file.write("#!/bin/sh\n")
        os.chmod(file.name, 0o755)
    environment = {**os.environ, "PATH": f"{nothing}:{os.environ['PATH']}"}
    output(os.path.join(HERE, "make-root.sh"), machine.binaries, root, env=environment)
    os.makedirs(os.path.join(root, "driver"))
    output("debugfs", "-R", f"rdump /lib {root}/driver", machine.path("driver.img"))
    for library in glob.glob(f"{root}/driver/lib/lib*.so.*"):
        done = subprocess.run(["ldd", library], capture_output=True, text=True)
        for needed in re.findall(r"=> (/[^ ]+) \(", done.stdout):
            to = os.path.join(root, "lib/x86_64-linux-gnu", os.path.basename(needed))
            if not os.path.exists(to) and not re.match(r"lib(cuda|nvidia)", os.path.basename(needed)):
                shutil.copy(needed, to)
    os.makedirs(os.path.join(root, LIBRARY))
    shutil.copy(os.path.join(machine.binaries, "libgantry_nvidia_preload.so"), os.path.join(root, LIBRARY))
    shutil.copy(os.path.join(machine.binaries, "gantry-checkpoint"), os.path.join(root, CHECKPOINT))
    program = os.path.join(root, "programs/suspended")
    output("gcc", "-O1", "-w", "-o", program, os.path.join(HERE, "programs/suspended.c"), "-ldl")
    disk = Disk()
    disk.tree(root)
    disk.write(image, machine.binaries)
    printed = output(program, str(STEPS), "0")
    return {int(step): value for step, value in re.findall(r"^step (\d+) (\w+)$", printed, re.M)}


def seconds_of(guest, *words):
    """How long a request takes."""
    begin = time.monotonic()
    guest.control(*words)
    return time.monotonic() - begin


def suspensions(machine):
    image, built = machine.disk("root.img", 8 << 30), {}

    def building():
        try:
            built["steps"] = build(machine, image)
            note("the disk is written, and the program has run natively")
        except (OSError, subprocess.CalledProcessError) as error:
            note(f"the disk is not written: {error}, {getattr(error, 'stderr', '')}")

    builder = threading.Thread(target=building)
    builder.start()
    # With a limit, what others have of the GPU does not count as the program's.
    socket = os.path.join(machine.path("nvidia"), "vm.sock")
    accel = f"api=nvidia,id=gpu,socket={socket},window={machine.options.window},pages=64M,memory=4G"
    guest = machine.seed("saved", image, "2560M", accel)
    machine.boot(guest, builder.join, "export LD_LIBRARY_PATH=/driver/lib; agent driver")
    steps, times = Steps(built["steps"]), {}
    guest.send(f"stay ./suspended {STEPS} {SECONDS}")
    steps.next(guest, 2, machine.left())
    note(f"the program computes in the guest; the GPU has {used()} MiB in use")
    snapshot = machine.path("snapshot")
    os.makedirs(snapshot)
    times["suspended, paused, saved"] = seconds_of(guest, "snapshot", "--accel", "save", snapshot)
    note(f"saved in {times['suspended, paused, saved']:.1f} s: {output('du', '-sm', snapshot).split()[0]} MiB")
    guest.kill()
    time.sleep(2)
    note(f"the VM is killed: the GPU has {used()} MiB in use")
    again, times["restored"] = machine.restored("restored", snapshot)
    begin = time.monotonic()
    steps.next(again, 1, machine.left())
    times["from restored to its first step"] = time.monotonic() - begin
    note("the program goes on in the restored VM")
    steps.next(again, 3, machine.left())
    print(f"restored: equal up to step {max(steps.seen)}", flush=True)
    times["suspended in place"] = seconds_of(again, "move-accel", "gpu", "--to", "parked")
    note(f"suspended in place: the GPU has {used()} MiB in use")
    times["resumed in place"] = seconds_of(again, "move-accel", "gpu", "--to", "host")
    last = max(steps.seen)
    while max(steps.seen) < last + 3:
        steps.next(again, 1, machine.left())
    with open(os.path.join(machine.out, "times.txt"), "w") as file:
        for what, seconds in times.items():
            print(f"{what}: {seconds:.1f} s", file=file)
            note(f"{what}: {seconds:.1f} s")
    print(f"all {len(steps.seen)} steps that were printed are equal, the last is {max(steps.seen)}")
    again.kill()
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("binaries")
    parser.add_argument("out")
    parser.add_argument("--seconds", type=int, default=540)
    parser.add_argument("--window", default="4G", help="of the accelerator")
    parser.add_argument("--cmdline", default="", help="added to the guest kernel's")
    options = parser.parse_args()
    os.environ["PATH"] += ":/usr/local/cuda/bin:/usr/local/nvidia/bin"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(output("nvidia-smi", "--query-gpu=name,driver_version,memory.used", "--format=csv,noheader").strip())
    machine = Machine(options)
    try:
        return suspensions(machine)
    except (guests.Ended, OSError, subprocess.CalledProcessError) as error:
        note(f"failed: {error}")
        return 1
    finally:
        machine.close()


if __name__ == "__main__":
    sys.exit(main())
