#!/usr/bin/env python3
"""CUDA programs in Linux guests through native contexts, on a machine with an NVIDIA GPU of branch 580, nvcc and KVM; the
same programs natively beside it, outputs compared byte by byte:

    FOLDER/run.py BINARIES OUT [--seconds SECONDS] [--only NAME,...]

A guest boots once, and is saved when its agent runs. Each program runs in a VM restored from that. BINARIES is what
`cargo xtask bench guest-gpu --pack` makes. OUT gets programs.md (a table of all), what consoles and programs printed, and
where the guests' kernel spent its time. Fails unless each program that runs natively is equal. Root is needed to hand
the worker to nobody.
"""
import argparse
import lzma
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import guests
import python
from disk import Disk

HERE = os.path.dirname(os.path.realpath(__file__))
BEGAN = time.monotonic()


def note(text):
    print(f"{time.monotonic() - BEGAN:6.1f} s: {text}", flush=True)


def output(*command, **more):
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True, **more).stdout


def used():
    """MiB of the GPU in use."""
    return int(output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits").split()[0])


class Machine:
    """What all guests of a run share."""

    def __init__(self, options, pools={"nvidia": []}):
        """`pools`: options of the workers' by the names of their folders."""
        self.options = options
        self.end = BEGAN + options.seconds
        self.binaries, self.out = os.path.realpath(options.binaries), os.path.realpath(options.out)
        self.work = tempfile.mkdtemp()
        os.chmod(self.work, 0o755)
        for folder in ("native", "guest"):
            os.makedirs(os.path.join(self.out, folder), exist_ok=True)
        for name in ("gantry", "gantry-nvidia"):
            shutil.copy(os.path.join(self.binaries, name), self.work)
        guests.GANTRY = self.path("gantry")
        with lzma.open(os.path.join(self.binaries, "vmlinux.xz")) as packed, open(self.path("vmlinux"), "wb") as file:
            shutil.copyfileobj(packed, file)
        with lzma.open(os.path.join(self.binaries, "System.map.xz"), "rt") as file:
            words = (line.split() for line in file)
            symbols = sorted((int(word[0], 16), word[2]) for word in words if word[1] in "tT")
        start = next(index for index, symbol in enumerate(symbols) if symbol[1] == "_stext")
        self.symbols = symbols[start:]
        with open(os.path.join(self.binaries, "kernel.txt")) as file:
            self.version = file.read().strip()
        self.children = []
        output(self.path("gantry-nvidia"), "driver-image", self.path("driver.img"))
        root = self.path("boot")
        for folder in ("bin", "dev", "proc", "root"):
            os.makedirs(os.path.join(root, folder))
        shutil.copy(os.path.join(self.binaries, "busybox"), os.path.join(root, "bin"))
        os.symlink("busybox", os.path.join(root, "bin/sh"))
        shutil.copy(os.path.join(HERE, "boot"), os.path.join(root, "init"))
        output("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal,^metadata_csum", "-d", root, self.path("boot.img"), "16M")
        for name, more in pools.items():
            self.children.append(self.pool([self.path("gantry-nvidia"), *more, "--vm"], name))

    def path(self, name):
        return os.path.join(self.work, name)

    def left(self):
        """Seconds of the run."""
        return self.end - time.monotonic()

    def pool(self, command, name):
        """Starts a process that serves VMs at a socket NAME/vm.sock, as nobody."""
        folder = self.path(name)
        os.makedirs(folder)
        shutil.chown(folder, "nobody")
        socket = os.path.join(folder, "vm.sock")
        errors = open(os.path.join(self.out, name + ".err"), "wb")
        user = ["setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups"]
        child = subprocess.Popen([*user, *command, socket], stdout=errors, stderr=errors)
        while not os.path.exists(socket):
            if child.poll() is not None:
                raise OSError(f"{command[0]} has ended: see {name}.err")
            time.sleep(0.05)
        return child

    def disk(self, name, size):
        """An empty disk."""
        with open(self.path(name), "wb") as file:
            file.truncate(size)
        return self.path(name)

    def seed(self, name, disk, memory, accel=None):
        """A guest that boots while its disk is written."""
        accel = accel or f"api=nvidia,socket={self.path('nvidia')}/vm.sock,window={self.options.window},pages=64M"
        disks = [self.path("boot.img"), disk, self.path("driver.img")]
        guest = guests.started(name, self.out, self.path("vmlinux"), memory, disks, accel, self.options.cmdline)
        self.children.append(guest.process)
        return guest

    def boot(self, guest, ready, agent="agent driver"):
        """Waits until a guest serves its console and its agent runs. The disk is written when `ready` returns."""
        guest.until("GUEST boot", self.left())
        note(f"guest {guest.name} has booted")
        ready()
        guest.send("go")
        guest.until("GUEST ready", self.left())
        guest.send(f"{agent}; cat /proc/version")
        lines, _ = guest.until("GUEST done", self.left())
        if self.version not in lines:
            raise guests.Ended(f"guest {guest.name} runs another kernel than {self.version!r}: {lines[:3]}")
        note(f"the agent of guest {guest.name} runs")

    def restored(self, name, snapshot, *more):
        guest, took = guests.restored(name, self.out, snapshot, self.path(name + ".snapshot"), *more)
        self.children.append(guest.process)
        return guest, took

    def close(self):
        for child in self.children:
            child.kill()
        shutil.rmtree(self.work, ignore_errors=True)


# Programs that cannot run in a guest, and why.
NOT_SUPPORTED = {"ipc": "a guest cannot lend a file of /dev/shm to the worker"}


def programs(options):
    """Names and commands of list.txt."""
    listed = {}
    with open(os.path.join(HERE, "list.txt")) as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                name, command = line.strip().split(" | ", 1)
                listed[name] = command
    only = listed if options.only is None else filter(None, options.only.split(","))
    return {name: listed[name] for name in only}


def natively(machine, name, command, folder):
    """Runs a program here. Returns its exit code and seconds."""
    begin = time.monotonic()
    path = os.path.join(machine.out, "native", name)
    with open(path, "wb") as out, open(path + ".err", "wb") as errors:
        try:
            done = subprocess.run(
                command.split(), cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, timeout=120
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = -1
    return code, time.monotonic() - begin


def keep(machine, name, files):
    """Keeps what a program printed in a guest, and where the kernel spent its time."""
    for kind, data in files.items():
        if kind != "profile":
            suffix = "" if kind == "output" else "." + kind
            with open(os.path.join(machine.out, "guest", name + suffix), "wb") as file:
                file.write(data)
    lines = []
    if "profile" in files:
        ticks, shares = guests.profile(files["profile"], machine.symbols)
        lines = [f"{name}: {ticks} ticks in the kernel"] + [f"    {share:6.1%} {what}" for share, what in shares[:25]]
    with open(os.path.join(machine.out, "profiles.txt"), "a") as file:
        file.write("\n".join(lines) + "\n")


def in_guests(machine, listed, snapshot):
    """Runs programs, some VMs at a time. Returns by name: exit code, seconds, usage."""
    results, waiting = {}, queue.Queue()
    for item in listed.items():
        waiting.put(item)

    def serve():
        while True:
            try:
                name, command = waiting.get_nowait()
            except queue.Empty:
                return
            seconds = min(machine.options.limit, int(machine.left()) - 30)
            if seconds < 20:
                continue
            try:
                guest, took = machine.restored(name, snapshot)
                begin = time.monotonic()
                code, files = guest.run(name, seconds, command)
                ran = time.monotonic() - begin
                guest.kill()
                keep(machine, name, files)
                spent = guests.usage(files.get("usage", b"").decode())
                results[name] = (code, ran, spent)
                note(f"{name}: exit code {code}, {ran:.1f} s, restored in {took:.1f} s, {spent}")
            except (guests.Ended, OSError) as error:
                note(f"{name}: {error}")

    threads = [threading.Thread(target=serve) for _ in range(machine.options.at_a_time)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# One thread, and arithmetic of the processor that does not depend on registers that the guest's kernel does not save.
LEARNING = {
    "ATEN_CPU_CAPABILITY": "default",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_CORETYPE": "NEHALEM",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    # Its own allocator maps parts of a huge page.
    "PYTHONMALLOC": "malloc",
}
# Programs that are run by API remoting, too.
REMOTE = ("first", "figures")
TRAINED = ("perceptron", "gpt2", "resnet18")


def losses(lines):
    """Lines of losses by what is trained, with the seconds that all and a median step took."""
    found, taken = {}, []
    for line in lines:
        words = line.split()
        if words[:2] == ["GUEST", "done"]:
            found[words[2]], taken = (taken, float(words[3]), float(words[4])), []
        elif words and words[0] == "loss":
            taken.append(line)
    return found


def remote(machine, root, table):
    """Programs by API remoting of CUDA in a guest, beside native ones."""
    pool = [os.path.join(machine.binaries, "gantry-accel"), "serve", "--api", "cuda", "--socket"]
    machine.children.append(machine.pool(pool, "cuda"))
    accel = f"api=cuda,socket={machine.path('cuda')}/vm.sock,window=2G,slices=2"
    guest = machine.seed("remote", machine.path("root.img"), "1G", accel)
    machine.boot(guest, lambda: None, "RUN= DRIVER=/lib/cuda SOCKET=/run/gantry/cuda.sock; agent")
    for name in REMOTE:
        code, files = guest.run(name, min(150, int(machine.left()) - 20), "./" + name)
        keep(machine, "remote-" + name, files)
        native, _ = natively(machine, "remote-" + name, "./" + name, os.path.join(root, "programs"))
        printed = open(os.path.join(machine.out, "native", "remote-" + name)).read()
        table[name] = (native, code, printed, files.get("output", b"").decode(errors="replace"))
        note(f"API remoting: {name}: exit codes {native} natively and {code}")
    guest.kill()


def compare_remote(machine, table):
    """Prints what API remoting did, and costs of calls and copies. Returns how many programs are right."""
    native, code, here, there = table.get("first", (0, None, "", ""))
    equal = code == native == 0 and here == there
    print(f"API remoting, first: {'equal' if equal else 'not run' if code is None else 'differs'}")
    native, code, here, there = table.get("figures", (0, None, "", ""))
    context = os.path.join(machine.out, "guest", "figures")
    context = open(context).read() if os.path.exists(context) else ""
    columns = [
        {line.split()[1]: line.split()[2:] for line in text.splitlines() if line.startswith("figure ")}
        for text in (here, context, there)
    ]
    lines = ["| median, P99 | native | guest, native context | guest, API remoting |", "|---|---|---|---|"]
    for figure, (_, _, unit) in columns[0].items():
        cells = [f"{column[figure][0]}, {column[figure][1]}" if figure in column else "-" for column in columns]
        lines.append(f"| {figure}, {unit} | {' | '.join(cells)} |")
    with open(os.path.join(machine.out, "figures.md"), "w") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))
    return equal + ("the copies are right" in there)


def follow(machine, guest, last):
    """Prints what a guest says of its progress, until it prints a line that begins with `last`. Returns all lines."""
    lines = []
    while True:
        before, match = guest.until(rf"{last}|GUEST code|at |loss ", machine.left() - 20)
        lines += [*before, match.string]
        if match[0] == last:
            return lines
        if match[0] == "GUEST code":
            raise guests.Ended(f"the program of guest {guest.name} has ended: {lines[-5:]}")
        note(f"{guest.name}: {match.string}")


def learn(machine, seed, image, table):
    """PyTorch: imported in a guest without use of the GPU, which is saved then; what is trained, each in a VM restored from
    that, beside native."""
    script, listed = os.path.join(HERE, "learning.py"), machine.path("learning.files")
    text, environment = "\n".join([*TRAINED, "end"]) + "\n", {**os.environ, **LEARNING}
    command = [sys.executable, "-u", os.path.join(HERE, "start.py"), "--list", listed, script]
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment)
    with open(os.path.join(machine.out, "native", "learning"), "w") as file:
        file.write(done.stdout + done.stderr)
    if done.returncode:
        raise OSError(f"PyTorch does not run natively: {done.stderr[-500:]}")
    native = losses(done.stdout.splitlines())
    note("PyTorch has run natively")
    driver = machine.path("libraries")
    os.makedirs(driver)
    output("debugfs", "-R", f"rdump /lib {driver}", machine.path("driver.img"))
    disk = Disk()
    python.add(disk, script, listed, machine.binaries, driver, machine.path("compiled"))
    note("PyTorch's disk is to be written")
    disk.write(image, machine.binaries)
    note(f"PyTorch's disk of {disk.size() >> 20} MiB, {len(disk.entries)} files, is written")
    machine.boot(seed, lambda: None, "agent")
    words = " ".join(f"{name}={value}" for name, value in LEARNING.items())
    begin = time.monotonic()
    seed.send(f"export {words}; stay {sys.executable} -u start.py learning.py")
    follow(machine, seed, "GUEST imported")
    imported = time.monotonic() - begin
    snapshot = machine.path("imported")
    saved = seed.save(snapshot)
    size = output("du", "-sm", snapshot).split()[0]
    note(f"PyTorch is imported in the guest in {imported:.1f} s; paused and saved in {saved:.1f} s: {size} MiB")

    done = {}

    def train(name):
        try:
            guest, took = machine.restored("learning-" + name, snapshot)
            guest.send(name)
            lines = follow(machine, guest, "GUEST done ")
            table[name] = (native[name], losses(lines)[name])
            note(f"{name}: {table[name][1][1]} s in the guest, restored in {took:.1f} s")
            done[name] = guest
        except (guests.Ended, OSError) as error:
            table[name] = (native[name], None)
            note(f"{name}: {error}")

    threads = [threading.Thread(target=train, args=(name,)) for name in TRAINED]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if "gpt2" in done:
        done["gpt2"].send("end")
        _, files = done["gpt2"].results(60)
        keep(machine, "gpt2", files)
    for name, guest in done.items():
        before = used()
        guest.kill()
        time.sleep(3)
        note(f"the VM of {name} is killed: the GPU had {before} MiB in use, and has {used()} MiB now")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("binaries")
    parser.add_argument("out")
    parser.add_argument("--seconds", type=int, default=540, help="after these, programs that still run are ended")
    parser.add_argument("--only", help="programs of list.txt, joined by commas; empty: none")
    parser.add_argument("--at-a-time", type=int, default=14, help="VMs")
    parser.add_argument("--limit", type=int, default=400, help="seconds of a program in a guest")
    parser.add_argument("--memory", default="1G", help="of a guest")
    parser.add_argument("--learning", metavar="SIZE", help="PyTorch, too, in a guest with this much memory")
    parser.add_argument("--remote", action="store_true", help="API remoting, too")
    parser.add_argument("--window", default="4G", help="of the accelerator")
    parser.add_argument("--cmdline", default="", help="added to the guest kernel's")
    options = parser.parse_args()
    os.environ["PATH"] += ":/usr/local/cuda/bin:/usr/local/nvidia/bin"
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(output("nvidia-smi", "--query-gpu=name,driver_version,memory.used", "--format=csv,noheader").strip())
    machine = Machine(options)
    try:
        return run(machine)
    finally:
        machine.close()


