#!/bin/bash
# CUDA natively and through Gantry on a machine with an NVIDIA GPU, nvcc and perhaps PyTorch, in one go:
#
#     FOLDER/run.sh OUT [SECONDS]
#
# FOLDER is what `cargo xtask bench cuda --pack` has made; OUT is a folder for the results. After SECONDS
# (default: 290) nothing more is begun. Parts, each with a limit of its own, those that say most first:
#
#   probe      the driver in a confined worker, and if it does not start, without which part it does
#   vectorAdd  one program, natively and through Gantry; all that follows goes on with what worked
#   figures    calls and copies by turns, medians; nothing else runs meanwhile
#   calls      calls by turns, where application and worker have four neighbouring processors
#   ring       calls by turns: natively, from a process, and from ring 3 of a guest on /dev/kvm
#   torch      20 losses of three models, natively and through Gantry, compared
#   copies     copies alone: the first, and then as above
#   registered what the driver does while a stream waits for a word, and copies of registered memory: registered.c
#   busy       copies of memory that is not pinned beside as many busy processes as half of the processors
#   smi        what scripts ask nvidia-smi of devices, answered by it and by gantry-smi, compared
#   tests      the programs that test the stand-in driver, on this driver and through Gantry
#   refusals   what each entry point answers where it has to refuse, on this driver and through Gantry, compared:
#              refusals.md
#   suites     tests of cuda-python, Triton and PyTorch as far as they were packed: suites.sh, beside the two below
#   python     more of PyTorch, transformers, cuda.core and Numba's own tests, as far as they are installed: python.sh,
#              beside
#   fork       what children of fork may do, and loaders of data, natively and through Gantry, compared; PyTorch that runs
#              out of memory
#   samples    NVIDIA's samples as far as they were packed: compiled, and outputs compared
#
# GANTRY_PARTS names the parts from `figures` on, where not all are to be run. GANTRY_SUITES names suites; GANTRY_SAMPLES names samples, where not all are to be run. GANTRY_MODELS names the models, GANTRY_ROUNDS is how often figures are taken (3), GANTRY_NO_TESTS leaves tests out.
#
# On a machine without a GPU, GANTRY_DRIVER names a stand-in for libcuda.so.1.
set -u
here=$(dirname "$(realpath "$0")")
out=$(realpath "${1:?usage: $0 OUT [SECONDS]}")
limit=${2:-290}
begin=$SECONDS
left() { echo $((limit - (SECONDS - begin))); }
work=$(mktemp -d)
mkdir -p "$work/bin" "$work/cache" "$out"
pool=
trap '[ -z "$pool" ] || kill "$pool" 2>/dev/null; rm -rf "$work"' EXIT
log=$out/cuda.txt
say() { echo "$*" | tee -a "$log"; }
part() { say ""; say "== $* (after $((SECONDS - begin)) s)"; }
# Whether a part is to be run.
wanted() { [ -z "${GANTRY_PARTS:-}" ] || [[ " $GANTRY_PARTS " = *" $1 "* ]]; }
# At most so many seconds, and no longer than there are.
within() {
    local seconds=$1 rest
    shift
    rest=$(left)
    [ "$rest" -gt 3 ] || { echo "no time left" >&2; return 125; }
    [ "$seconds" -lt "$rest" ] || seconds=$rest
    timeout -k 3 "$seconds" "$@"
}

