/* The first program of a guest: a vector addition by the driver API, by PTX. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static const char ptx[] =
	".version 7.0\n.target sm_70\n.address_size 64\n"
	".visible .entry add(.param .u64 a, .param .u64 b, .param .u32 n){\n"
	".reg .pred p; .reg .b32 r<8>; .reg .b64 d<8>; .reg .f32 f<4>;\n"
	"ld.param.u64 d1,[a]; ld.param.u64 d2,[b]; ld.param.u32 r1,[n];\n"
	"mov.u32 r2,%ctaid.x; mov.u32 r3,%ntid.x; mov.u32 r4,%tid.x; mad.lo.s32 r5,r2,r3,r4;\n"
	"setp.ge.s32 p,r5,r1; @p bra E;\n"
	"cvta.to.global.u64 d1,d1; cvta.to.global.u64 d2,d2; mul.wide.s32 d3,r5,4; add.s64 d1,d1,d3; add.s64 d2,d2,d3;\n"
	"ld.global.f32 f1,[d1]; ld.global.f32 f2,[d2]; add.f32 f3,f1,f2; st.global.f32 [d1],f3;\nE: ret;\n}\n";

static void *library;
#define CALL(name, ...) \
	do { \
		int (*call)() = dlsym(library, #name), code = call ? call(__VA_ARGS__) : -1; \
		printf("%s %d\n", #name, code); \
		fflush(stdout); \
		if (code) exit(1); \
	} while (0)

int main(void)
{
	int device, n = 10000;
	void *context, *module, *add, *arguments[3];
	unsigned long long a, b;
	float *host = malloc(n * 4), *sums = malloc(n * 4);
	library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library) {
		puts(dlerror());
		return 1;
	}
	CALL(cuInit, 0);
	CALL(cuDeviceGet, &device, 0);
	CALL(cuCtxCreate_v2, &context, 0, device);
	CALL(cuModuleLoadData, &module, ptx);
	CALL(cuModuleGetFunction, &add, module, "add");
	CALL(cuMemAlloc_v2, &a, (size_t)n * 4);
	CALL(cuMemAlloc_v2, &b, (size_t)n * 4);
	for (int i = 0; i < n; i++) host[i] = i * .5f;
	CALL(cuMemcpyHtoD_v2, a, host, (size_t)n * 4);
	CALL(cuMemcpyHtoD_v2, b, host, (size_t)n * 4);
	arguments[0] = &a, arguments[1] = &b, arguments[2] = &n;
	CALL(cuLaunchKernel, add, (n + 255) / 256, 1, 1, 256, 1, 1, 0, NULL, arguments, NULL);
	CALL(cuCtxSynchronize);
	CALL(cuMemcpyDtoH_v2, sums, a, (size_t)n * 4);
	for (int i = 0; i < n; i++)
		if (sums[i] != i) {
			printf("sum %d is %g\n", i, sums[i]);
			return 1;
		}
	CALL(cuCtxDestroy_v2, context);
	puts("all sums are right");
	return 0;
}
