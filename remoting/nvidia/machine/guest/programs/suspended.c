/*
 * Computes with memory of the device by the driver API, a line for each step: suspended STEPS SECONDS, which sleeps so long
 * after each. It may be suspended at any time.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { COUNT = 1 << 22 };

static const char ptx[] =
	".version 7.0\n.target sm_70\n.address_size 64\n"
	".visible .entry next(.param .u64 a, .param .u32 step){\n"
	".reg .b32 r<8>; .reg .b64 d<4>;\n"
	"ld.param.u64 d1,[a]; ld.param.u32 r1,[step];\n"
	"mov.u32 r2,%ctaid.x; mov.u32 r3,%ntid.x; mov.u32 r4,%tid.x; mad.lo.s32 r5,r2,r3,r4;\n"
	"cvta.to.global.u64 d1,d1; mul.wide.s32 d3,r5,4; add.s64 d1,d1,d3;\n"
	"ld.global.u32 r6,[d1]; mul.lo.u32 r6,r6,1664525; add.u32 r7,r5,r1; xor.b32 r6,r6,r7; st.global.u32 [d1],r6;\n"
	"ret;\n}\n";

static void *library;
#define CALL(name, ...) \
	do { \
		int (*call)() = dlsym(library, #name), code = call ? call(__VA_ARGS__) : -1; \
		if (code) { \
			printf("%s %d\n", #name, code); \
			exit(1); \
		} \
	} while (0)

int main(int count, char **words)
{
	int device, steps = atoi(words[1]), seconds = atoi(words[2]);
	void *context, *module, *next;
	unsigned *pinned;
	unsigned long long memory;

	setvbuf(stdout, NULL, _IOLBF, 0);
	library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library) {
		puts(dlerror());
		return 1;
	}
	CALL(cuInit, 0);
	CALL(cuDeviceGet, &device, 0);
	CALL(cuCtxCreate_v2, &context, 0, device);
	CALL(cuModuleLoadData, &module, ptx);
	CALL(cuModuleGetFunction, &next, module, "next");
	CALL(cuMemAlloc_v2, &memory, (size_t)COUNT * 4);
	CALL(cuMemsetD32_v2, memory, 1, (size_t)COUNT);
	/* Memory of the host that the device uses. */
	CALL(cuMemHostAlloc, &pinned, (size_t)COUNT * 4, 0);
	for (unsigned step = 0; step < steps; step++) {
		void *arguments[] = { &memory, &step };
		unsigned sum = 0;

		CALL(cuLaunchKernel, next, COUNT / 256, 1, 1, 256, 1, 1, 0, NULL, arguments, NULL);
		CALL(cuMemcpyDtoHAsync_v2, pinned, memory, (size_t)COUNT * 4, NULL);
		CALL(cuCtxSynchronize);
		for (int at = 0; at < COUNT; at++) sum = sum * 31 + pinned[at];
		printf("step %u %08x\n", step, sum);
		sleep(seconds);
	}
	CALL(cuCtxDestroy_v2, context);
	puts("steps are done");
	return 0;
}
