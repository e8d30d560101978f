"""Shares and tails of PyTorch programs of native contexts that share a GPU by weight: sharing.py OUT FOLDER [PART...]

FOLDER has gantry-nvidia, libgantry_nvidia_preload.so, gantry-arbiter and sharer.py (of remoting/cuda-machine), and for the part
"both" what remoting/cuda-machine/pack.sh puts there. Each program has a worker of its own, whose weight is the digit in the
program's name. Results are written to OUT/sharing.txt. SECONDS in the environment: for how long each mix is measured (5). Parts:

  first    two mixes, for a short call
  mixes    all mixes
  default  the same without an arbiter: the driver's own slices
  both     a program of a native context beside one whose calls are remoted
  endless  a kernel that does not end, beside others
"""
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time

out, folder, parts = sys.argv[1], os.path.realpath(sys.argv[2]), sys.argv[3:] or ["mixes", "default", "both", "endless"]
seconds = float(os.environ.get("SECONDS", "5"))
work = tempfile.mkdtemp()
begin = time.monotonic()
MIXES = [["train1", "train3"], ["decode1", "train3"], ["decode1", "hog3"], ["hog1", "hog3"], ["train1", "decode2", "hog3"],
         ["train1", "train2", "train2b", "train3", "train3b", "train4"]]
FIRST = [["train1", "train3"], ["decode1", "hog3"]]
BOTH = [["train1", "remoted-train3"], ["remoted-decode1", "hog3"], ["decode1", "remoted-hog3"]]
arbiter = work + "/arbiter"
processes = []


def kind(name):
    return re.search("train|decode|hog|endless", name)[0]


def weight(name):
    return re.search("[0-9]", name)[0]


def say(*words):
    text = " ".join(map(str, words))
    print(f"[{time.monotonic() - begin:6.1f}] {text}", flush=True)
    with open(out + "/sharing.txt", "a") as file:
        print(text, file=file)


def wait_for(path):
    for _ in range(600):
        if os.path.exists(path):
            return
        time.sleep(0.05)
    sys.exit(f"{path} does not come")


def start(words, errors, **options):
    process = subprocess.Popen(words, stderr=open(f"{out}/{errors}.txt", "a"), **options)
    processes.append(process)
    return process


def start_arbiter():
    process = start([folder + "/gantry-arbiter", "--socket", arbiter], "arbiter")
    wait_for(arbiter)
    return process


def found(command):
    words = subprocess.run(command, shell=True, capture_output=True, text=True).stdout.split()
    return words[0] if words else ""


def clients():
    """Seconds of the device by client."""
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.connect(arbiter + ".status")
    except OSError:
        return {}
    with stream.makefile() as file:
        return {client["name"]: client for client in json.load(file)["clients"]}


def device_time():
    return {name: client["device_time"] / 1e9 for name, client in clients().items()}


