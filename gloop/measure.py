#!/usr/bin/python3
"""Everything that is measured of GLoop on a machine with a GPU, in one go: prints Markdown.

`cargo xtask bench gloop --pack` builds the folder in which this lies, with all that it starts.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
EATERS = os.path.join(HERE, "gloop-eaters")
ALONE = {}


def say(text=""):
    print(text, flush=True)


def shown(words):
    return " ".join(words).replace(HERE + "/", "").replace(HERE, "FOLDER")


def command(words, limit):
    """Runs it and prints what it prints; whether it has succeeded."""
    say(f"\n$ {shown(words)}")
    start = time.monotonic()
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, text=True, start_new_session=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, code = process.communicate(timeout=limit)[0], process.returncode
        except subprocess.TimeoutExpired:
            # With all that it has started.
            os.killpg(process.pid, signal.SIGKILL)
            output, code = process.communicate()[0], "none: it took too long"
    except OSError as missing:
        output, code = str(missing), "none"
    say(output.rstrip())
    say(f"({time.monotonic() - start:.0f} s; exit status {code})")
    return code == 0


class Arbiter:
    def __init__(self, limit, policy="fair-preemptive"):
        self.folder = tempfile.mkdtemp()
        self.path = os.path.join(self.folder, "arbiter")
        self.words = [os.path.join(HERE, "gantry-arbiter"), "--socket", self.path,
                      "--policy", policy, "--limit", str(limit)]
        self.listen()

    def listen(self):
        if os.path.exists(self.path + ".status"):
            os.remove(self.path + ".status")
        self.process = subprocess.Popen(self.words)
        while not os.path.exists(self.path + ".status"):
            time.sleep(0.01)

    def clients(self):
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(self.path + ".status")
        text = b""
        while part := stream.recv(65536):
            text += part
        return {one["name"]: one for one in json.loads(text)["clients"]}

    def end(self):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder)


def start(what, arbiter=None, name="", weight=1, verb=("run",)):
    words = [EATERS, *verb[:1], "--cubins", HERE, *verb[1:]]
    if arbiter:
        words += ["--arbiter", arbiter.path, "--client", name, "--weight", str(weight)]
    return subprocess.Popen(words + [what], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            stdin=subprocess.DEVNULL, text=True)


def result(process, limit=60):
    try:
        output = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        output = process.communicate()[0] + " (it took too long)"
    return output.strip()


def rounds(text):
    found = re.search(r"(\d+) rounds in ([\d.]+) s", text)
    return (int(found[1]), float(found[2])) if found else (0, 1.0)


def alone(programs):
    say("\n## Alone")
    for program in programs:
        text = result(start(program, verb=("run", "--seconds", "3")))
        say(text)
        count, took = rounds(text)
        ALONE[program] = took / max(count, 1)


def in_turns(clients, seconds, policy="fair-preemptive"):
    """Programs by weight: shares in the arbiter's account, and what of the GPU was of use."""
    say(f"\n### In turns of the arbiter ({policy}): "
        f"{', '.join(f'{p} of weight {w}' for p, w in clients)}")
    arbiter = Arbiter(2000, policy)
    names = [f"{number}-{program}" for number, (program, _) in enumerate(clients)]
    processes = [start(program, arbiter, name, weight, ("run", "--seconds", str(seconds)))
                 for name, (program, weight) in zip(names, clients)]
    turns = lambda: [arbiter.clients().get(name, {}).get("turns", 0) for name in names]
    while min(turns()) < 3 and all(p.poll() is None for p in processes):
        time.sleep(0.05)
    samples = []
    until = time.monotonic() + seconds - 2
    while time.monotonic() < until and all(p.poll() is None for p in processes):
        known = arbiter.clients()
        samples.append((time.monotonic(), [known[name]["device_time"] for name in names]))
        time.sleep(0.2)
    texts = [result(process) for process in processes]
    totals = arbiter.clients()
    arbiter.end()
    if len(samples) < 3:
        return say("failed: " + "; ".join(texts))
    weights = [weight for _, weight in clients]
    (begun, first), (ended, last) = samples[0], samples[-1]
    used = [b - a for a, b in zip(first, last)]
    shares = [one / sum(used) for one in used]
    by_weight = [one / weight for one, weight in zip(used, weights)]
    useful = 0
    for name, text, (program, _), one in zip(names, texts, clients, used):
        count, _ = rounds(text)
        useful += one * count * ALONE[program] * 1e9 / totals[name]["device_time"]
    errors = []
    for (_, a), (_, b) in zip(samples, samples[1:]):
        window = [y - x for x, y in zip(a, b)]
        if sum(window):
            errors += [abs(one / sum(window) - weight / sum(weights)) * 100
                       for one, weight in zip(window, weights)]
    wall = (ended - begun) * 1e9
    say(f"shares {', '.join(f'{share:.3f}' for share in shares)}; "
        f"MMR {min(by_weight) / max(by_weight):.3f}; GPU in use {sum(used) / wall:.3f}; "
        f"overhead {wall / useful:.3f} (time over what the same rounds take alone)")
    say(f"windows of 200 ms: share off by {statistics.median(errors):.1f} points (median), "
        f"{max(errors):.1f} at most, of {len(errors)}")
    for text in texts:
        say("    " + text.replace("\n", "\n    "))


