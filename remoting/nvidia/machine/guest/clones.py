#!/usr/bin/env python3
"""Warm clones of a VM on two GPUs, on a machine as for run.py with PyTorch:

    FOLDER/clones.py BINARIES OUT [--seconds SECONDS]

A guest starts a server in PyTorch, which loads 2 GiB of weights by a native context and answers requests (serving.py). Its VM
is saved while the server runs (`snapshot --accel save`), killed, and restored twice at once, each VM with a worker for another
GPU. All answers are compared with those of a native run. OUT gets consoles, logs and times.txt, a line for each stage that has
been reached. Fails unless all answers are equal. With one GPU, both VMs use it.
"""
import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time

import guests
import python
from disk import Disk
from run import HERE, LEARNING, Machine, follow, note, output

MEMORY, WINDOW, PROGRAM = "6G", "4G", "serving.py"
POOLS = ("first", "second")
SEEDS = range(1, 7)


def used():
    """MiB of each GPU in use."""
    return output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits").split()


class Times:
    """What was measured, kept at once."""

    def __init__(self, machine):
        self.path = os.path.join(machine.out, "times.txt")

    def add(self, what, seconds):
        note(f"{what}: {seconds:.1f} s")
        with open(self.path, "a") as file:
            print(f"{what}: {seconds:.1f} s", file=file)


class Server:
    """A guest whose program serves."""

    def __init__(self, guest, machine, expected):
        self.guest, self.machine, self.expected = guest, machine, expected

    def ask(self, seed):
        """Returns the seconds until the answer, which is compared."""
        begin = time.monotonic()
        self.guest.send(str(seed))
        before, match = self.guest.until(rf"answer {seed} (-?\d+)|GUEST code", self.machine.left())
        if match[1] != self.expected[seed]:
            raise guests.Ended(f"guest {self.guest.name} answers {match[0]}, natively {self.expected[seed]}: {before[-5:]}")
        return time.monotonic() - begin


def natively(machine, times):
    """Runs the server here. Returns the list of files that it needs, and its answers by seed."""
    listed = machine.path("serving.files")
    text = "\n".join([*map(str, SEEDS), "end"]) + "\n"
    command = [sys.executable, "-u", os.path.join(HERE, "start.py"), "--list", listed, os.path.join(HERE, PROGRAM)]
    begin = time.monotonic()
    done = subprocess.run(command, input=text, capture_output=True, text=True, env={**os.environ, **LEARNING})
    times.add("natively, start to end", time.monotonic() - begin)
    with open(os.path.join(machine.out, "native", "serving"), "w") as file:
        file.write(done.stdout + done.stderr)
    answers = dict(re.findall(r"^answer (\d+) (-?\d+)$", done.stdout, re.M))
    if done.returncode or len(answers) != len(SEEDS):
        raise OSError(f"the server does not run natively: {done.stderr[-500:]}")
    return listed, {int(seed): answer for seed, answer in answers.items()}


def build(machine, listed, image):
    """Writes the guest's disk."""
    driver = machine.path("libraries")
    os.makedirs(driver)
    output("debugfs", "-R", f"rdump /lib {driver}", machine.path("driver.img"))
    disk = Disk()
    python.add(disk, os.path.join(HERE, PROGRAM), listed, machine.binaries, driver, machine.path("compiled"))
    checkpoint = os.path.join(machine.binaries, "gantry-checkpoint")
    disk.add("/usr/bin/gantry-checkpoint", checkpoint)
    # Where the agent looks for it.
    disk.add("/usr/lib/gantry-cuda/" + python.PRELOADED, os.path.join(machine.binaries, python.PRELOADED))
    libraries = [os.path.join(folder, name) for folder, _, names in os.walk(driver) for name in names if ".so" in name]
    for file in [checkpoint, *libraries]:
        done = subprocess.run(["ldd", file], capture_output=True, text=True)
        for needed in re.findall(r"=> (/[^ ]+) \(", done.stdout):
            if not os.path.basename(needed).startswith(python.DRIVER):
                folder = os.path.realpath(os.path.dirname(needed))
                disk.add(os.path.join(folder, os.path.basename(needed)), needed)
    disk.write(image, machine.binaries)
    note(f"the disk of {disk.size() >> 20} MiB is written")


