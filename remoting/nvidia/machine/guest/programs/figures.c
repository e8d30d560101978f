/* Costs of calls and copies by the driver API: lines of a name, median, 99th percentile and unit. `figures MIB`: copies of up
 * to so many MiB (64). */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>

static const char ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing(){ ret; }\n"
	".visible .entry busy(){\n.reg .u64 t<3>;\n.reg .pred p;\nmov.u64 t0, %globaltimer;\nadd.u64 t1, t0, 200000;\n"
	"L: mov.u64 t2, %globaltimer;\nsetp.lt.u64 p, t2, t1;\n@p bra L;\nret;\n}\n";

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
	X(cuCtxSynchronize) X(cuMemAlloc_v2) X(cuMemHostAlloc) X(cuMemcpyHtoD_v2) X(cuMemcpyDtoH_v2) X(cuEventCreate) \
	X(cuEventRecord) X(cuEventSynchronize)
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

int main(int count, char **words)
{
	int device;
	void *context, *module, *nothing, *busy, *event;
	unsigned long long memory;
	char *host, *pageable;
	size_t most = (size_t)(count > 1 ? atoi(words[1]) : 64) << 20;
	library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library) return puts(dlerror()), 1;
#define FIND(name) name = dlsym(library, #name);
	EACH(FIND)
	/* A call of the kernel's interface that computes nothing: the list of cards. */
	int control = open("/dev/nvidiactl", O_RDWR);
	char cards[2304] = {0};
	FIGURE("kernel-call", 4000, 0, OK(ioctl, control, 0xc90046c8, cards));
	double begin = now();
	OK(cuInit, 0);
	took[0] = now() - begin;
	print("initialize", 1, 0);
	OK(cuDeviceGet, &device, 0);
	begin = now();
	OK(cuCtxCreate_v2, &context, 0, device);
	took[0] = now() - begin;
	print("context", 1, 0);
	OK(cuModuleLoadData, &module, ptx);
	OK(cuModuleGetFunction, &nothing, module, "nothing");
	OK(cuModuleGetFunction, &busy, module, "busy");
#define LAUNCH_OF(function) OK(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL)
#define LAUNCH LAUNCH_OF(nothing)
	FIGURE("launch-synchronize", 2000, 0, LAUNCH; OK(cuCtxSynchronize));
	FIGURE("launch", 2000, 0, LAUNCH);
	OK(cuCtxSynchronize);
	/* 3: the thread sleeps while it waits, and no time is taken by the device. The kernel takes 200 us. */
	OK(cuEventCreate, &event, 3);
	FIGURE("sleep-until-200us-have-passed", 1000, 0, LAUNCH_OF(busy); OK(cuEventRecord, event, NULL); OK(cuEventSynchronize, event));
	OK(cuMemAlloc_v2, &memory, most);
	OK(cuMemHostAlloc, &host, most, 0);
	memset(host, 1, most);
	for (size_t size = 4 << 10; size <= most; size *= 4) {
		char name[64];
		int times = size > 128 << 20 ? 10 : size > 8 << 20 ? 40 : 300;
		snprintf(name, sizeof name, "to-device-%zuK", size >> 10);
		FIGURE(name, times, size, OK(cuMemcpyHtoD_v2, memory, host, size));
		snprintf(name, sizeof name, "from-device-%zuK", size >> 10);
		FIGURE(name, times, size, OK(cuMemcpyDtoH_v2, host, memory, size));
	}
	pageable = malloc(16 << 20);
	memset(pageable, 1, 16 << 20);
	FIGURE("pageable-to-device-16384K", 40, 16 << 20, OK(cuMemcpyHtoD_v2, memory, pageable, 16 << 20));
	FIGURE("pageable-from-device-16384K", 40, 16 << 20, OK(cuMemcpyDtoH_v2, pageable, memory, 16 << 20));
	for (size_t i = 0; i < most; i++)
		if (host[i] != 1 || pageable[i % (16 << 20)] != 1) return puts("the copies are wrong"), 1;
	puts("the copies are right");
	return 0;
}
