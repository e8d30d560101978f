// Figures of the CUDA runtime: what calls cost and how fast copies are, the same program natively and
// through Gantry. Prints lines of a name, a value and a unit with tabs between them, as measure.sh reads them.
#include <cuda_runtime.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t error = (call);                                                                \
        if (error != cudaSuccess) {                                                                \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));                         \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

__global__ void nothing(int *, int, int, int) {}

static double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

static double cpu_of_thread() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static void say(const char *what, double value, const char *unit) {
    printf("%s\t%.4f\t%s\n", what, value, unit);
    fflush(stdout);
}

// The median of `times` runs of what takes some seconds.
template <typename Run> static double median(int times, Run run) {
    std::vector<double> all;
    for (int i = 0; i < times; i++) {
        double start = now();
        run();
        all.push_back(now() - start);
    }
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
}

static void copies(const char *kind, char *host, char *device, size_t most) {
    for (size_t size = 64 << 10; size <= most; size *= 4) {
        int times = size >= (64 << 20) ? 7 : 41;
        char name[64];
        for (auto way : {cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost}) {
            bool up = way == cudaMemcpyHostToDevice;
            auto copy = [&] {
                CHECK(cudaMemcpyAsync(up ? device : host, up ? host : device, size, way));
                CHECK(cudaStreamSynchronize(0));
            };
            copy();
            double took = median(times, copy);
            snprintf(name, sizeof name, "%s %zu KiB %s", kind, size >> 10, up ? "H2D" : "D2H");
            say(name, size / took * 1e-9, "GB/s");
        }
    }
}

static void pageable(char *device, size_t most) {
    char *host = (char *)malloc(most);
    memset(host, 2, most);
    copies("pageable", host, device, most);
    std::free(host);
}

// Copies of memory that is not pinned, alone: the first one, which finds nothing prepared, and then as all.
static int only_copies(size_t most) {
    char *device, *host = (char *)malloc(most);
    memset(host, 3, most);
    CHECK(cudaMalloc(&device, most));
    double start = now();
    CHECK(cudaMemcpy(device, host, most, cudaMemcpyHostToDevice));
    say("first pageable copy of 256 MiB H2D", (now() - start) * 1e3, "ms");
    std::free(host);
    pageable(device, most);
    return 0;
}

int main(int count, char **arguments) {
    // `copies` and `calls`: only those. A small run for machines where an interpreter stands in for a GPU.
    bool small = count > 1 && !strcmp(arguments[1], "small");
    bool only_calls = count > 1 && !strcmp(arguments[1], "calls");
    if (count > 1 && !strcmp(arguments[1], "copies")) return only_copies(256 << 20);
    int calls = small ? 50 : 2000;
    size_t most = small ? (1 << 20) : (256 << 20);
    double start = now();
    CHECK(cudaFree(0));
    say("context", (now() - start) * 1e3, "ms");
    int *memory;
    CHECK(cudaMalloc(&memory, most));
    start = now();
    nothing<<<1, 32>>>(memory, 1, 2, 3);
    CHECK(cudaDeviceSynchronize());
    say("first kernel", (now() - start) * 1e3, "ms");
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));

    say("synchronize an idle stream",
        median(calls, [&] { CHECK(cudaStreamSynchronize(stream)); }) * 1e6, "us");
    say("query an idle stream", median(calls, [&] { CHECK(cudaStreamQuery(stream)); }) * 1e6, "us");
    size_t free, all;
    say("memory info", median(calls / 4, [&] { CHECK(cudaMemGetInfo(&free, &all)); }) * 1e6, "us");
    say("malloc and free of 1 MiB", median(calls / 20, [&] {
            void *some;
            CHECK(cudaMalloc(&some, 1 << 20));
            CHECK(cudaFree(some));
        }) * 1e6,
        "us");
    say("launch and synchronize", median(calls, [&] {
            nothing<<<1, 32, 0, stream>>>(memory, 1, 2, 3);
            CHECK(cudaStreamSynchronize(stream));
        }) * 1e6,
        "us");
    // As long as the driver has not waited for the whole context since a launch, its look at any stream takes longer.
    say("synchronize a stream behind launches",
        median(calls, [&] { CHECK(cudaStreamSynchronize(stream)); }) * 1e6, "us");
    say("query a stream behind launches", median(calls, [&] { CHECK(cudaStreamQuery(stream)); }) * 1e6,
        "us");
    say("launch, event, synchronize the event", median(calls, [&] {
            nothing<<<1, 32, 0, stream>>>(memory, 1, 2, 3);
            CHECK(cudaEventRecord(event, stream));
            CHECK(cudaEventSynchronize(event));
        }) * 1e6,
        "us");
    // So many that what is between host and device does not fill.
    const int burst = small ? 20 : 400;
    double busy = 0, elapsed = median(small ? 3 : 41, [&] {
        double before = cpu_of_thread();
        for (int i = 0; i < burst; i++) nothing<<<1, 32, 0, stream>>>(memory, 1, 2, 3);
        busy = cpu_of_thread() - before;
        CHECK(cudaStreamSynchronize(stream));
    });
    say("launches, each of 400", elapsed / burst * 1e6, "us");
    say("the caller's CPU per launch", busy / burst * 1e6, "us");

    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < 100; i++) nothing<<<1, 32, 0, stream>>>(memory, 1, 2, 3);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    say("a graph of 100 kernels and synchronize", median(small ? 3 : 201, [&] {
            CHECK(cudaGraphLaunch(executable, stream));
            CHECK(cudaStreamSynchronize(stream));
        }) * 1e6,
        "us");

    if (only_calls) return 0;
    char *host;
    CHECK(cudaMallocHost(&host, most));
    memset(host, 1, most);
    copies("pinned", host, (char *)memory, most);
    CHECK(cudaFreeHost(host));
    pageable((char *)memory, most);
    return 0;
}
