/* What the tests' programs use of the CUDA runtime API, declared here: the vendor's headers are not
 * needed. Numbers are those of the API. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned x, y, z; } dim3;
typedef int cudaError_t;
typedef void *cudaStream_t, *cudaEvent_t, *cudaGraph_t, *cudaGraphExec_t, *cudaGraphNode_t;
typedef void *cudaKernel_t, *cudaLibrary_t, *cudaMemPool_t;

enum { HostToHost, HostToDevice, DeviceToHost, DeviceToDevice, Default };
enum {
    Success = 0, InvalidValue = 1, MemoryAllocation = 2, InvalidConfiguration = 9, InvalidPitch = 12,
    InvalidSymbol = 13, InvalidDirection = 21, InvalidFunction = 98, InvalidDevice = 101, NoKernelImage = 209,
    InvalidHandle = 400, NotReady = 600, IllegalAddress = 700, NotSupported = 801,
};

struct attributes {
    size_t shared, constant, local;
    int threads, registers, ptx, binary, cache, dynamic, carveout, more[6], reserved[16];
};
struct pointer { int type, device; void *device_pointer, *host_pointer; long reserved[8]; };
struct config { dim3 grid, block; size_t shared; cudaStream_t stream; void *attributes; unsigned count; };
struct kernel_node { void *function; dim3 grid, block; unsigned shared; void **parameters, **extra; };
struct fill_node { void *to; size_t pitch; unsigned value, element; size_t width, height; };
struct host_node { void (*function)(void *); void *data; };
struct pitched { void *at; size_t pitch, width, height; };
struct extent { size_t width, height, depth; };
struct position { size_t x, y, z; };
struct volume {
    void *from_array; struct position from_position; struct pitched from;
    void *to_array; struct position to_position; struct pitched to;
    struct extent extent; int kind;
};

void **__cudaRegisterFatBinary(void *);
void __cudaRegisterFatBinaryEnd(void **);
void __cudaUnregisterFatBinary(void **);
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, dim3 *, dim3 *, int *);
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int);
void __cudaRegisterManagedVar(void **, void **, char *, const char *, int, size_t, int, int);
char __cudaInitModule(void **);
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t);
cudaError_t __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *);
cudaError_t __cudaGetKernel(cudaKernel_t *, const void *);
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t);
cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t);
cudaError_t cudaLaunchKernel_ptsz(const void *, dim3, dim3, void **, size_t, cudaStream_t);
cudaError_t cudaLaunchKernelExC(const struct config *, const void *, void **);
cudaError_t cudaLaunchCooperativeKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t);
cudaError_t cudaFuncGetAttributes(struct attributes *, const void *);
cudaError_t cudaFuncSetAttribute(const void *, int, int);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *, const void *, int, size_t);
cudaError_t cudaGetDeviceCount(int *);
cudaError_t cudaGetDevice(int *);
cudaError_t cudaSetDevice(int);
cudaError_t cudaDeviceReset(void);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaGetDeviceProperties(void *, int);
cudaError_t cudaDeviceGetAttribute(int *, int, int);
cudaError_t cudaRuntimeGetVersion(int *);
cudaError_t cudaDriverGetVersion(int *);
cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
const char *cudaGetErrorName(cudaError_t);
const char *cudaGetErrorString(cudaError_t);
cudaError_t cudaMalloc(void *, size_t);
cudaError_t cudaMallocManaged(void *, size_t, unsigned);
cudaError_t cudaMallocHost(void *, size_t);
cudaError_t cudaMallocPitch(void *, size_t *, size_t, size_t);
cudaError_t cudaMallocAsync(void *, size_t, cudaStream_t);
cudaError_t cudaMallocFromPoolAsync(void *, size_t, cudaMemPool_t, cudaStream_t);
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *, int);
cudaError_t cudaFree(void *);
cudaError_t cudaFreeAsync(void *, cudaStream_t);
cudaError_t cudaFreeHost(void *);
cudaError_t cudaHostRegister(void *, size_t, unsigned);
cudaError_t cudaHostUnregister(void *);
cudaError_t cudaMemGetInfo(size_t *, size_t *);
cudaError_t cudaPointerGetAttributes(struct pointer *, const void *);
cudaError_t cudaMemcpy(void *, const void *, size_t, int);
cudaError_t cudaMemcpy_ptds(void *, const void *, size_t, int);
cudaError_t cudaMemcpyAsync(void *, const void *, size_t, int, cudaStream_t);
cudaError_t cudaMemcpyAsync_ptsz(void *, const void *, size_t, int, cudaStream_t);
cudaError_t cudaMemcpy2D(void *, size_t, const void *, size_t, size_t, size_t, int);
cudaError_t cudaMemcpy2DAsync(void *, size_t, const void *, size_t, size_t, size_t, int, cudaStream_t);
cudaError_t cudaMemcpy3D(const struct volume *);
cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, int);
cudaError_t cudaMemcpyFromSymbol(void *, const void *, size_t, size_t, int);
cudaError_t cudaGetSymbolAddress(void *, const void *);
cudaError_t cudaGetSymbolSize(size_t *, const void *);
cudaError_t cudaMemset(void *, int, size_t);
cudaError_t cudaMemsetAsync(void *, int, size_t, cudaStream_t);
cudaError_t cudaMemset_ptds(void *, int, size_t);
cudaError_t cudaMemset2D(void *, size_t, int, size_t, size_t);
cudaError_t cudaMemset2D_ptds(void *, size_t, int, size_t, size_t);
cudaError_t cudaMemset3D(struct pitched, int, struct extent);
cudaError_t cudaMemset3D_ptds(struct pitched, int, struct extent);
cudaError_t cudaMemcpyPeer(void *, int, const void *, int, size_t);
cudaError_t cudaStreamCreate(cudaStream_t *);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *, unsigned);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *, unsigned, int);
cudaError_t cudaStreamDestroy(cudaStream_t);
cudaError_t cudaStreamQuery(cudaStream_t);
cudaError_t cudaStreamQuery_ptsz(cudaStream_t);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaStreamSynchronize_ptsz(cudaStream_t);
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned);
cudaError_t cudaStreamGetPriority(cudaStream_t, int *);
cudaError_t cudaStreamAddCallback(cudaStream_t, void (*)(cudaStream_t, cudaError_t, void *), void *, unsigned);
cudaError_t cudaLaunchHostFunc(cudaStream_t, void (*)(void *), void *);
cudaError_t cudaLaunchHostFunc_ptsz(cudaStream_t, void (*)(void *), void *);
cudaError_t cudaEventCreate(cudaEvent_t *);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *, unsigned);
cudaError_t cudaEventDestroy(cudaEvent_t);
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t);
cudaError_t cudaEventQuery(cudaEvent_t);
cudaError_t cudaEventSynchronize(cudaEvent_t);
cudaError_t cudaEventElapsedTime(float *, cudaEvent_t, cudaEvent_t);
cudaError_t cudaStreamBeginCapture(cudaStream_t, int);
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *);
cudaError_t cudaStreamIsCapturing(cudaStream_t, int *);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, int *, unsigned long long *, cudaGraph_t *, void *, void *, size_t *);
cudaError_t cudaThreadExchangeStreamCaptureMode(int *);
cudaError_t cudaGraphCreate(cudaGraph_t *, unsigned);
cudaError_t cudaGraphDestroy(cudaGraph_t);
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *, size_t *);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *, cudaGraph_t, unsigned long long);
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *, cudaGraph_t, unsigned long long);
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t);
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *, cudaGraph_t, const cudaGraphNode_t *, size_t, const struct kernel_node *);
cudaError_t cudaGraphAddMemcpyNode1D(cudaGraphNode_t *, cudaGraph_t, const cudaGraphNode_t *, size_t, void *, const void *, size_t, int);
cudaError_t cudaGraphAddMemsetNode(cudaGraphNode_t *, cudaGraph_t, const cudaGraphNode_t *, size_t, const struct fill_node *);
cudaError_t cudaGraphAddHostNode(cudaGraphNode_t *, cudaGraph_t, const cudaGraphNode_t *, size_t, const struct host_node *);
cudaError_t cudaLibraryLoadData(cudaLibrary_t *, const void *, void *, void *, unsigned, void *, void *, unsigned);
cudaError_t cudaLibraryGetKernel(cudaKernel_t *, cudaLibrary_t, const char *);
cudaError_t cudaLibraryGetGlobal(void *, size_t *, cudaLibrary_t, const char *);
cudaError_t cudaLibraryUnload(cudaLibrary_t);
cudaError_t cudaGetDriverEntryPointByVersion(const char *, void *, unsigned, unsigned long long, int *);
cudaError_t cudaProfilerStart(void);
cudaError_t cudaProfilerStop(void);
cudaError_t cudaIpcGetMemHandle(void *, void *);

/* Fails with what was written in the source, and what the runtime says. */
#define IS(expected, call) is(expected, call, #call, __LINE__)
#define OK(call) IS(Success, call)
#define HOLDS(what) holds(what, #what, __LINE__)

