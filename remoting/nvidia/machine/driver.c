/* A small CUDA driver-API program: each step prints ok or its error, and a
 * checksum, so that two runs can be compared line by line. Times go to stderr. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
typedef int R; typedef unsigned long long DP; typedef void *H;
static void *lib;
static double ms(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec / 1e6; }
static void *sym(const char *n) { void *p = dlsym(lib, n); if (!p) { printf("missing %s\n", n); exit(2); } return p; }
#define C(n, ...) ((R (*)())sym(#n))(__VA_ARGS__)
static int fails;
static R ck(const char *w, R r) { printf("%-28s %s", w, r ? "ERROR " : "ok\n"); if (r) { printf("%d\n", r); fails++; } fflush(stdout); return r; }
static const char ptx[] =
".version 7.0\n.target sm_70\n.address_size 64\n"
".visible .entry mad(.param .u64 a, .param .u64 b, .param .u32 n){\n"
".reg .pred p; .reg .b32 r<8>; .reg .b64 d<8>; .reg .f32 f<4>;\n"
"ld.param.u64 d1,[a]; ld.param.u64 d2,[b]; ld.param.u32 r1,[n];\n"
"mov.u32 r2,%ctaid.x; mov.u32 r3,%ntid.x; mov.u32 r4,%tid.x; mad.lo.s32 r5,r2,r3,r4;\n"
"setp.ge.s32 p,r5,r1; @p bra E;\n"
"cvta.to.global.u64 d1,d1; cvta.to.global.u64 d2,d2; mul.wide.s32 d3,r5,4; add.s64 d1,d1,d3; add.s64 d2,d2,d3;\n"
"ld.global.f32 f1,[d1]; ld.global.f32 f2,[d2]; fma.rn.f32 f3,f1,f2,f1; st.global.f32 [d1],f3;\nE: ret;\n}\n";
static uint64_t sum(const void *p, size_t n) { const uint8_t *b = p; uint64_t h = 1469598103934665603ull; for (size_t i = 0; i < n; i++) h = (h ^ b[i]) * 1099511628211ull; return h; }

static int childpart(int s)
{       /* import a shared allocation sent by the parent and check it */
	char c[64]; char b; struct iovec v = { &b, 1 };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = c, .msg_controllen = sizeof c };
	int fd = -1; H ctx, h = 0; DP va; int dev;
	if (recvmsg(s, &m, 0) != 1) return 1;
	for (struct cmsghdr *q = CMSG_FIRSTHDR(&m); q; q = CMSG_NXTHDR(&m, q)) memcpy(&fd, CMSG_DATA(q), 4);
	lib = dlopen("libcuda.so.1", RTLD_NOW);
	if (C(cuInit, 0) || C(cuDeviceGet, &dev, 0) || C(cuCtxCreate_v2, &ctx, 0, dev)) return 2;
	R r = C(cuMemImportFromShareableHandle, &h, (void *)(intptr_t)fd, 1);
	if (r) return 100 + r % 100;
	if (C(cuMemAddressReserve, &va, (size_t)2 << 20, (size_t)0, 0ull, 0ull)) return 4;
	if (C(cuMemMap, va, (size_t)2 << 20, (size_t)0, h, 0ull)) return 5;
	struct { int type, id, fl; } ac = { 1, 0, 3 };
	if (C(cuMemSetAccess, va, (size_t)2 << 20, &ac, (size_t)1)) return 6;
	uint32_t w[4];
	if (C(cuMemcpyDtoH_v2, w, va, (size_t)16)) return 7;
	return w[0] == 0x5a5a5a5a && w[3] == 0x5a5a5a5a ? 0 : 8;
}

