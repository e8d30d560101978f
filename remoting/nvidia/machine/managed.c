/* Managed memory by the CUDA driver API: host and device write it by turns, with advice, prefetches, attachment to a
 * stream, freed and taken again, and a child of fork. Each step prints ok or its error, and a
 * sum, so that a native run and one through the worker can be compared line by line.
 *
 *     gcc -O1 -w -o managed managed.c -ldl && ./managed
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int R;
typedef unsigned long long DP;
typedef void *H;

static void *lib;
static int fails;

static void *sym(const char *name)
{
	void *found = dlsym(lib, name);
	if (!found) {
		printf("missing %s\n", name);
		exit(2);
	}
	return found;
}
#define C(name, ...) ((R (*)())sym(#name))(__VA_ARGS__)

static R ck(const char *what, R r)
{
	if (r)
		printf("%-28s ERROR %d\n", what, r), fails++;
	else
		printf("%-28s ok\n", what);
	fflush(stdout);
	return r;
}

static uint64_t sum(const void *p, size_t n)
{
	const uint8_t *b = p;
	uint64_t h = 1469598103934665603ull;
	for (size_t i = 0; i < n; i++)
		h = (h ^ b[i]) * 1099511628211ull;
	return h;
}

/* Adds the index to each word. */
static const char ptx[] =
	".version 7.0\n.target sm_70\n.address_size 64\n"
	".visible .entry add(.param .u64 a, .param .u32 n){\n"
	".reg .pred p; .reg .b32 r<8>; .reg .b64 d<4>;\n"
	"ld.param.u64 d1,[a]; ld.param.u32 r1,[n];\n"
	"mov.u32 r2,%ctaid.x; mov.u32 r3,%ntid.x; mov.u32 r4,%tid.x; mad.lo.s32 r5,r2,r3,r4;\n"
	"setp.ge.s32 p,r5,r1; @p bra E;\n"
	"cvta.to.global.u64 d1,d1; mul.wide.s32 d2,r5,4; add.s64 d1,d1,d2;\n"
	"ld.global.u32 r6,[d1]; add.u32 r6,r6,r5; st.global.u32 [d1],r6;\nE: ret;\n}\n";

int main(void)
{
	int dev, n = 1 << 20, managed = 0;
	H ctx, mod, add, stream;
	DP a;
	size_t bytes = (size_t)n * 4;

	lib = dlopen("libcuda.so.1", RTLD_NOW);
	if (!lib) {
		printf("%s\n", dlerror());
		return 2;
	}
	if (ck("cuInit", C(cuInit, 0)) || ck("cuDeviceGet", C(cuDeviceGet, &dev, 0)) ||
	    ck("cuCtxCreate", C(cuCtxCreate_v2, &ctx, 0, dev)) ||
	    ck("cuModuleLoadData", C(cuModuleLoadData, &mod, ptx)) ||
	    ck("cuModuleGetFunction", C(cuModuleGetFunction, &add, mod, "add")) ||
	    ck("cuStreamCreate", C(cuStreamCreate, &stream, 1)))
		return 1;
	C(cuDeviceGetAttribute, &managed, 83, dev);
	printf("managed %d\n", managed);

	for (int round = 0; round < 3; round++) {
		void *arguments[] = { &a, &n };
		if (ck("cuMemAllocManaged", C(cuMemAllocManaged, &a, bytes, 1)))
			return 1;
		uint32_t *words = (uint32_t *)(uintptr_t)a;
		for (int i = 0; i < n; i++)
			words[i] = i ^ round;
		if (round == 1) {
			ck("preferred location", C(cuMemAdvise, a, bytes, 3, dev));
			ck("accessed by", C(cuMemAdvise, a, bytes, 5, dev));
			ck("prefetch to the device", C(cuMemPrefetchAsync, a, bytes, dev, stream));
		}
		if (round == 2)
			ck("attach", C(cuStreamAttachMemAsync, stream, a, (size_t)0, 4));
		ck("launch", C(cuLaunchKernel, add, n / 256, 1, 1, 256, 1, 1, 0, stream, arguments, NULL));
		if (round == 1)
			ck("prefetch to the host", C(cuMemPrefetchAsync, a, bytes, -1, stream));
		ck("synchronize", C(cuStreamSynchronize, stream));
		printf("sum %016llx\n", (unsigned long long)sum(words, bytes));
		/* A word that the host changes in between. */
		words[7] = 1000;
		ck("launch again", C(cuLaunchKernel, add, n / 256, 1, 1, 256, 1, 1, 0, stream, arguments, NULL));
		ck("synchronize", C(cuStreamSynchronize, stream));
		printf("word %u sum %016llx\n", words[7], (unsigned long long)sum(words, bytes));
		ck("cuMemsetD8", C(cuMemsetD8_v2, a, 5, bytes / 2));
		ck("cuCtxSynchronize", C(cuCtxSynchronize));
		printf("sum %016llx\n", (unsigned long long)sum(words, bytes));
		fflush(stdout);
		pid_t child = fork();
		if (!child)
			_exit(0);
		int status = -1;
		waitpid(child, &status, 0);
		printf("child %d word %x\n", status, words[0]);
		ck("cuMemFree", C(cuMemFree_v2, a));
	}
	/* Many, of which each is freed before the next: none of it is lost. */
	for (int i = 0; i < 500; i++) {
		if (C(cuMemAllocManaged, &a, (size_t)64 << 20, 1) || C(cuMemsetD8_v2, a, i, (size_t)4096) ||
		    C(cuCtxSynchronize) || *(uint8_t *)(uintptr_t)a != (uint8_t)i || C(cuMemFree_v2, a)) {
			printf("allocation %d failed\n", i);
			fails++;
			break;
		}
	}
	ck("cuStreamDestroy", C(cuStreamDestroy_v2, stream));
	ck("cuCtxDestroy", C(cuCtxDestroy_v2, ctx));
	printf("%d failed\n", fails);
	return fails != 0;
}