def by_driver(programs, seconds, how):
    """The same without an arbiter: the driver's time slices, or MPS."""
    say(f"\n### {how}: {', '.join(programs)}")
    processes = [start(program, verb=("run", "--seconds", str(seconds))) for program in programs]
    progress = []
    for program, process in zip(programs, processes):
        text = result(process)
        count, took = rounds(text)
        progress.append(count * ALONE.get(program, 0) / took)
        say("    " + text.replace("\n", "\n    "))
    if min(progress) > 0:
        say(f"progress, in what each has alone: {', '.join(f'{one:.3f}' for one in progress)}; "
            f"MMR {min(progress) / max(progress):.3f}; overhead {1 / sum(progress):.3f}")


def servers(count, policy=None, think=0, beside=None):
    """Servers, and a program that has what they leave."""
    say(f"\n### {count} matmul servers, clients think {think} ms, "
        f"{f'in turns ({policy})' if policy else 'by the driver'}{f', beside {beside}' if beside else ''}")
    arbiter = Arbiter(2000, policy) if policy else None
    verb = ("run", "--seconds", "4", "--think", str(think))
    processes = [start("matmul", arbiter, f"server-{number}", 1, verb) for number in range(count)]
    other = start(beside, arbiter, beside, 1, ("run", "--seconds", "4")) if beside else None
    for process in processes:
        say(result(process).replace("\n", "; "))
    if other:
        text = result(other)
        rounds_of, took = rounds(text)
        say(f"{text} (alone {ALONE.get(beside, 0):.4f} s: "
            f"{rounds_of * ALONE.get(beside, 0) / took:.3f} of the GPU)")
    if arbiter:
        used = ", ".join(f"{one['name']} {one['device_time'] / 1e9:.2f} s in {one['turns']} turns"
                         for one in arbiter.clients().values())
        say(f"of the GPU: {used}")
        arbiter.end()