int main(int ac, char **av)
{
	int dev, v = 0, a = 0; H ctx, mod, fn, st, ev0, ev1; DP A, B; size_t fr, to; char name[100];
	int n = 1 << 20;
	if (ac > 2 && !strcmp(av[1], "child")) return childpart(atoi(av[2]));
	double t0 = ms(), t1, t2;
	lib = dlopen("libcuda.so.1", RTLD_NOW);
	if (!lib) { printf("%s\n", dlerror()); return 2; }
	t1 = ms();
	if (ck("cuInit", C(cuInit, 0))) return 1;
	t2 = ms(); fprintf(stderr, "TIME dlopen %.1f ms cuInit %.1f ms\n", t1 - t0, t2 - t1);
	ck("cuDeviceGet", C(cuDeviceGet, &dev, 0));
	ck("cuDeviceGetName", C(cuDeviceGetName, name, 100, dev)); printf("name %s\n", name);
	C(cuDriverGetVersion, &v); printf("version %d\n", v);
	int at[] = { 16, 41, 75, 76, 83, 88, 89, 90, 91, 99, 100, 101, 102, 103, 105, 115, 124, 128 };
	for (unsigned i = 0; i < sizeof at / 4; i++) { a = -1; C(cuDeviceGetAttribute, &a, at[i], dev); printf("attribute %d = %d\n", at[i], a); }
	double t3 = ms();
	if (ck("cuCtxCreate", C(cuCtxCreate_v2, &ctx, 0, dev))) return 1;
	double t4 = ms(); fprintf(stderr, "TIME cuCtxCreate %.1f ms\n", t4 - t3);
	ck("cuMemGetInfo", C(cuMemGetInfo_v2, &fr, &to)); printf("total %zu\n", to);
	ck("cuModuleLoadData", C(cuModuleLoadData, &mod, ptx));
	ck("cuModuleGetFunction", C(cuModuleGetFunction, &fn, mod, "mad"));
	ck("cuMemAlloc", C(cuMemAlloc_v2, &A, (size_t)n * 4)); ck("cuMemAlloc", C(cuMemAlloc_v2, &B, (size_t)n * 4));
	float *h = malloc(n * 4), *o = malloc(n * 4);
	for (int i = 0; i < n; i++) h[i] = (float)(i % 1000) * .25f;
	ck("cuMemcpyHtoD pageable", C(cuMemcpyHtoD_v2, A, h, (size_t)n * 4));
	ck("cuMemcpyHtoD", C(cuMemcpyHtoD_v2, B, h, (size_t)n * 4));
	ck("cuStreamCreate", C(cuStreamCreate, &st, 1));
	ck("cuEventCreate", C(cuEventCreate, &ev0, 0)); ck("cuEventCreate", C(cuEventCreate, &ev1, 1 /* blocking */));
	void *arg[] = { &A, &B, &n };
	ck("cuEventRecord", C(cuEventRecord, ev0, st));
	ck("cuLaunchKernel", C(cuLaunchKernel, fn, n / 256, 1, 1, 256, 1, 1, 0, st, arg, NULL));
	ck("cuEventRecord", C(cuEventRecord, ev1, st));
	ck("cuEventSynchronize block", C(cuEventSynchronize, ev1));
	ck("cuStreamSynchronize", C(cuStreamSynchronize, st));
	ck("cuMemcpyDtoH", C(cuMemcpyDtoH_v2, o, A, (size_t)n * 4)); printf("sum %016llx\n", (unsigned long long)sum(o, n * 4));
	double t5 = ms(); fprintf(stderr, "TIME first work %.1f ms\n", t5 - t4);
	{ double s = ms(); for (int i = 0; i < 20000; i++) C(cuLaunchKernel, fn, 1, 1, 1, 32, 1, 1, 0, st, arg, NULL); C(cuStreamSynchronize, st); fprintf(stderr, "TIME launch %.2f us each\n", (ms() - s) / 20); }
	void *pin;
	ck("cuMemAllocHost 64M", C(cuMemAllocHost_v2, &pin, (size_t)64 << 20));
	DP big; ck("cuMemAlloc 64M", C(cuMemAlloc_v2, &big, (size_t)64 << 20));
	memset(pin, 7, 64 << 20);
	{ double s = ms(); for (int i = 0; i < 16; i++) C(cuMemcpyHtoDAsync_v2, big, pin, (size_t)64 << 20, st); C(cuStreamSynchronize, st); fprintf(stderr, "TIME pinned H2D %.1f GB/s\n", 16 * 67.108864 / (ms() - s)); }
	ck("cuMemcpyDtoH pinned", C(cuMemcpyDtoH_v2, pin, big, (size_t)64 << 20)); printf("sum %016llx\n", (unsigned long long)sum(pin, 1 << 20));
	ck("cuMemFreeHost", C(cuMemFreeHost, pin));
	/* user memory */
	void *um = mmap(NULL, 8 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(um, 3, 8 << 20);
	if (!ck("cuMemHostRegister 8M", C(cuMemHostRegister_v2, um, (size_t)8 << 20, 0))) {
		DP ud = 0;
		memset(um, 9, 8 << 20);
		ck("copy from registered", C(cuMemcpyHtoD_v2, big, um, (size_t)8 << 20));
		memset(um, 0, 8 << 20);
		ck("copy to registered", C(cuMemcpyDtoH_v2, um, big, (size_t)8 << 20)); printf("sum %016llx\n", (unsigned long long)sum(um, 8 << 20));
		ck("cuMemHostGetDevicePointer", C(cuMemHostGetDevicePointer_v2, &ud, um, 0));
		ck("memset by GPU", C(cuMemsetD32_v2, ud, 0x01020304, (size_t)2 << 20)); C(cuCtxSynchronize);
		printf("sum %016llx\n", (unsigned long long)sum(um, 8 << 20));
		ck("cuMemHostUnregister", C(cuMemHostUnregister, um));
	}
	/* managed, small */
	DP mg;
	if (getenv("T_MANAGED") && !ck("cuMemAllocManaged 4M", C(cuMemAllocManaged, &mg, (size_t)4 << 20, 1))) {
		memset((void *)mg, 1, 4 << 20);
		ck("cuMemsetD8 managed", C(cuMemsetD8_v2, mg, 5, (size_t)2 << 20)); C(cuCtxSynchronize);
		printf("sum %016llx\n", (unsigned long long)sum((void *)mg, 4 << 20));
		ck("cuMemFree managed", C(cuMemFree_v2, mg));
	}
	/* host callback and event from another thread's queue */
	/* virtual memory, shareable handle */
	struct { int type, req; struct { int type, id; } loc; void *win; struct { unsigned char c, g; unsigned short u; unsigned char r[4]; } f; } pr = { 1, 1, { 1, 0 }, 0, { 0 } };
	size_t gran = 0; H hd = 0; DP va = 0;
	ck("cuMemGetAllocationGran", C(cuMemGetAllocationGranularity, &gran, &pr, 0)); printf("granularity %zu\n", gran);
	if (!ck("cuMemCreate 2M", C(cuMemCreate, &hd, (size_t)2 << 20, &pr, 0ull))) {
		struct { int type, id, fl; } acc = { 1, 0, 3 };
		int fd = -1;
		ck("cuMemAddressReserve", C(cuMemAddressReserve, &va, (size_t)2 << 20, (size_t)0, 0ull, 0ull));
		ck("cuMemMap", C(cuMemMap, va, (size_t)2 << 20, (size_t)0, hd, 0ull));
		ck("cuMemSetAccess", C(cuMemSetAccess, va, (size_t)2 << 20, &acc, (size_t)1));
		ck("cuMemsetD32 vmm", C(cuMemsetD32_v2, va, 0x5a5a5a5a, (size_t)512 << 10)); C(cuCtxSynchronize);
		if (!ck("export to fd", C(cuMemExportToShareableHandle, &fd, hd, 1, 0ull))) {
			int sp[2]; socketpair(AF_UNIX, SOCK_STREAM, 0, sp);
			pid_t p = fork();
			if (!p) { char b[16]; snprintf(b, 16, "%d", sp[1]); execl("/proc/self/exe", av[0], "child", b, (char *)0); _exit(9); }
			char c[CMSG_SPACE(4)] = { 0 }, b = 1; struct iovec w = { &b, 1 };
			struct msghdr m = { .msg_iov = &w, .msg_iovlen = 1, .msg_control = c, .msg_controllen = sizeof c };
			struct cmsghdr *q = CMSG_FIRSTHDR(&m); q->cmsg_level = SOL_SOCKET; q->cmsg_type = SCM_RIGHTS; q->cmsg_len = CMSG_LEN(4); memcpy(CMSG_DATA(q), &fd, 4);
			sendmsg(sp[0], &m, 0);
			int ws = 0; waitpid(p, &ws, 0);
			ck("import in a second process", WIFEXITED(ws) ? WEXITSTATUS(ws) : 999);
			close(fd);
		}
		C(cuMemUnmap, va, (size_t)2 << 20); C(cuMemRelease, hd); C(cuMemAddressFree, va, (size_t)2 << 20);
	}
	/* many allocations, graph-free loop, then teardown */
	DP x[64]; for (int i = 0; i < 64; i++) if (C(cuMemAlloc_v2, &x[i], (size_t)(i + 1) << 20)) fails++;
	for (int i = 0; i < 64; i++) C(cuMemFree_v2, x[i]);
	ck("pool alloc", C(cuMemAllocAsync, &x[0], (size_t)32 << 20, st)); ck("pool free", C(cuMemFreeAsync, x[0], st)); ck("sync", C(cuStreamSynchronize, st));
	C(cuMemFree_v2, A); C(cuMemFree_v2, B); C(cuMemFree_v2, big);
	double t6 = ms();
	ck("cuCtxDestroy", C(cuCtxDestroy_v2, ctx));
	fprintf(stderr, "TIME cuCtxDestroy %.1f ms total %.1f ms\n", ms() - t6, ms() - t0);
	printf("fails %d\n", fails);
	return !!fails;
}