def run_listed(machine, listed, native, remoted):
    """Builds the programs of a list, and runs them natively and in guests. Returns what they did there."""
    options, root = machine.options, machine.path("root")
    image = machine.disk("root.img", 8 << 30)
    seed = machine.seed("seed", image, options.memory)
    done = threading.Event()

    def build():
        output(os.path.join(HERE, "make-root.sh"), machine.binaries, root)
        note("programs are built")
        os.makedirs(os.path.join(root, "driver"))
        output("debugfs", "-R", f"rdump /lib {root}/driver", machine.path("driver.img"))
        disk = Disk()
        disk.tree(root)
        disk.write(image, machine.binaries)
        note(f"the disk of {disk.size() >> 20} MiB is written")
        done.set()
        for name, command in listed.items():
            native[name] = natively(machine, name, command, os.path.join(root, "programs"))
        note("all programs have run natively")

    def built():
        while not done.wait(1):
            if not builder.is_alive() or machine.left() < 0:
                raise guests.Ended("the programs were not built")

    builder = threading.Thread(target=build, daemon=True)
    builder.start()
    remoter = None
    if options.remote:

        def remoting():
            try:
                built()
                remote(machine, root, remoted)
            except (guests.Ended, OSError) as error:
                note(f"API remoting: {error}")

        remoter = threading.Thread(target=remoting, daemon=True)
        remoter.start()
    machine.boot(seed, built)
    snapshot = machine.path("snapshot")
    note(f"paused and saved in {seed.save(snapshot):.1f} s: {output('du', '-sm', snapshot).split()[0]} MiB")
    results = in_guests(machine, {**listed, **({"figures": "./figures"} if options.remote else {})}, snapshot)
    builder.join()
    if remoter:
        remoter.join()
    return results


