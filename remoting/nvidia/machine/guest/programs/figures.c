/* Costs of calls and copies by the driver API: lines of a name, median, 99th percentile and unit. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing(){ ret; }\n";

static void *library;
#define OK(function, ...) \
	do { \
		int code = function(__VA_ARGS__); \
		if (code) { \
			printf("%s: %d\n", #function, code); \
			exit(1); \
		} \
	} while (0)
#define ENTRY(name) static int (*name)();
#define EACH(X) \
	X(cuInit) X(cuDeviceGet) X(cuCtxCreate_v2) X(cuModuleLoadData) X(cuModuleGetFunction) X(cuLaunchKernel) \
	X(cuCtxSynchronize) X(cuMemAlloc_v2) X(cuMemHostAlloc) X(cuMemcpyHtoD_v2) X(cuMemcpyDtoH_v2)
EACH(ENTRY)

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int earlier(const void *a, const void *b)
{
	double d = *(const double *)a - *(const double *)b;
	return (d > 0) - (d < 0);
}

static double took[5000];
/* Bytes: rates in GB/s; 0: times in microseconds. */
static void print(const char *name, int times, size_t bytes)
{
	qsort(took, times, sizeof *took, earlier);
	double median = took[times / 2], late = took[times * 99 / 100];
	if (bytes) median = bytes / median / 1e3, late = bytes / late / 1e3;
	printf("figure %s %.3f %.3f %s\n", name, median, late, bytes ? "GB/s" : "us");
	fflush(stdout);
}

#define FIGURE(name, times, bytes, ...) \
	do { \
		for (int i = -10; i < times; i++) { \
			double begin = now(); \
			__VA_ARGS__; \
			if (i >= 0) took[i] = now() - begin; \
		} \
		print(name, times, bytes); \
	} while (0)

int main(void)
{
	int device;
	void *context, *module, *nothing;
	unsigned long long memory;
	char *host;
	size_t most = 64 << 20;
	library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library) return puts(dlerror()), 1;
#define FIND(name) name = dlsym(library, #name);
	EACH(FIND)
	OK(cuInit, 0);
	OK(cuDeviceGet, &device, 0);
	OK(cuCtxCreate_v2, &context, 0, device);
	OK(cuModuleLoadData, &module, ptx);
	OK(cuModuleGetFunction, &nothing, module, "nothing");
#define LAUNCH OK(cuLaunchKernel, nothing, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL)
	FIGURE("launch-synchronize", 2000, 0, LAUNCH; OK(cuCtxSynchronize));
	FIGURE("launch", 2000, 0, LAUNCH);
	OK(cuCtxSynchronize);
	OK(cuMemAlloc_v2, &memory, most);
	OK(cuMemHostAlloc, &host, most, 0);
	memset(host, 1, most);
	for (size_t size = 4 << 10; size <= most; size *= 4) {
		char name[64];
		int times = size > 8 << 20 ? 40 : 300;
		snprintf(name, sizeof name, "to-device-%zuK", size >> 10);
		FIGURE(name, times, size, OK(cuMemcpyHtoD_v2, memory, host, size));
		snprintf(name, sizeof name, "from-device-%zuK", size >> 10);
		FIGURE(name, times, size, OK(cuMemcpyDtoH_v2, host, memory, size));
	}
	for (size_t i = 0; i < most; i++)
		if (host[i] != 1) return puts("the copies are wrong"), 1;
	puts("the copies are right");
	return 0;
}