class Program:
    def __init__(self, name):
        environment = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8")
        way = f"{work}/{name}.socket"
        if name.startswith("remoted-"):
            self.worker = start(
                [folder + "/gantry-accel", "serve", "--api", "cuda", "--socket", way, "--cache", work + "/cache", "--library",
                 driver, "--arbiter", arbiter, "--name", name, "--weight", weight(name), *libraries]
                + [word for path in readable for word in ("--readable", path)], "pool-" + name)
            preload = [f"{folder}/guest/{library}" for library in
                       ["libcuda.so.1", "libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13"]]
            preload = ":".join(path for path in preload if os.path.exists(path))
            environment.update(GANTRY_CUDA=way, LD_PRELOAD=preload, CUDA_VISIBLE_DEVICES="0")
        else:
            self.worker = start([folder + "/gantry-nvidia", "--socket", way, "--gpu", "0", "--slice", "4096", "--arbiter", arbiter,
                                 "--name", name, "--weight", weight(name)], "worker-" + name)
            environment.update(GANTRY_NVIDIA_SOCKET=way, LD_PRELOAD=folder + "/libgantry_nvidia_preload.so")
        wait_for(way)
        self.name = name
        self.process = start([sys.executable, folder + "/sharer.py", kind(name)], "errors-" + name, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True, env=environment)

    def ready(self):
        return self.process.stdout.readline().strip() == "ready"

    def go(self, time_):
        self.process.stdin.write(f"{time_}\n")
        self.process.stdin.flush()

    def result(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line.strip() else {"rate": 0, "ended": self.process.poll()}


def measure(names, time_):
    before = device_time()
    for name in names:
        programs[name].go(time_)
    results = {name: programs[name].result() for name in names}
    after = device_time()
    return results, {name: after.get(name, 0) - before.get(name, 0) for name in [*names, "endless1"]}


def measure_mix(what, names):
    results, used = measure(names, seconds)
    part = [results[name]["rate"] / alone[kind(name)] for name in names]
    steps = [results[name]["rate"] * STEP[kind(name)] for name in names]
    rounded = [[round(value, 3) for value in values]
               for values in (part, [one / (sum(steps) or 1) for one in steps],
                              [used[name] / (sum(used.values()) or 1) for name in names])]
    say(what, *names, "of alone", rounded[0], "sum", round(sum(part), 3), "shares by rates", rounded[1], "by the record", rounded[2],
        "recorded", round(sum(used.values()) / seconds, 3))
    for name in names:
        say("   ", name, results[name])


def part_mixes(mixes):
    for names in mixes:
        measure_mix("ledger", names)


# Milliseconds of the device in a step, by the record of an H200 with the driver's own slices (measurements/sharing.md).
STEP = {"train": 0.745, "decode": 0.199, "hog": 3.16}
driver, libraries, readable = "", [], []
if "both" in parts:
    driver = os.environ.get("GANTRY_DRIVER") or found("ldconfig -p | sed -n 's/.*libcuda.so.1 .*x86-64.*=> //p'; "
                                                      "find /usr/local/nvidia /usr/lib -name libcuda.so.1 2> /dev/null")
    readable = [os.path.dirname(os.path.realpath(driver))]
    try:
        import nvidia
        for path in nvidia.__path__:
            for place, _, files in os.walk(path):
                if "libcublas.so.13" in files:
                    libraries = ["--cuda-libraries", place]
                    readable.append(os.path.dirname(os.path.realpath(place + "/libcublas.so.13")))
    except ImportError:
        pass
    for link, target in [("libcuda.so.1", "libgantry_cuda.so"), ("libcuda.so", "libcuda.so.1")]:
        if not os.path.lexists(f"{folder}/guest/{link}"):
            os.symlink(target, f"{folder}/guest/{link}")
    os.makedirs(work + "/cache", exist_ok=True)

shared = start_arbiter()
mixes = {"first": FIRST, "mixes": MIXES, "default": MIXES if "mixes" in parts else FIRST, "both": BOTH}
needed = {name for part in parts for names in mixes.get(part, []) for name in names} | {"train1", "decode1", "hog3"}
programs = {}
try:
    # Pools first: they try time slices, which nobody is to disturb.
    for name in sorted(needed, key=lambda name: (not name.startswith("remoted-"), name)):
        programs[name] = Program(name)
    for name, program in list(programs.items()):
        if not program.ready():
            say(name, "does not start:", open(f"{out}/errors-{name}.txt").read()[-500:])
            if not name.startswith("remoted-"):
                sys.exit(1)
            del programs[name]
    say("ready; clients", {name: (client["weight"], client["workers"]) for name, client in clients().items()})
    alone = {}
    for name in ["train1", "decode1", "hog3"]:
        results, _ = measure([name], 2)
        alone[kind(name)] = results[name]["rate"] or 1
        say("alone", name, results[name])
    for part in parts:
        if part in ("first", "mixes"):
            part_mixes(mixes[part])
        elif part == "both":
            for names in BOTH:
                if all(name in programs for name in names):
                    measure_mix("both", names)
        elif part == "endless":
            endless = programs["endless1"] = Program("endless1")
            if endless.ready():
                endless.go(1)
                time.sleep(0.3)
                for names in [["decode1"], ["decode1", "train3"]]:
                    if all(name in programs for name in names):
                        results, used = measure(names, seconds)
                        say("beside endless1:", results, {name: round(time_, 2) for name, time_ in used.items()},
                            "its program has ended" if endless.process.poll() is not None else "it goes on")
            endless.process.kill()
            endless.process.wait()
        elif part == "default":
            shared.kill()
            shared.wait()
            os.unlink(arbiter)
            os.unlink(arbiter + ".status")
            time.sleep(1)
            for names in mixes["default"]:
                measure_mix("default", names)
            shared = start_arbiter()
            time.sleep(1)
            say("another arbiter; clients", sorted(clients()))
    ended = [name for name, program in programs.items() if name != "endless1" and program.process.poll() is not None]
    say("programs that have ended:", ended, "killed by the arbiter:", sum(client["killed"] for client in clients().values()))
finally:
    for process in reversed(processes):
        process.kill()
    for process in processes:
        process.wait()