def clones(machine, snapshot, expected, times):
    """Restores the VM for each pool, at once. Returns how many answer right."""
    right = []

    def clone(number, pool):
        try:
            began = time.monotonic()
            socket = os.path.join(machine.path(pool), "vm.sock")
            guest, took = machine.restored(pool, snapshot, f"accels=[gpu@{socket}]")
            times.add(f"clone {pool}: restored", took)
            server = Server(guest, machine, expected)
            server.ask(3 + number)
            times.add(f"clone {pool}: from its start to its first answer", time.monotonic() - began)
            times.add(f"clone {pool}: next answer", server.ask(5))
            right.append(pool)
        except (guests.Ended, OSError) as error:
            note(f"clone {pool}: {error}")

    threads = [threading.Thread(target=clone, args=item) for item in enumerate(POOLS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(right)


def run(machine):
    times, image = Times(machine), machine.disk("root.img", 16 << 30)
    ready = {}

    def building():
        try:
            listed, expected = natively(machine, times)
            build(machine, listed, image)
            ready["expected"] = expected
        except (OSError, subprocess.CalledProcessError) as error:
            note(f"the disk is not written: {error}, {getattr(error, 'stderr', '')}")

    def built():
        builder.join()
        if "expected" not in ready:
            raise guests.Ended("there is no disk for the guest")

    builder = threading.Thread(target=building)
    builder.start()
    socket = os.path.join(machine.path(POOLS[0]), "vm.sock")
    # With a limit, what others have of the GPU does not count as the program's.
    accel = f"api=nvidia,id=gpu,socket={socket},window={WINDOW},pages=64M,memory=8G"
    began = time.monotonic()
    guest = machine.seed("seed", image, MEMORY, accel)
    agent = "export LD_LIBRARY_PATH=/driver/lib; agent; /bin/busybox tail -f /run/agent.log & true"
    machine.boot(guest, built, agent)
    expected, words = ready["expected"], " ".join(f"{name}={value}" for name, value in LEARNING.items())
    started = time.monotonic()
    guest.send(f"export {words}; stay {sys.executable} -u start.py {PROGRAM}")
    follow(machine, guest, "GUEST loaded")
    server = Server(guest, machine, expected)
    server.ask(1)
    times.add("cold, from the start of the VM to its first answer", time.monotonic() - began)
    times.add("cold, from the start of the program to its first answer", time.monotonic() - started)
    times.add("cold, next answer", server.ask(2))
    note(f"the GPUs have {used()} MiB in use")
    snapshot = machine.path("snapshot")
    os.makedirs(snapshot)
    begin = time.monotonic()
    guest.control("snapshot", "--accel", "save", snapshot)
    times.add("suspended, paused, saved", time.monotonic() - begin)
    note(f"the snapshot has {output('du', '-sm', snapshot).split()[0]} MiB")
    guest.kill()
    time.sleep(2)
    note(f"the VM is killed: the GPUs have {used()} MiB in use")
    right = clones(machine, snapshot, expected, times)
    note(f"with both clones, the GPUs have {used()} MiB in use")
    print(f"{right} of {len(POOLS)} clones answer what the server answers natively")
    return 0 if right == len(POOLS) else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("binaries")
    parser.add_argument("out")
    parser.add_argument("--seconds", type=int, default=540)
    parser.add_argument("--cmdline", default="", help="added to the guest kernel's")
    options = parser.parse_args()
    os.environ["PATH"] += ":/usr/local/cuda/bin:/usr/local/nvidia/bin"
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    gpus = output("nvidia-smi", "--query-gpu=uuid,name,driver_version,memory.used", "--format=csv,noheader").strip()
    print(gpus)
    last = len(gpus.splitlines()) - 1
    pools = {pool: ["--gpu", str(min(number, last))] for number, pool in enumerate(POOLS)}
    machine = Machine(options, pools)
    try:
        return run(machine)
    except (guests.Ended, OSError, subprocess.CalledProcessError) as error:
        note(f"failed: {error}")
        return 1
    finally:
        machine.close()


if __name__ == "__main__":
    sys.exit(main())