def hostile():
    say("\n## Hostile kernels beside two that must not notice")
    arbiter = Arbiter(500)
    neighbour = start("tpacf", arbiter, "neighbour", 1, ("run", "--seconds", "14"))
    checked = subprocess.Popen([EATERS, "check", "--cubins", HERE, "--stops", "3000", "throttle", "lavamd"],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    time.sleep(1.5)
    for kernel in ["requests", "words", "grants", "wild", "endless"]:
        process = start(kernel, arbiter, f"hostile-{kernel}", 1, ("hostile",))
        text = result(process, 20)
        before = arbiter.clients()["neighbour"]["device_time"]
        time.sleep(0.3)
        known = arbiter.clients()
        after = known["neighbour"]["device_time"]
        killed = known.get(f"hostile-{kernel}", {}).get("killed", 0)
        say(f"{kernel}: exit status {process.returncode}, killed by the arbiter {killed} times; the "
            f"neighbour {'computes on' if after > before else 'STANDS STILL'}\n    {text}")
    say(result(checked))
    say(result(neighbour))
    say(f"neighbour killed: {arbiter.clients()['neighbour']['killed']}")
    arbiter.end()


def killed():
    say("\n## SIGKILL of a neighbour")
    arbiter = Arbiter(2000)
    stays = start("tpacf", arbiter, "stays", 1, ("run", "--seconds", "6"))
    goes = start("throttle", arbiter, "goes", 1, ("run", "--seconds", "60"))
    while arbiter.clients().get("goes", {}).get("turns", 0) < 5 and stays.poll() is None:
        time.sleep(0.01)
    goes.kill()
    begun = time.monotonic()
    had = arbiter.clients()["stays"]["device_time"]
    time.sleep(1)
    got = (arbiter.clients()["stays"]["device_time"] - had) / 1e9
    say(f"in the second after it the other one has {got:.3f} s of "
        f"{time.monotonic() - begun:.3f} s of the GPU")
    goes.wait()
    say(result(stays))
    arbiter.end()
    at_any_moment()
    killed_without_turns("time slices of the driver")


def at_any_moment():
    """Neighbours are killed at random moments, from their begin on, and then the arbiter."""
    arbiter = Arbiter(2000)
    stays = start("tpacf", arbiter, "stays", 1, ("run", "--seconds", "14"))
    device_time = lambda: arbiter.clients().get("stays", {}).get("device_time", 0)
    while device_time() == 0 and stays.poll() is None:
        time.sleep(0.01)
    chance = random.Random(1)
    stood = 0
    for number in range(12):
        goes = start("throttle" if number % 2 else "lavamd", arbiter, f"goes-{number}", 1,
                     ("run", "--seconds", "60"))
        time.sleep(chance.uniform(0.05, 1.2))
        goes.kill()
        goes.wait()
        had = device_time()
        time.sleep(0.1)
        stood += device_time() == had
    say(f"12 neighbours killed at random moments: the other one stood still after {stood} of them")
    arbiter.process.kill()
    arbiter.process.wait()
    arbiter.listen()
    time.sleep(0.5)
    had = device_time()
    time.sleep(0.2)
    say("the arbiter killed: with the next one it "
        + ("computes on" if device_time() > had else "STANDS STILL"))
    say(f"{result(stays)} (exit status {stays.returncode})")
    arbiter.end()


def killed_without_turns(how):
    """What a neighbour costs that is killed, or whose kernel faults, where nobody gives turns."""
    for what, end in [("SIGKILL", None), ("a fault (wild addresses)", "wild")]:
        stays = start("tpacf", verb=("run", "--seconds", "5"))
        time.sleep(1.5)
        if end:
            result(start(end, verb=("hostile",)), 20)
        else:
            goes = start("throttle", verb=("run", "--seconds", "60"))
            time.sleep(1.5)
            goes.kill()
            goes.wait()
        text = result(stays, 30)
        say(f"{how}, {what}: the other one ends with status {stays.returncode}: {text}")


def in_c():
    """A program in C in turns, beside another one."""
    say("\n## A program in C (gloop.h): throttle of weight 1 beside lavamd of weight 1")
    arbiter = Arbiter(2000)
    gpu = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
                         text=True, stdout=subprocess.PIPE, check=False, timeout=20).stdout
    cubin = os.path.join(HERE, f"throttle.sm_{gpu.strip().replace('.', '')}.cubin")
    other = start("lavamd", arbiter, "rust", 1, ("run", "--seconds", "4"))
    program = subprocess.Popen([os.path.join(HERE, "turns"), arbiter.path, "c", "1", "20000000", cubin],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    say(result(program, 30))
    say(f"exit status {program.returncode}")
    say(result(other))
    arbiter.end()


def mps():
    control = shutil.which("nvidia-cuda-mps-control")
    if not control:
        return say("\n### MPS: there is no nvidia-cuda-mps-control here")
    alone([program for program in ["throttle", "lavamd"] if program not in ALONE])
    folder = tempfile.mkdtemp()
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = folder
    os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
    subprocess.run([control, "-d"], check=False)
    by_driver(["throttle", "lavamd"], 5, "MPS")
    servers(3)
    killed_without_turns("MPS")
    subprocess.run([control], input="quit\n", text=True, check=False, timeout=20)
    del os.environ["CUDA_MPS_PIPE_DIRECTORY"]


def shares(options, policy, seconds, limit, *more):
    """Applications of OpenCL by weight, with what `cargo xtask bench gpu --pack` has built."""
    command([os.path.join(options.gpu, "xtask"), "bench", "sharing", "--built", options.gpu,
             "--vendors", options.vendors, "--pictures", tempfile.gettempdir(),
             "--policy", policy, "--seconds", str(seconds), *more], limit)


def parts(options):
    sharing = [
        ("closed", lambda: [shares(options, policy, 2, 110, "--closed")
                            for policy in ["fair", "fair-preemptive"]]),
        ("backlogged", lambda: shares(options, "fair-preemptive", 25, 100)),
        ("others", lambda: shares(options, "credit,band", 2, 80, "--closed", "--mixes", "5")),
    ]
    closed, backlogged, others = sharing if options.gpu else [(name, None) for name, _ in sharing]
    return [
        ("bench", lambda: command([EATERS, "bench", "--cubins", HERE], 90)),
        closed,
        ("sharing", lambda: [
            alone(["throttle", "lavamd", "tpacf"]),
            say("\n## Shared"),
            in_turns([("throttle", 1), ("lavamd", 1)], 9),
            in_turns([("throttle", 1), ("lavamd", 3)], 9),
            in_turns([("throttle", 1), ("lavamd", 1)], 6, "fair"),
            in_turns([("throttle", 1), ("tpacf", 2), ("lavamd", 4)], 8),
            by_driver(["throttle", "lavamd"], 4, "Time slices of the driver"),
        ]),
        ("check", lambda: command([EATERS, "check", "--cubins", HERE, "--stops", "10000",
                                   "--seconds", "15"], 100)),
        backlogged,
        ("servers", lambda: [
            "tpacf" in ALONE or alone(["tpacf"]),
            say("\n## Servers"), servers(1), servers(3, "fair"), servers(3),
            servers(3, "fair", 20), servers(3, None, 20),
            servers(3, "fair", 20, "tpacf"), servers(3, None, 20, "tpacf"),
        ]),
        ("mps", mps),
        ("killed", killed),
        ("hostile", hostile),
        ("c", in_c),
        others,
    ]


def main():
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--gpu", metavar="FOLDER", help="what `cargo xtask bench gpu --pack` has made: "
                       "shares of applications of OpenCL are measured, too")
    words.add_argument("--vendors", metavar="FOLDER", default="/etc/OpenCL/vendors",
                       help="where the .icd file of the driver is (%(default)s)")
    words.add_argument("--until", metavar="SECONDS", type=float, default=float("inf"),
                       help="no part begins later than so long after the begin")
    words.add_argument("parts", metavar="PART", nargs="*", help="only these")
    options = words.parse_args()
    begun = time.monotonic()
    command(["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv"], 20)
    for name, part in parts(options):
        if part is None or options.parts and name not in options.parts:
            continue
        if time.monotonic() - begun > options.until:
            say(f"\n({name} is left out: there is no time for it)")
            continue
        try:
            part()
        except Exception as error:  # the other parts are measured nevertheless
            say(f"FAILED {name}: {error!r}")
        say(f"\n({name} has ended {time.monotonic() - begun:.0f} s after the begin)")


main()