def run(machine):
    options, listed = machine.options, programs(machine.options)
    native, remoted, trained, results = {}, {}, {}, {}
    before, learner = used(), None
    if options.learning:
        big = machine.disk("python.img", 16 << 30)

        def learning():
            try:
                learn(machine, machine.seed("learning", big, options.learning), big, trained)
            except (guests.Ended, OSError) as error:
                note(f"PyTorch: {error}")

        learner = threading.Thread(target=learning, daemon=True)
        learner.start()
    if listed or options.remote:
        results = run_listed(machine, listed, native, remoted)
    if learner:
        learner.join()
    equal, lines = 0, ["| program | result | native | guest | of that in the kernel | page faults |", "|---|---|---|---|---|---|"]
    could = sum(1 for code, _ in native.values() if not code)
    for name in listed:
        code, took = native[name]
        paths = [os.path.join(machine.out, side, name) for side in ("native", "guest")]
        if code:
            result = f"fails natively ({code})"
        elif name not in results:
            result = "not run"
        elif results[name][0] and name in NOT_SUPPORTED:
            result, could = f"not supported: {NOT_SUPPORTED[name]}", could - 1
        elif results[name][0]:
            result = f"exit code {results[name][0]}"
        elif open(paths[0], "rb").read() == open(paths[1], "rb").read():
            result, equal = "equal", equal + 1
        else:
            result = "differs"
        _, ran, spent = results.get(name, (0, 0, guests.usage("")))
        lines.append(f"| `{name}` | {result} | {took:.1f} s | {ran:.1f} s | {spent['system']:.1f} s | {spent['faults']} |")
    if options.remote:
        equal, could = equal + compare_remote(machine, remoted), could + len(REMOTE)
    if listed:
        with open(os.path.join(machine.out, "programs.md"), "w") as file:
            file.write("\n".join(lines) + "\n")
        print("\n".join(lines))
    if options.learning:
        equal, could = equal + trains(trained, machine), could + len(TRAINED)
    print(f"{equal} of {could} that run natively are equal; kernel {machine.version}")
    time.sleep(1)
    print(f"the GPU had {before} MiB in use before, and has {used()} MiB after")
    return 0 if equal == could else 1


def trains(trained, machine):
    """Prints the table of what was trained. Returns how many are equal."""
    equal = 0
    lines = ["| PyTorch | losses | native, of it a step | guest, of it a step |", "|---|---|---|---|"]
    for name in TRAINED:
        native, guest = trained.get(name, (None, None))
        if not native or not guest:
            lines.append(f"| {name} | not run | | |")
            continue
        is_equal = bool(native[0]) and native[0] == guest[0]
        equal += is_equal
        times = " | ".join(f"{took:.1f} s, {step * 1e3:.1f} ms" for _, took, step in (native, guest))
        lines.append(f"| {name} | {'equal' if is_equal else f'{native[0]} and {guest[0]}'} | {times} |")
    with open(os.path.join(machine.out, "learning.md"), "w") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))
    return equal


if __name__ == "__main__":
    sys.exit(main())