static void is(int expected, cudaError_t got, const char *call, int line) {
    if (got != expected) {
        printf("line %d: %s is %d %s, not %d\n", line, call, got, cudaGetErrorName(got), expected);
        exit(1);
    }
}

static void holds(int what, const char *text, int line) {
    if (!what) {
        printf("line %d: not so: %s\n", line, text);
        exit(1);
    }
}

/* What the compiler puts before an image: __fatBinC_Wrapper_t. */
struct wrapper { int magic, version; const void *data; void *more; };

/* A fat binary with one image of PTX for sm_75, as the compiler's: header, image's header, image. */
static const void *fat_binary(const char *ptx) {
    size_t bytes = strlen(ptx) + 1, padded = (bytes + 7) & ~(size_t)7;
    char *all = calloc(1, 16 + 64 + padded);
    *(unsigned *)all = 0xba55ed50;
    *(unsigned short *)(all + 4) = 1;
    *(unsigned short *)(all + 6) = 16;
    *(size_t *)(all + 8) = 64 + padded;
    char *header = all + 16;
    *(unsigned short *)header = 1;
    *(unsigned short *)(header + 2) = 0x101;
    *(unsigned *)(header + 4) = 64;
    *(size_t *)(header + 8) = padded;
    *(unsigned *)(header + 28) = 75;
    memcpy(header + 64, ptx, bytes);
    return all;
}

static dim3 of(unsigned x) { return (dim3){x, 1, 1}; }

/* `kernel<<<grid, block, shared, stream>>>(...)` as the compiler writes it: the configuration is pushed
 * by the caller and popped by the host function. */
static void stub(const void *function, cudaKernel_t *handle, void **arguments) {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
    if (!*handle) (void)__cudaGetKernel(handle, function);
    if (__cudaPopCallConfiguration(&grid, &block, &shared, &stream) != Success) return;
    (void)__cudaLaunchKernel(*handle, grid, block, arguments, shared, stream);
}