cuda=$(dirname "$(dirname "$(realpath "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")")
[ -d "$cuda/lib64" ] || cuda=${CUDA_HOME:-/usr/local/cuda}
arch=${GANTRY_ARCH:--arch=sm_90}
driver=${GANTRY_DRIVER:-$(ldconfig -p | sed -n 's/.*libcuda.so.1 .*x86-64.*=> //p' | head -1)}
[ -n "$driver" ] || driver=$(find /usr/local/nvidia /usr/lib -name libcuda.so.1 2>/dev/null | head -1)
readable=$(dirname "$(realpath "$driver")")
# cuBLAS of one version on both sides: that of PyTorch, if there is one, so that losses can be equal.
blas=$(python3 -c 'import nvidia, os
for path in nvidia.__path__:
    for folder, _, files in os.walk(path):
        if "libcublas.so.13" in files: print(folder)' 2> /dev/null | head -1)
[ -n "$blas" ] || blas=$cuda/lib64
libraries=
if [ -e "$here/guest/libcublas.so.13" ] && [ -e "$blas/libcublas.so.13" ]; then
    libraries="--cuda-libraries $blas --readable $(dirname "$(realpath "$blas/libcublas.so.13")")"
fi
mkdir "$work/native" "$work/guest"
# Where the driver is no library of the system's.
if [ -n "${GANTRY_DRIVER:-}" ]; then
    ln -s "$(realpath "$driver")" "$work/native/libcuda.so.1"
    # The vendor's runtime library does not work with it.
    cp "$here/guest/libcudart.so.13" "$work/native/"
fi
cp "$here"/guest/* "$work/guest/"
ln -sf "$work/guest/libgantry_cuda.so" "$work/guest/libcuda.so.1"
ln -sf libcuda.so.1 "$work/guest/libcuda.so"
# The two ways, as programs: `timeout` and `xargs` run no functions.
cat > "$work/run-native" << END
#!/bin/sh
LD_LIBRARY_PATH=$work/native:$blas:$cuda/lib64:\$LD_LIBRARY_PATH exec "\$@"
END
cat > "$work/run-remoted" << END
#!/bin/sh
GANTRY_CUDA=$work/cuda.sock LD_LIBRARY_PATH=$work/guest:$blas:$cuda/lib64:\$LD_LIBRARY_PATH exec "\$@"
END
chmod +x "$work/run-native" "$work/run-remoted"
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}

# A pool whose workers go without what is named; on some processors only, with a second parameter.
start() {
    [ -z "$pool" ] || { kill "$pool" 2>/dev/null; wait "$pool" 2>/dev/null; }
    rm -f "$work/cuda.sock"
    # shellcheck disable=SC2086
    ${2:+taskset -c $2} "$here/gantry-accel" serve --api cuda --socket "$work/cuda.sock" --cache "$work/cache" \
        --library "$driver" --readable "$readable" $libraries ${1:+--without "$1"} ${GANTRY_HEAP:+--heap $GANTRY_HEAP} \
        >> "$out/pool.txt" 2>&1 &
    pool=$!
    for _ in $(seq 50); do [ -S "$work/cuda.sock" ] && return; sleep 0.1; done
    say "the pool does not start:"; tail -5 "$out/pool.txt" | tee -a "$log"
}

: > "$log"
say "$(uname -srm), $(nproc) processors, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1)"
say "driver $driver, CUDA in $cuda, cuBLAS in $blas"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1 | tee -a "$log"
nvcc --version 2>/dev/null | tail -2 | head -1 | tee -a "$log"
ls -l /dev/nvidia* 2>/dev/null | tee -a "$log"


compile() {
    cd "$work" || exit
    nvcc $arch -O2 -cudart shared -o bin/figures "$here/programs/figures.cu" > bin/figures.log 2>&1
    [ ! -e "$here/samples.tar.gz" ] || tar -xzf "$here/samples.tar.gz" -C "$work"
    "$here/compile.sh" "$work/samples" "$arch" vectorAdd
    touch "$work/compiled"
}
export arch
compile < /dev/null > /dev/null 2>&1 &

part "probe: the driver in a worker as confined as any"
without=
within 60 "$here/gantry-accel" probe --api cuda --cache "$work" --library "$driver" --readable "$readable" \
    ${GANTRY_HEAP:+--heap $GANTRY_HEAP} 2>&1 | tee "$work/probe" | tee -a "$log"
if ! grep -q '^the driver works in a worker$' "$work/probe"; then
    without=$(sed -n 's/.*does not get along with a part of the confinement: //p' "$work/probe")
    [ -n "$without" ] || without=seccomp,landlock,arena,memory,capabilities
fi
if [ -x "$here/strace/strace" ] || command -v strace > /dev/null; then
    trace=strace
    [ ! -x "$here/strace/strace" ] ||
        trace="/lib64/ld-linux-x86-64.so.2 --library-path $here/strace $here/strace/strace"
    # shellcheck disable=SC2086
    within 40 $trace -f -o "$work/trace" "$here/gantry-accel" tried --api cuda --cache "$work/cache" \
        --library "$driver" --readable "$readable" ${GANTRY_HEAP:+--heap $GANTRY_HEAP} > "$work/traced" 2>&1
    say "system calls that failed there, from confinement on: strace-failed.txt"
    sed -n '/seccomp(/,$p' "$work/trace" | grep -E ' = -1 E' > "$out/strace-failed.txt"
    {
        echo "# sockets, names of threads, and how often each call was made"
        grep -E ' (socket|socketpair|bind|listen|connect|setsockopt|getsockopt|accept4?)\(|/comm"' "$work/trace"
        sed 's/^[0-9]* *//; s/(.*//' "$work/trace" | grep -E '^[a-z_0-9]+$' | sort | uniq -c | sort -rn
    } > "$out/strace-calls.txt"
    grep -E ' = -1 E(PERM|ACCES|NOSYS|INVAL)' "$out/strace-failed.txt" | sed 's/^[0-9]* *//' | sort | uniq -c | sort -rn |
        head -40 | tee -a "$log"
    # The end, if it does not work.
    grep -q 'kernel: right' "$work/traced" || tail -c 4000000 "$work/trace" > "$out/strace-end.txt"
fi

part "vectorAdd by the runtime, through Gantry"
say "workers go without: ${without:-nothing}"
start "$without"
for _ in $(seq 60); do [ -e "$work/bin/figures" ] && break; sleep 1; done
tail -3 "$work/bin/figures.log" 2>/dev/null | tee -a "$log"
for _ in $(seq 40); do [ -x "$work/samples/vectorAdd/program" ] || [ -e "$work/compiled" ] && break; sleep 1; done
one() {
    (cd "$work/samples/vectorAdd" 2>/dev/null && within 15 "$work/run-$1" ./program 2>&1)
}
one native > "$work/native.one"; say "native: status $?: $(tail -2 "$work/native.one" | tr '\n' ' ')"
works=
for try in "$without" arena landlock seccomp seccomp,landlock,arena,memory,capabilities; do
    start "$try"
    one remoted > "$work/remoted.one"; code=$?
    say "through Gantry, without ${try:-nothing}: status $code: $(tail -3 "$work/remoted.one" | tr '\n' ' ')"
    if [ $code = 0 ] && grep -q PASSED "$work/remoted.one"; then works=yes; without=$try; break; fi
    say "the pool's last words: $(tail -2 "$out/pool.txt" | tr '\n' ' ')"
done
[ -n "$works" ] || say "nothing works through Gantry"

# Native and Gantry by turns, with these arguments: `by_turns NAME ROUNDS ARGUMENTS`.
by_turns() {
    local name=$1 rounds=$2 round which run
    shift 2
    mkdir "$work/$name"
    for round in $(seq "$rounds"); do
        for which in native gantry; do
            run=run-native; [ $which = native ] || run=run-remoted
            # shellcheck disable=SC2086
            (within 25 ${near:+taskset -c $near} "$work/$run" "$work/bin/figures" "$@" > "$work/$name/$which.$round") 2>&1 | tail -2 | tee -a "$log"
        done
    done
    awk -F '\t' -v names="native gantry" -f "$here/medians.awk" "$work/$name"/* | tee -a "$log"
}

part "figures: by turns, medians of the rounds"
say "load before: $(cut -d' ' -f1-3 /proc/loadavg)"
within 40 "$here/gantry-accel" distances --group 4 > "$work/distances" 2> /dev/null
say "a cache line from the first processor to each and back, in ns: $(head -1 "$work/distances")"
! wanted figures || by_turns figures "${GANTRY_ROUNDS:-3}" ${GANTRY_SMALL:-}
say "load behind: $(cut -d' ' -f1-3 /proc/loadavg)"
if wanted ring && [ -x "$here/ring/gantry-ring-bench" ] && [ -w /dev/kvm ]; then
    part "ring: calls by turns: natively, from a process, and from ring 3 of a guest"
    within 100 "$here/ring/gantry-ring-bench" "$here/ring" --api cuda --library "$driver" ${GANTRY_HEAP:+--heap $GANTRY_HEAP} \
        --rounds "${GANTRY_ROUNDS:-3}" 2>&1 | tee -a "$log"
fi
if [ -z "${GANTRY_SMALL:-}" ]; then
    if wanted calls; then
        part "calls, where application and worker have four neighbouring processors"
        near=$(sed -n 's/^near: //p' "$work/distances")
        start "$without" "$near"
        by_turns calls "${GANTRY_ROUNDS:-3}" calls
        near=
        start "$without"
    fi
    if wanted copies; then
        part "copies alone: the first, and then as above"
        by_turns copies 3 copies
    fi
    if wanted registered && cc -std=gnu17 -O1 -o "$work/bin/registered" "$here/programs/registered.c" -ldl -lpthread; then
        part "registered: while a stream waits for a word, natively and through Gantry"
        for what in behaviour blocking "blocking copy" queue "queue copy"; do
            for which in native remoted; do
                say "-- $what, $which"
                # shellcheck disable=SC2086
                within 60 "$work/run-$which" "$work/bin/registered" $what 2>&1 | tee -a "$log"
            done
        done
        part "registered: copies by turns"
        mkdir "$work/registered"
        for round in 1 2 3; do
            within 25 "$work/run-native" "$work/bin/registered" figures > "$work/registered/native.$round"
            within 25 "$work/run-remoted" "$work/bin/registered" figures > "$work/registered/gantry.$round"
        done
        awk -F '\t' -v names="native gantry" -f "$here/medians.awk" "$work/registered"/* | tee -a "$log"
    fi
    if wanted busy; then
        part "copies beside busy processes, one for each second processor"
        busy=()
        for _ in $(seq $(($(nproc) / 2))); do
            (while :; do :; done) &
            busy+=($!)
        done
        by_turns busy 3 copies
        kill "${busy[@]}"
        wait "${busy[@]}" 2> /dev/null
    fi
fi

part "torch: losses of 20 steps"
# Libraries of Python packages have paths of their own, which go before LD_LIBRARY_PATH.
preload=$work/guest/libcuda.so.1:$work/guest/libcudart.so.13
for library in libcublasLt.so.13 libcublas.so.13; do
    [ ! -e "$work/guest/$library" ] || preload=$preload:$work/guest/$library
done
cat > "$work/torch-native" << END
#!/bin/sh
exec python3 "\$@"
END
cat > "$work/torch-remoted" << END
#!/bin/sh
export GANTRY_CUDA=$work/cuda.sock LD_PRELOAD=$preload
exec python3 "\$@"
END
chmod +x "$work/torch-native" "$work/torch-remoted"
export work CUBLAS_WORKSPACE_CONFIG=:4096:8
first_result='import torch; print((torch.ones(3, device="cuda") + 1).sum().item())'
models="elementwise"
[ ! -e "$work/guest/libcublas.so.13" ] || models=${GANTRY_MODELS-elementwise mlp gpt}
if ! wanted torch; then
    say "left out"
elif within 60 python3 -c 'import torch; print("PyTorch", torch.__version__)' 2>&1 | tee -a "$log" | grep -q PyTorch; then
    for model in $models; do
        for which in native remoted; do
            start_of=$SECONDS
            within 70 "$work/torch-$which" "$here/programs/$model.py" > "$work/$model.$which" 2> "$work/$model.$which.err"
            say "$model $which: status $?, $(grep -c ^loss "$work/$model.$which") losses, the last $(grep ^loss "$work/$model.$which" | tail -1), $(grep '^#' "$work/$model.$which"), $((SECONDS - start_of)) s in all"
            tail -4 "$work/$model.$which.err" | cut -c1-300 | tee -a "$log"
        done
        if grep -q ^loss "$work/$model.native" &&
            cmp -s <(grep ^loss "$work/$model.native") <(grep ^loss "$work/$model.remoted"); then
            say "$model: $(grep -c ^loss "$work/$model.native") losses are equal"
        else
            say "$model: the losses differ:"
            diff <(grep ^loss "$work/$model.native") <(grep ^loss "$work/$model.remoted") | head -12 | tee -a "$log"
        fi
        {
            echo "## $model: native, then through Gantry"
            cat "$work/$model.native" "$work/$model.remoted"
            tail -30 "$work/$model.remoted.err"
        } >> "$out/torch.txt"
    done
else
    say "no PyTorch here"
fi

if [ -e "$work/elementwise.native" ] && [ -x "$here/gantry-cuda" ]; then
    part "run: the same by gantry-cuda run, and from a program's start to its first result, by turns"
    run() { GANTRY_CUDA=$work/cuda.sock within 60 "$here/gantry-cuda" run --libraries "$work/guest" "$@"; }
    run python3 "$here/programs/elementwise.py" > "$work/elementwise.run" 2> "$work/elementwise.err"
    say "gantry-cuda run: status $?, $(grep -c ^loss "$work/elementwise.run") losses, $(cmp <(grep ^loss "$work/elementwise.native") <(grep ^loss "$work/elementwise.run") && echo equal)"
    tail -2 "$work/elementwise.err" | cut -c1-300 | tee -a "$log"
    for _ in 1 2 3; do
        for which in native remoted run; do
            start_of=$(date +%s%N)
            if [ $which = run ]; then run python3 -c "$first_result"; else within 60 "$work/torch-$which" -c "$first_result"; fi > /dev/null 2>&1
            say "start to first result, $which: status $?, $((($(date +%s%N) - start_of) / 1000000)) ms"
        done
    done
fi

if wanted smi && [ -x "$here/gantry-smi" ] && [ -n "$(command -v nvidia-smi)" ]; then
    part "smi: what scripts ask nvidia-smi of devices, answered by it and by gantry-smi"
    smi() { GANTRY_CUDA=$work/cuda.sock within 20 "$here/gantry-smi" --libraries "$work/guest" "$@"; }
    for asked in -L "--query-gpu=index,count,name,uuid,compute_cap,pci.bus_id --format=csv"; do
        # shellcheck disable=SC2086
        say "$asked: $(cmp <(within 20 nvidia-smi $asked) <(smi $asked) && echo equal)"
    done
    took() { local start_of; start_of=$(date +%s%N); "$@" > /dev/null 2>&1; echo $((($(date +%s%N) - start_of) / 1000000)); }
    # Only with how much memory is used there has to be a context.
    for asked in -L "--query-gpu=memory.used --format=csv"; do
        for _ in 1 2 3; do
            # shellcheck disable=SC2086
            say "$asked: nvidia-smi took $(took within 20 nvidia-smi $asked) ms, gantry-smi $(took smi $asked) ms"
        done
    done
    smi 2>&1 | tee -a "$log"
fi

part "fork: children of fork, loaders of data, and PyTorch out of memory"
if wanted fork; then
    if cc -O1 -o "$work/bin/fork" "$here/programs/fork/fork.c" -ldl -lpthread 2>&1 | tee -a "$log"; then
        mkdir "$work/fork"
        # Here alone, as the native run has the vendor's.
        ln -sf "$work/guest/libgantry_nvml.so" "$work/guest/libnvidia-ml.so.1"
        for which in native remoted; do
            within 200 "$work/run-$which" "$work/bin/fork" > "$work/fork/fork.$which" \
                2> "$work/fork/fork.$which.err"
            say "fork.c $which: status $?"
            within 120 "$work/run-$which" python3 "$here/programs/fork/loaders.py" > "$work/fork/loaders.$which" \
                2> "$work/fork/loaders.$which.err"
            say "loaders.py $which: status $?"
        done
        cp "$work/torch-native" "$work/memory-native"
        sed "s|LD_PRELOAD=|&$work/guest/libnvidia-ml.so.1:|" "$work/torch-remoted" > "$work/memory-remoted"
        chmod +x "$work/memory-remoted"
        for which in native remoted; do
            within 100 "$work/memory-$which" "$here/programs/fork/memory.py" > "$work/fork/memory.$which" \
                2> "$work/fork/memory.$which.err"
            say "memory.py $which: status $?"
        done
        for name in fork loaders memory; do
            say "$name: $(cmp "$work/fork/$name.native" "$work/fork/$name.remoted" && echo equal)"
            diff "$work/fork/$name.native" "$work/fork/$name.remoted" | tee -a "$log"
            {
                echo "## $name: natively, then through Gantry"
                cat "$work/fork/$name.native" "$work/fork/$name.remoted"
                tail -n 5 "$work/fork/$name".*.err
            } >> "$out/fork.txt"
        done
        rm "$work/guest/libnvidia-ml.so.1"
    fi
fi

part "tests: the programs that test the stand-in, on this driver and through Gantry"
if wanted tests && [ -d "$here/tests" ] && [ -z "${GANTRY_DRIVER:-}${GANTRY_NO_TESTS:-}" ]; then
    cp -r "$here/tests" "$work/tests"
    # They look for the driver beside them, and for the pool where it was built.
    ln -sf "$(realpath "$driver")" "$work/tests/libgantry_cuda_driver.so"
    ln -sf "$work/guest/libgantry_cuda.so" "$work/tests/libgantry_cuda.so"
    built=$(cat "$here/tests/built")
    mkdir -p "$(dirname "$built")"
    ln -sf "$here/gantry-accel" "$built"
    for which in native remoted; do
        within 30 "$work/tests/$which" --test-threads 4 > "$work/tests.$which" 2>&1
        say "$which: $(grep '^test result' "$work/tests.$which" || tail -2 "$work/tests.$which")"
        grep -E '^test .*FAILED|panicked at|^  (left|right):|^Gantry|^gantry' "$work/tests.$which" | head -40 | tee -a "$log"
    done
fi

if wanted refusals; then
    part "refusals: what each entry point answers where it has to refuse"
    for which in native remoted; do
        within 150 "$work/run-$which" python3 "$here/programs/refusals.py" "$here/programs/entry-points.txt" \
            > "$work/refusals.$which" 2> "$work/refusals.$which.err"
        say "$which: status $?, $(wc -l < "$work/refusals.$which") answers"
    done
    python3 "$here/programs/refusals.py" --compare "$work/refusals.native" "$work/refusals.remoted" > "$out/refusals.md"
    head -1 "$out/refusals.md" | tee -a "$log"
fi

part "python: beside the samples"
export -f within left
export here out work limit
# Seconds count from the start of each shell.
if wanted python; then
    begin=$((begin - SECONDS)) "$here/python.sh" > "$work/python.txt" 2>&1 &
    python=$!
fi

if wanted suites && [ -e "$here/suites.tar.gz" ]; then
    part "suites: beside, too"
    begin=$((begin - SECONDS)) "$here/suites.sh" > "$work/suites.txt" 2>&1 &
    suites=$!
fi

part "samples: outputs compared"
if wanted samples && [ -d "$work/samples" ]; then
    ls "$work/samples" | grep -v '^Common$' | { [ -z "${GANTRY_SAMPLES:-}" ] && cat || grep -wE "${GANTRY_SAMPLES// /|}"; } > "$work/names"
    sample() {
        cd "$work/samples/$1" || exit
        [ -x program ] || timeout -k 3 120 "$here/compile.sh" "$work/samples" "$arch" "$1"
        [ -x program ] || { echo "$1 | not built | |"; exit; }
        for which in native remoted; do
            timeout -k 3 45 "$work/run-$which" ./program < /dev/null > "$which.out" 2> "$which.err"
            echo $? > "$which.code"
        done
        # Times and rates, addresses and numbers of processes differ from run to run.
        filter() { sed -E 's/0x[0-9a-f]+/ADDRESS/g' "$1" | grep -viE '[0-9. (](ms|us|usec|msec|sec|s)\b|Mpixels|second|time|GB/s|MB/s|flop|throughput|bandwidth|clock|[0-9]x|rate|perf'; }
        if cmp -s native.out remoted.out; then same=equal
        elif cmp -s <(filter native.out) <(filter remoted.out); then same="equal but for times"
        else same=DIFFERS
        fi
        echo "$1 | $(cat native.code) | $(cat remoted.code) | $same"
        if [ "$same" = DIFFERS ] || [ "$(cat native.code)" != "$(cat remoted.code)" ]; then
            {
                echo "## $1"
                diff native.out remoted.out | head -16 | cut -c1-200
                head -6 remoted.err | cut -c1-300
            } >> "$work/differences.$1"
        fi
    }
    export -f sample
    rest=$(left)
    timeout -k 3 "$rest" xargs -P "${GANTRY_JOBS:-12}" -I NAME bash -c 'sample NAME' < "$work/names" > "$work/table"
    sort "$work/table" > "$out/samples.txt"
    say "of $(wc -l < "$work/names"): $(wc -l < "$out/samples.txt") ran; natively without error $(grep -c '| 0 | [0-9]* |' "$out/samples.txt"); through Gantry, too, and equal $(grep -cE '\| 0 \| 0 \| equal' "$out/samples.txt")"
    grep -vE '\| 0 \| 0 \| equal' "$out/samples.txt" | tee -a "$log"
    cat "$work"/differences.* >> "$out/samples.txt" 2>/dev/null
fi
if wanted python; then
    part "python"
    wait $python
    tee -a "$log" < "$work/python.txt"
    # Few files come back from some machines.
    tar -czf "$out/python.tar.gz" -C "$out" python && rm -r "$out/python"
fi
if wanted suites && [ -e "$here/suites.tar.gz" ]; then
    part "suites"
    wait $suites
    tee -a "$log" < "$work/suites.txt"
    tar -czf "$out/suites.tar.gz" -C "$out" suites && rm -r "$out/suites"
fi
part "done"
tail -40 "$out/pool.txt" | sort | uniq -c | sort -rn | head -20 | tee -a "$log"
