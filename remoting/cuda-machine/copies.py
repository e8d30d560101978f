"""copies.py OUT FOLDER ACCEL POLICY WORK SECONDS: programs of copies in two and three dimensions beside one of kernels (copier.py), by
weight, each for so many seconds.

FOLDER has gantry-arbiter, and `guest` with Gantry's libcuda.so.1; ACCEL is the gantry-accel to measure, WORK a folder for sockets, and
DRIVER in the environment the driver's library. Results are written to OUT/copies.txt."""
import json
import os
import socket
import subprocess
import sys
import time

out, folder, accel, policy, place, seconds = sys.argv[1:7]
seconds = float(seconds)
driver = os.environ["DRIVER"]
here = os.path.dirname(os.path.realpath(__file__))
os.makedirs(place, exist_ok=True)
NAMES = ["rows1", "rows3", "volumes1", "kernels1", "kernels3"]
MIXES = [["rows1", "kernels1"], ["rows1", "kernels3"], ["volumes1", "kernels3"], ["rows3", "kernels1"], ["rows1", "rows3"]]
MIXES = MIXES[:int(os.environ.get("MIXES", "9"))]
label = f"{os.path.basename(accel)} {policy}"
begin = time.monotonic()


def say(*words):
    text = " ".join(map(str, words))
    print(f"[{time.monotonic() - begin:5.1f}] {text}", flush=True)
    with open(out + "/copies.txt", "a") as file:
        print(text, file=file)


def wait_for(path):
    for _ in range(600):
        if os.path.exists(path):
            return
        time.sleep(0.05)
    sys.exit(f"{path} does not come")


def device_time():
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(place + "/arbiter.status")
    with stream.makefile() as file:
        return {client["name"]: client["device_time"] / 1e9 for client in json.load(file)["clients"]}


servers, programs = [], {}
try:
    servers.append(subprocess.Popen([folder + "/gantry-arbiter", "--socket", place + "/arbiter", "--policy", policy],
                                    stderr=open(f"{out}/arbiter-{policy}.txt", "a")))
    wait_for(place + "/arbiter")
    for name in NAMES:
        servers.append(subprocess.Popen(
            [accel, "serve", "--api", "cuda", "--socket", f"{place}/{name}", "--cache", place, "--library", driver,
             "--arbiter", place + "/arbiter", "--name", name, "--weight", name[-1],
             "--readable", os.path.dirname(os.path.realpath(driver))]
            + (["--heap", os.environ["GANTRY_HEAP"]] if "GANTRY_HEAP" in os.environ else []),
            stderr=open(f"{out}/pool-{os.path.basename(accel)}-{policy}-{name}.txt", "a")))
    for name in NAMES:
        wait_for(f"{place}/{name}")
        environment = dict(os.environ, GANTRY_CUDA=f"{place}/{name}",
                           LD_LIBRARY_PATH=folder + "/guest:" + os.environ.get("LD_LIBRARY_PATH", ""))
        programs[name] = subprocess.Popen([sys.executable, here + "/copier.py", name[:-1]], env=environment, text=True,
                                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(f"{out}/{name}.txt", "a"))
    for name, program in programs.items():
        line = program.stdout.readline().split()
        if line[:1] != ["ready"]:
            sys.exit(f"{name} does not start: {out}/{name}.txt")
        say(label, name, "steps of", line[1], "commands of", line[2], "ms")

    def measure(names, time_):
        before = device_time()
        for name in names:
            programs[name].stdin.write(f"{time_}\n")
            programs[name].stdin.flush()
        rates = {name: float(programs[name].stdout.readline() or 0) for name in names}
        after = device_time()
        used = {name: after.get(name, 0) - before.get(name, 0) for name in names}
        return rates, used

    alone = {}
    for name in ["rows1", "volumes1", "kernels1"]:
        rates, used = measure([name], 1)
        alone[name[:-1]] = rates[name]
        say(label, "alone", name, round(rates[name]), "commands a second, device", round(used[name], 2), "s of 1")
    for names in MIXES:
        rates, used = measure(names, seconds)
        parts = [rates[name] / alone[name[:-1]] for name in names]
        total = sum(parts) or 1
        by_arbiter = [used[name] / (sum(used.values()) or 1) for name in names]
        say(label, "+".join(names), "of alone", [round(part, 3) for part in parts], "sum", round(total, 3), "share of work",
            [round(part / total, 3) for part in parts], "by the arbiter", [round(part, 3) for part in by_arbiter])
finally:
    for process in [*programs.values(), *reversed(servers)]:
        process.kill()
        process.wait()
